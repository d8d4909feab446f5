"""What Lightning's loops keep from step to step, and how it gets into a replacement.

It is saved when a call begins, for a survivor that has to make the call again, and it is part of the rank-local state.
The place in the loops (:class:`Stage`) is a part of it, so a process goes on from there, whichever of its rank it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flashrecovery import Recovery
from flashrecovery.adapter import InspectableAdapter
from flashrecovery.adapter.loop import LoopAdapter, RngState, restore_rng
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.trainer.lightning_checkpoints import KnownFiles
from flashrecovery.trainer.own_state import OwnState
from flashrecovery.worker.own_loops.loops import LOOPS
from flashrecovery.worker.script_text.script_frames import is_own

_PLAIN = (int, float, bool, str, type(None))
_KEPT = (*_PLAIN, list, dict, set, tuple, torch.Tensor)
_OF_METRICS = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
_OF_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
_NEVER = frozenset({"_last_time_checked"})
"""Clock values in Lightning's callbacks, which differ between processes."""


def refused(what: str) -> UnsupportedError:
    """The error for what cannot be protected."""
    return UnsupportedError(f"--auto does not support, with Lightning's Trainer: {what}; see docs/lightning.md")


class Stage(enum.Enum):
    """What comes next."""

    EPOCH = "epoch"
    """An epoch begins."""
    BATCHES = "batches"
    """The micro-batches of a step."""
    STEP = "step"
    """The loss of the last micro-batch is known, and the optimizer steps: what this leaves is :attr:`BATCH_END`."""
    BATCH_END = "batch_end"
    """The hooks that follow a step, and its log."""
    ADVANCE_END = "advance_end"
    """Validation, where it is due."""
    EPOCH_END = "epoch_end"
    RUN_END = "run_end"
    OVER = "over"


class ModuleState(OwnState):
    """What the script keeps in its LightningModule, data module, callbacks and metrics; each rank its own."""

    def __init__(self, trainer: Any) -> None:
        from lightning.pytorch import Callback, LightningDataModule, LightningModule
        from lightning.pytorch.callbacks import ProgressBar
        from torchmetrics import Metric

        self._lightning, self._module, self._metric = trainer, trainer.lightning_module, Metric
        self._bars = ProgressBar
        self._base = frozenset(vars(LightningModule())) | frozenset(vars(LightningDataModule()))
        self._plain_module = frozenset(vars(nn.Module()))
        self._callback = Callback
        self._known: dict[int, object] = {}
        self.modules: dict[str, nn.Module] = {}
        self.odd: dict[str, str] = {}
        self.newest: dict[str, Any] = {}
        self._objects: dict[int, object] = {}
        self._at_start = None
        self._first = 1
        self._parts = [*self._find_parts()]

    def holders(self) -> list[object]:
        return [self._lightning, self._module, *self._lightning.callbacks]

    def _find_parts(self) -> Iterator[tuple[str, Any, Callable[[str], bool]]]:
        """(path, object, whether an attribute of it is its own), of all but the callbacks."""
        base, plain = self._base, self._plain_module
        yield "module", self._module, lambda name: name not in base and name not in plain
        if self._lightning.datamodule is not None:
            yield "datamodule", self._lightning.datamodule, lambda name: name not in base
        for path, part in self._module.named_modules():
            if isinstance(part, self._metric):
                names = frozenset({*part._defaults, "_update_count", "_computed", "_forward_cache"})
                yield f"module.{path}", part, names.__contains__
            elif path and is_own(type(part)):
                yield f"module.{path}", part, lambda name: name not in plain

    def _places(self) -> Iterator[tuple[str, Any]]:
        for path, owner, own in self._parts:
            for name, value in vars(owner).items():
                if own(name) and not isinstance(value, nn.Module):
                    yield f"{path}.{name}", vars(owner)
        for path, callback in self._named_callbacks():
            of_script = is_own(type(callback))
            for name, value in vars(callback).items():
                if of_script or (isinstance(value, _KEPT) and name not in _NEVER):
                    yield f"{path}.{name}", vars(callback)

    def _callbacks(self) -> list[Any]:
        return [one for one in self._lightning.callbacks if not isinstance(one, self._bars)]

    def _named_callbacks(self) -> Iterator[tuple[str, Any]]:
        for number, callback in enumerate(self._callbacks()):
            yield f"{type(callback).__name__}[{number}]", callback

    def _attributes_at(self, path: str) -> dict[str, Any] | None:
        owner = path.rpartition(".")[0]
        owners = {**{name: part for name, part, _ in self._parts}, **dict(self._named_callbacks())}
        return vars(owners[owner]) if owner in owners else None


class FitState:
    """A :class:`flashrecovery.adapter.PlacedLoop`: the next stage is part of it, so any call can be repeated.

    Args:
        trainer: a Trainer whose ``fit()`` has set everything up.
        last_batch: returns the newest batch of the data.
        prepared: prepares a batch for the module, as before its step.
        outside: modules around the protected ones; their only state is their mode.
        keeps_outputs: a hook of the script gets the outputs when the step is over.
    """

    counted = (
        "calls of Lightning's Trainer: each optimizer step is one, and each validation, end of an epoch, and end of a "
        "batch in which something is changed or saved"
    )

    def __init__(
        self,
        trainer: Any,
        recovery: Recovery,
        *,
        last_batch: Callable[[], Any],
        prepared: Callable[[Any], Any],
        outside: Sequence[nn.Module],
        keeps_outputs: bool,
    ) -> None:
        self._trainer, self._recovery = trainer, recovery
        self._saved = 0  # calls so far
        self._last_batch, self._prepared = last_batch, prepared
        self._outside, self._keeps_outputs = outside, keeps_outputs
        self.stage = Stage.EPOCH
        self.batch: Any = None
        self.outputs: dict[str, Any] = {}
        self._version = 0  # the version that the call under way makes
        self._before_transfer: dict[str, Any] | None = None
        self.own = ModuleState(trainer)
        self._files = KnownFiles(trainer)
        self.arrived = False
        """In a replacement: it has reached its place."""
        self._losses = 0
        self._restored: dict[str, Any] | None = None
        module, fit = trainer.lightning_module, trainer.fit_loop
        self._forward = module.forward
        epoch = fit.epoch_loop
        loops = (fit, epoch, epoch.automatic_optimization, epoch.val_loop)
        self._counters = [*_counters(loop for loop in loops)]
        logger = trainer._logger_connector
        self._scalars: list[tuple[Any, str]] = [
            *((trainer, name) for name in ("should_stop", "accumulate_grad_batches")),
            *((epoch, name) for name in ("_batches_that_stepped", "_skip_next_val")),
            *((logger, name) for name in ("_first_loop_iter", "_current_fx")),
            *((epoch.val_loop, "_has_run"), (module, "_current_fx_name")),
        ]
        self._tables = [(logger, name) for name in ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")]
        self._results = {"train": epoch._results, "validate": epoch.val_loop._results}
        self.adapter = FitAdapter(self)

    # -- in a call --------------------------------------------------------------------------------

    def begin_call(self, version: int) -> None:
        """A call begins, which makes ``version``."""
        self._version = version

    def go_to(self, stage: Stage) -> None:
        """The loops have reached this stage."""
        self.stage = stage

    def begin_batch(self, batch: Any, before_transfer: dict[str, Any] | None) -> None:
        """A batch is ready for the module. ``before_transfer``: the random state in which it was prepared, if the
        script takes part in that."""
        self.batch, self._before_transfer = batch, before_transfer

    def computed(self, outputs: dict[str, Any]) -> None:
        """The batch has been computed, with these outputs."""
        self.outputs = outputs

    def end_batch(self) -> None:
        """The hooks after the batch are done."""
        self.outputs, self.batch = {}, None

    def sealed(self, outputs: dict[str, Any]) -> None:
        """The loss of a step's last micro-batch is known, and its gradients' synchronisation has not begun."""
        self.outputs = outputs
        self._losses += 1
        self.adapter.sealed()

    def mutating(self) -> None:
        """What follows in this call may change parameters."""
        self.adapter.mutating()

    def finish_step(self) -> None:
        """In a replacement: advance the counters that the Trainer's loop advances after the optimizer's step. Optimizer
        and schedules have been restored to their state at that point."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        loop.batch_progress.increment_processed()
        module = trainer.lightning_module
        module.lr_scheduler_step = lambda *_: None
        try:
            self.update_schedules(loop)
        finally:
            del module.lr_scheduler_step
        self.stage = Stage.BATCH_END

    @staticmethod
    def update_schedules(loop: Any) -> None:
        """As the Trainer's loop does it after a step."""
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    # -- LoopState --------------------------------------------------------------------------------

    def iteration_of(self, kind: str) -> int:
        """As ``trainer.global_step`` has it when the step is made."""
        return int(self._trainer.global_step) + (kind == "train")

    def save(self) -> dict[str, Any]:
        number, self._saved = self._saved, self._saved + 1
        if number < self._recovery.version:
            return {}  # this process passes over the call
        return {**self.capture(), "outputs": self.outputs, "batch": self.batch}

    def load(self, saved: dict[str, Any]) -> None:
        self._load(saved, same_process=True)
        self.outputs, self.batch = saved["outputs"], saved["batch"]
        self._results["train"].batch = self.batch if saved["has_batch"] else None

    def restored(self, saved: dict[str, Any]) -> None:
        self._restored = saved

    def resume(self) -> None:
        saved = self._restored
        if saved is None:
            raise RegistrationError("a replacement passes over calls, and has got no state of them")
        self._load(saved, same_process=False)
        if saved["has_batch"]:
            now = RngState.now()
            if self._before_transfer is not None:
                restore_rng(self._before_transfer)
            self.batch = self._results["train"].batch = self._prepared(self._last_batch())
            restore_rng(now.plain())
        self.outputs = _on_device(saved["outputs"], self._trainer.strategy.root_device)
        if self.stage is Stage.STEP:
            self.finish_step()
        self._restored, self.arrived = None, True

    # -- PlacedLoop -------------------------------------------------------------------------------

    def place(self) -> None:
        """All of it is in the state."""

    def go_back(self, place: None, *, restored: bool) -> None:
        if restored:
            self.resume()

    def forget(self, place: None) -> None:
        """Nothing is kept."""

    # -- its parts --------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """As plain values."""
        results = self._results["train"]
        return {
            "stage": self.stage.value,
            "version": self._version,
            "printed": LOOPS.output.newest(self._version),
            "counters": [{name: getattr(one, name) for name in names} for one, names in self._counters],
            "scalars": [getattr(owner, name) for owner, name in self._scalars],
            "tables": [_plain(dict(getattr(owner, name))) for owner, name in self._tables],
            "results": {name: _written(one) for name, one in self._results.items()},
            "has_batch": results.batch is not None,
            "batch_size": results.batch_size,
            "outputs": _plain(self.outputs) if self._keeps_outputs else {},
            "before_transfer": self._before_transfer,
            "files": sorted(self._files.names),
            "modes": [one.training for one in self._outside],
            "own": self.own.capture(),
        }

    def mark(self) -> tuple[Any, ...]:
        """Another one if something has changed since that does not follow from the step itself."""
        results = [
            (key, one._update_count, one.has_reset) for found in self._results.values() for key, one in found.items()
        ]
        return self._losses, self._trainer.should_stop, LOOPS.output.printed(), results, self.own.mark()

    def _load(self, saved: Mapping[str, Any], *, same_process: bool) -> None:
        trainer = self._trainer
        self.stage, self._version = Stage(saved["stage"]), saved["version"]
        LOOPS.output.restore(self._version, saved["printed"])
        for (counter, names), values in zip(self._counters, saved["counters"], strict=True):
            for name in names:
                setattr(counter, name, values[name])
        for (owner, name), value in zip(self._scalars, saved["scalars"], strict=True):
            setattr(owner, name, value)
        for (owner, name), value in zip(self._tables, saved["tables"], strict=True):
            setattr(owner, name, _on_device(value, trainer.strategy.root_device))
        for name, rows in saved["results"].items():
            self._put(self._results[name], rows)
        self._results["train"].batch_size = saved["batch_size"]
        self._before_transfer = saved["before_transfer"]
        self._files.restore(saved["files"])
        for one, training in zip(self._outside, saved["modes"], strict=True):
            one.training = training
        self.own.restore(saved["own"], same_process=same_process)
        trainer.lightning_module.forward = self._forward  # an interrupted step has left another one
        trainer.training = True
        torch.set_grad_enabled(True)

    def _put(self, results: Any, rows: Sequence[dict[str, Any]]) -> None:
        """Values that the script has logged."""
        from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

        trainer, found = self._trainer, dict(results)
        results.clear()
        for row in rows:
            metric = found.get(row["key"])
            if metric is None:
                meta = _Metadata(**row["meta"], reduce_fx=getattr(torch, row["reduce"]))
                sync = _Sync(fn=trainer.strategy.reduce, _should=row["sync"], rank_zero_only=row["rank_zero_only"])
                meta.sync = sync
                metric = _ResultMetric(meta, row["is_tensor"])
            values = _on_device(row["values"], trainer.strategy.root_device)
            if not row["is_tensor"]:
                values["value"] = trainer.lightning_module.get_submodule(row["meta"]["metric_attribute"])
            metric.__dict__.update(values)
            results[row["key"]] = metric


class FitAdapter(LoopAdapter, InspectableAdapter):
    """Carries a :class:`FitState`."""

    name = "lightning-fit"

    def __init__(self, state: FitState) -> None:
        super().__init__(state)
        self._state = state

    def capture_rank(self) -> Any:
        return self._state.capture()

    def local_state_mark(self) -> Any:
        return self._state.mark()

    def known(self) -> Sequence[object]:
        return self._state.own.holders()

    def rank_bytes(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self._state.own.newest.items() if isinstance(data, bytes)}


def _counters(loops: Iterator[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The counters of these loops, each with its names."""
    from lightning.pytorch.loops.progress import _BaseProgress

    waiting = [value for loop in loops for value in vars(loop).values() if isinstance(value, _BaseProgress)]
    while waiting:
        one = waiting.pop()
        inner = {name for name, value in vars(one).items() if isinstance(value, _BaseProgress)}
        waiting += (getattr(one, name) for name in sorted(inner))
        yield one, tuple(name for name in vars(one) if name not in inner)


def _written(results: Any) -> list[dict[str, Any]]:
    """A collection of logged values. Raises UnsupportedError for one that is reduced in a group of the script's."""
    rows = []
    for key, metric in results.items():
        meta, values = metric.meta, vars(metric)
        if meta.sync.group is not None:
            raise refused(f"self.log({meta.name!r}, sync_dist_group=...)")
        names = [name for name in _OF_METRICS if name in values and (metric.is_tensor or name != "value")]
        rows.append(
            {
                "key": key,
                "meta": {name: getattr(meta, name) for name in _OF_META},
                "reduce": meta.reduce_fx.__name__,
                "sync": meta.sync.should,
                "rank_zero_only": meta.sync.rank_zero_only,
                "is_tensor": metric.is_tensor,
                "values": {name: _plain(values[name]) for name in names},
            }
        )
    return rows


def _plain(value: Any) -> Any:
    """Copies in host memory. Raises UnsupportedError for what is not plain."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(part) for part in value) if type(value) in (list, tuple) else [*map(_plain, value)]
    if isinstance(value, _PLAIN):
        return value
    raise refused(f"a {type(value).__name__} in what training_step() returns, or logs")


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {name: _on_device(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(part, device) for part in value)
    return value

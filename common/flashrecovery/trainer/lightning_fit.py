"""Lightning's ``Trainer``, which trains by DistributedDataParallel or FSDP2: `flashrecovery run --auto`.

Its loops of epochs (``_FitLoop``), batches (``_TrainingEpochLoop``) and steps (``_AutomaticOptimization``) become one
loop of calls (:mod:`flashrecovery.worker.framework_calls`), which make the same operations and hooks in the same order.
The next call is part of the loops' state (:mod:`.lightning_state`), so a replacement skips all calls, gets that state,
and continues from there.

=================  ==========================================================================================
``train``          the start of an epoch, if one begins, all micro-batches of a step, optimizer and schedules
``batch_end``      hooks after a step, if one of them may change the model, or a checkpoint is due
``advance_end``    validation, if it is due
``epoch_end``      the end of the epoch
``run_end``        the end of the training
=================  ==========================================================================================

What follows a step without any of this is done first in the next call.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from flashrecovery import Recovery, init
from flashrecovery.adapter.loop import RngState
from flashrecovery.capabilities.of_lightning import TRAINER
from flashrecovery.config import prints_patch, protects_as_it_is
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.words import shortened
from flashrecovery.trainer.events import mentions, names_from
from flashrecovery.trainer.held_modules import HeldModules
from flashrecovery.trainer.lightning_logs import go_on_with, hold_rows
from flashrecovery.trainer.lightning_state import FitState, Stage, refused
from flashrecovery.worker.data.source import Source
from flashrecovery.worker.own_loops.loops import LOOPS
from flashrecovery.worker.script_text.script_frames import is_own

_CALLBACKS = (
    *("StochasticWeightAveraging", "WeightAveraging", "BaseFinetuning", "ModelPruning", "Timer", "BatchSizeFinder"),
    *("LearningRateFinder", "SpikeDetection"),
)
"""Lightning's callbacks that change what is trained, or go by the clock, in a way that is not brought back."""
_CHANGING = frozenset(
    {
        *("parameters", "named_parameters", "buffers", "named_buffers", "param_groups", "optimizers", "lr_schedulers"),
        *("state_dict", "load_state_dict", "update_parameters", "copy_", "lerp_", "mul_", "add_", "data"),
    }
)
"""Names by which a callback gets at what is trained."""
_SHOWN = 4
"""Parts of a model that are named."""
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def protected_fit(trainer: Any, fit: Callable[..., Any]) -> Callable[..., Any]:
    """What is to be called in the place of ``fit``, the class's own, bound to ``trainer``.

    Raises:
        UnsupportedError: the script does not run by ``--auto``; or a version, an argument or a callback that cannot be
            protected, by name.
    """
    if not protects_as_it_is(os.environ):
        raise UnsupportedError(
            "Lightning's Trainer under `flashrecovery run` without --auto: its loop is not protected, and a rank that "
            "dies would take the job with it. Give --auto (docs/lightning.md), or start the script with torchrun"
        )
    if prints_patch(os.environ):
        raise UnsupportedError(
            "--auto=print: the loop of steps is that of Lightning's Trainer, and nothing has to be written by hand: "
            "start it with --auto; see docs/lightning.md"
        )
    if not init().enabled:
        return fit
    TRAINER.require()
    Fit.begin_only_one()
    _check_trainer(trainer)
    return functools.partial(_fit, trainer, fit)


def _fit(trainer: Any, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As ``Trainer.fit``."""
    if kwargs.get("ckpt_path") is not None or len(args) > 4:
        raise refused("fit(ckpt_path=...): a replacement would begin there again; use `flashrecovery run --resume`")
    recovery = init()
    loggers = trainer.loggers if trainer.is_global_zero else []
    for logger in loggers:
        hold_rows(LOOPS.output, logger)
        if not recovery.first_launch:
            go_on_with(logger)
    # Its handler of SIGTERM communicates, amid whatever the rank does. The launcher sees to that signal.
    trainer._signal_connector.register_signal_handlers = _no_handlers
    trainer.fit_loop.run = Fit(trainer, recovery).run
    return fit(*args, **kwargs)


def _no_handlers() -> None:
    """In the place of what sets the Trainer's handlers of signals."""


def _check_trainer(trainer: Any) -> None:
    """What is known before the Trainer sets up what it trains."""
    from lightning.pytorch import callbacks as of_lightning
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    strategy, plugin = trainer.strategy, trainer.precision_plugin
    sharded = type(strategy) is ModelParallelStrategy
    kinds = [getattr(of_lightning, name) for name in _CALLBACKS if hasattr(of_lightning, name)]
    steps_itself = type(plugin).optimizer_step not in (Precision.optimizer_step, MixedPrecision.optimizer_step)
    found = [
        name
        for name, wrong in (
            (f"the strategy {type(strategy).__name__}", type(strategy) not in (DDPStrategy, ModelParallelStrategy)),
            (
                f"tensor_parallel_size = {getattr(strategy, '_tensor_parallel_size', 1)!r}, where it is to be 1",
                getattr(strategy, "_tensor_parallel_size", 1) != 1,
            ),
            ("16-mixed with ModelParallelStrategy", sharded and getattr(plugin, "scaler", None) is not None),
            ("post-local SGD", getattr(strategy, "_ddp_comm_state", None) is not None),
            (f"the precision plugin {type(plugin).__name__}", steps_itself),
            ("reload_dataloaders_every_n_epochs", bool(trainer.reload_dataloaders_every_n_epochs)),
            ("a val_check_interval of time", getattr(trainer, "_val_check_time_interval", None) is not None),
            *(
                (f"the callback {type(one).__name__}", isinstance(one, tuple(kinds)) and not is_own(type(one)))
                for one in trainer.callbacks
            ),
            *(
                ("ModelCheckpoint(train_time_interval)", getattr(one, "_train_time_interval", None) is not None)
                for one in trainer.callbacks
            ),
        )
        if wrong
    ]
    if found:
        raise refused("; ".join(dict.fromkeys(found)))


class _Batches:
    """The Trainer's batches as a source for the core. ``fit_loop``: has made the first epoch's iterator already."""

    def __init__(self, fit_loop: Any) -> None:
        self._combined, self._made = fit_loop._combined_loader, fit_loop._data_fetcher.iterator
        (self._loader,) = self._combined.flattened
        self._length = int(fit_loop.max_batches)
        Source(self._loader)  # refuses what cannot be read again
        self.dataset = self._loader.dataset
        self.newest: Any = None
        self.sampler = _Told(self._loader)

    def __iter__(self) -> Iterator[Any]:
        made, self._made = self._made, None
        if made is None or self.sampler.epoch:
            if getattr(self._loader, "persistent_workers", False):
                self._loader._iterator = None  # their random state cannot be restored
            made = iter(self._combined)
        return self._noted(made)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self._length):  # a combined loader does not keep to its limit itself
            try:
                self.newest, _, _ = next(batches)  # its iter() would start again
            except StopIteration:
                return
            yield self.newest

    def __len__(self) -> int:
        return self._length


class _Told:
    """Told the epoch with the loader's samplers."""

    def __init__(self, loader: Any) -> None:
        self.sampler, self.epoch = loader, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Fit:
    """The loops of one ``fit()``."""

    begun = False
    """A Trainer of this process has begun to train."""

    def __init__(self, trainer: Any, recovery: Recovery) -> None:
        self._trainer, self._recovery = trainer, recovery
        self._fit_loop, self._loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._state: FitState
        self._batches: _Batches
        self._stream: Any
        self._held: HeldModules
        self._transfers = False  # the script has a hand in how a batch gets to its device
        self._changes = False  # a hook after a step may change what is trained

    @classmethod
    def begin_only_one(cls) -> None:
        """Raises UnsupportedError if this is not the first one of the process."""
        if cls.begun:
            raise refused("a second fit() in one process: a replacement would make the first one again")
        cls.begun = True

    def run(self) -> None:
        """Replaces the fit loop's own ``run``."""
        fit_loop = self._fit_loop
        fit_loop.setup_data()
        if fit_loop.skip:
            return
        self._check_data()
        fit_loop.reset()
        fit_loop.on_run_start()
        self._open()
        while self._state.stage is not Stage.OVER:
            self._recovery.call(self._kind, self._make, skipped=self._pass_over, loop=self._state)
            self._held.check()
        self._recovery.end_calls()
        LOOPS.output.show_all()
        fit_loop._restarting = False

    # -- before the first call --------------------------------------------------------------------

    def _check_data(self) -> None:
        from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
        from lightning.pytorch.utilities.model_helpers import is_overridden

        trainer, module, fit_loop = self._trainer, self._trainer.lightning_module, self._fit_loop
        loaders = fit_loop._combined_loader.flattened
        optimizers = trainer.optimizers
        found = [
            name
            for name, wrong in (
                ("manual optimization (automatic_optimization = False)", not module.automatic_optimization),
                (f"{len(optimizers)} optimizers", len(optimizers) != 1),
                *(
                    (f"the optimizer {type(one).__name__}, whose step() computes the loss itself", _needs_closure(one))
                    for one in optimizers
                ),
                (f"{len(loaders)} training loaders", len(loaders) != 1),
                ("a training loader that is no DataLoader", not all(isinstance(one, DataLoader) for one in loaders)),
                ("an IterableDataset", any(isinstance(getattr(o, "dataset", None), IterableDataset) for o in loaders)),
                ("a training loader without a length", fit_loop.max_batches == float("inf")),
                (
                    "training_step(dataloader_iter)",
                    isinstance(fit_loop._data_fetcher, _DataLoaderIterDataFetcher),
                ),
            )
            if wrong
        ]
        if found:
            raise refused("; ".join(found))
        owners = [one for one in (module, trainer.datamodule) if one is not None]
        self._transfers = any(is_overridden(name, one) for one in owners for name in _TRANSFERS)

    def _open(self) -> None:
        """The loops are about to begin."""
        from lightning.pytorch.utilities.model_helpers import is_overridden

        trainer, recovery = self._trainer, self._recovery
        module, strategy = trainer.lightning_module, trainer.strategy
        model = _trained_by(strategy)
        (optimizer,) = trainer.optimizers
        schedules = {f"lr_scheduler{n or ''}": c.scheduler for n, c in enumerate(trainer.lr_scheduler_configs)}
        recovery.register(
            model=model,
            optimizer=getattr(optimizer, "_optimizer", optimizer),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **schedules,
        )
        self._batches = _Batches(self._fit_loop)
        hears = [one for one in trainer.callbacks if is_own(type(one)) and is_overridden("on_train_batch_end", one)]
        hears_itself = is_overridden("on_train_batch_end", module)
        self._state = state = FitState(
            trainer,
            recovery,
            last_batch=lambda: self._batches.newest,
            prepared=self._prepared,
            outside=[one for one in strategy.model.modules() if not any(one is part for part in model.modules())],
            keeps_outputs=hears_itself or bool(hears),
        )
        recovery.register_adapter(state.adapter)
        own = state.own
        own.passes_over(
            *(trainer, module, strategy, strategy.model, trainer.datamodule, optimizer, *schedules.values()),
            *(getattr(optimizer, "_optimizer", None), *trainer.callbacks, *trainer.loggers, *module.modules()),
        )
        self._held = HeldModules(own)
        self._held.register(recovery, model)
        self._changes = (hears_itself and _may_change(module)) or any(
            self._held.belongs_to(one) or mentions(_class_of(one), _CHANGING, _of_lightning) for one in hears
        )
        self._stream = recovery.data(self._batches)
        self._replace(trainer.precision_plugin)
        recovery.protect_output()

    def _replace(self, plugin: Any) -> None:
        """What belongs to the forward and backward pass comes before the optimizer's step, and not within it."""
        step_of_scaler = plugin.optimizer_step

        def optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            if getattr(plugin, "scaler", None) is not None:
                return step_of_scaler(optimizer, model=model, closure=closure, **kwargs)
            result = plugin._wrap_closure(model, optimizer, closure)
            optimizer.step(**kwargs)
            return result

        plugin.optimizer_step = optimizer_step
        self._loop.automatic_optimization._make_closure = functools.partial(
            self._closure, self._loop.automatic_optimization._make_closure
        )

    def _closure(self, make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """The closure of a micro-batch, which seals between the forward and the backward pass of a step's last."""
        closure, state = make(kwargs, optimizer, batch_idx), self._state
        results: list[Any] = []
        step, backward = closure._step_fn, closure._backward_fn
        if state.stage is not Stage.STEP or backward is None:
            return closure

        def step_fn() -> Any:
            results[:] = [step()]
            return results[0]

        def backward_fn(loss: torch.Tensor) -> None:
            (result,) = results
            state.sealed({} if result.loss is None else result.asdict())
            backward(loss)

        closure._step_fn, closure._backward_fn = step_fn, backward_fn
        return closure

    # -- calls ------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        stage = self._state.stage
        if stage in (Stage.EPOCH, Stage.BATCHES):
            return "train"
        light = (stage is Stage.BATCH_END and not self._batch_end_alone) or not self._advance_end_alone
        return "train" if light and stage in (Stage.BATCH_END, Stage.ADVANCE_END) else stage.value

    @property
    def _batch_end_alone(self) -> bool:
        """Whether the hooks after a step are a separate call."""
        from lightning.pytorch.callbacks import ModelCheckpoint

        step = self._trainer.global_step
        every = [c._every_n_train_steps for c in self._trainer.callbacks if isinstance(c, ModelCheckpoint)]
        return self._changes or any(n >= 1 and step % n == 0 for n in every)

    @property
    def _advance_end_alone(self) -> bool:
        """Whether the code after the hooks is a separate call."""
        configs = self._trainer.lr_scheduler_configs
        waits = any(c.reduce_on_plateau and c.interval == "step" for c in configs)
        return waits or bool(self._loop._should_check_val_fx(self._fit_loop._data_fetcher))

    def _pass_over(self) -> None:
        """In a replacement: skip a call that the job has completed."""
        if not self._state.arrived:
            return
        LOOPS.output.handed_out(self._recovery.version)
        bar = self._trainer.progress_bar_callback
        if bar is not None and self._state.stage not in (Stage.EPOCH, Stage.RUN_END, Stage.OVER):
            bar.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    def _make(self) -> None:
        """One call: what comes next, up to an optimizer step or something that needs a separate call."""
        state = self._state
        LOOPS.output.handed_out(self._recovery.version)
        state.begin_call(self._recovery.version + 1)
        if state.stage is Stage.BATCH_END:
            alone = self._batch_end_alone
            if self._changes:
                state.mutating()
            self._end_batch()
            state.go_to(Stage.ADVANCE_END)
            if alone:
                return
        if state.stage is Stage.ADVANCE_END:
            alone = self._advance_end_alone
            self._end_advance()
            state.go_to(Stage.EPOCH_END if self._loop.done else Stage.BATCHES)
            if alone:
                return
        if state.stage is Stage.EPOCH_END:
            self._fit_loop.on_advance_end()
            self._fit_loop.on_iteration_done()
            state.go_to(Stage.RUN_END if self._fit_loop.done else Stage.EPOCH)
        elif state.stage is Stage.RUN_END:
            self._fit_loop.on_run_end()
            state.go_to(Stage.OVER)
        else:
            self._train()

    def _train(self) -> None:
        state, loop = self._state, self._loop
        if state.stage is Stage.EPOCH:
            self._fit_loop.on_advance_start()
            loop.reset()
            state.go_to(Stage.BATCHES)
        while not loop.done:
            if self._train_batch():
                state.go_to(Stage.BATCH_END)
                return
            self._end_batch()
            self._end_advance()
        state.go_to(Stage.EPOCH_END)

    # -- a batch ----------------------------------------------------------------------------------

    def _train_batch(self) -> bool:
        """The first part of an iteration of the Trainer's loop, up to the optimizer and the schedules. Returns whether
        the optimizer has stepped."""
        from lightning.pytorch.trainer import call

        trainer, loop, state = self._trainer, self._loop, self._state
        progress = loop.batch_progress
        loop.val_loop.restarting = False
        batch_idx = loop.batch_idx + 1
        batch = next(self._stream)
        if batch is None:
            raise refused("a training loader that gives None")
        progress.is_last_batch = progress.current.ready + 1 >= self._fit_loop.max_batches
        before_transfer = RngState.now().plain() if self._transfers else None
        batch = self._prepared(batch)
        state.begin_batch(batch, before_transfer)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
        response = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        call._call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
        if response == -1:
            raise refused("on_train_batch_start() that returns -1, which ends an epoch early")
        progress.increment_started()
        steps = not loop._should_accumulate()
        if steps:
            state.go_to(Stage.STEP)
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        with trainer.profiler.profile("run_training_batch"):
            state.computed(loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs))
        progress.increment_processed()
        state.update_schedules(loop)
        return steps

    def _prepared(self, batch: Any) -> Any:
        from lightning.pytorch.trainer import call

        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _end_batch(self) -> None:
        """The second part: hooks, and the log."""
        from lightning.pytorch.trainer import call

        trainer, loop, state = self._trainer, self._loop, self._state
        given = state.outputs, state.batch, loop.batch_idx
        call._call_callback_hooks(trainer, "on_train_batch_end", *given)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", *given)
        trainer._logger_connector.on_batch_end()
        loop.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        state.end_batch()

    def _end_advance(self) -> None:
        """The third part: validation, if it is due."""
        self._loop.on_advance_end(self._fit_loop._data_fetcher)
        self._loop.on_iteration_done()


def _trained_by(strategy: Any) -> torch.nn.Module:
    """What is protected: DistributedDataParallel, or what has been given to ``fully_shard`` in ``configure_model()``.
    Raises UnsupportedError if that is not the whole model, by name."""
    model: torch.nn.Module = strategy.model
    if isinstance(model, (DistributedDataParallel, FSDPModule)):
        return model
    given = {name: part for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    roots = [name for name in given if not any(name.startswith(f"{other}.") for other in given)]
    if len(roots) != 1:
        raise refused(
            f"{len(roots)} parts of the LightningModule that are given to fully_shard ({shortened(roots, _SHOWN)}), "
            "where it is to be one that has all parameters, or the LightningModule itself"
        )
    root: Any = given[roots[0]]
    within = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    besides = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in within]
    if besides:
        raise refused(f"{shortened(besides, _SHOWN)} outside of {roots[0]}, which is given to fully_shard: give it all")
    trained: torch.nn.Module = root
    return trained


def _needs_closure(optimizer: Any) -> bool:
    """Whether its steps compute the loss more than once, or whenever they like."""
    parameter = inspect.signature(type(getattr(optimizer, "_optimizer", optimizer)).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _may_change(module: Any) -> bool:
    """Whether the hook of ``module`` may change what is trained: it is declared so, or uses a part of the module."""
    from torchmetrics import Metric

    parts = {name for name, part in module.named_children() if not isinstance(part, Metric)}
    return not names_from(type(module), "on_train_batch_end").isdisjoint(_CHANGING | parts)


def _class_of(callback: object) -> Any:
    return type(callback)


def _of_lightning(kind: type) -> bool:
    return not is_own(kind)

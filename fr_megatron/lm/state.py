"""What Megatron-LM's loop keeps between two calls, and how it gets into a replacement.

A replacement's loop begins at its first iteration and goes round without computing anything; when its last skipped
``train_step`` returns, it returns what the dead process had got, and the averages of the log are as they were there.

After a fallback to a checkpoint the calls that came after it are made again, in the loop's frame as it is then
(:class:`flashrecovery.adapter.PlacedLoop`): what the loop had set before each of them is set again, and
losses that it had summed up outside of calls are summed up again, those of the steps that were made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery.adapter import plain_fields
from flashrecovery.adapter.elastic import ElasticAdapter
from flashrecovery.adapter.loop import LoopAdapter
from flashrecovery.adapter.relayout import RelayoutAdapter
from flashrecovery.errors import ConfigError, RestoreError
from fr_megatron import trackers
from fr_megatron.lm.elastic_loop import ElasticLoop
from fr_megatron.lm.packed import NONE
from fr_megatron.lm.replan import LayoutLoop
from fr_megatron.own_loop import PUT_ASIDE, calculator, hooked, set_hooked

_RERUN = (
    "current_iteration",
    "first_iteration_complete",
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
)
"""Plain attributes of the rerun state machine. Its state is "not running yet" between two calls."""
_RERUN_LARGEST = ("large_value_counts", "max_values")
"""Attributes of the rerun state machine by name of a value: how many it has seen, and the largest, which decides what
is "unexpectedly large"."""


_OF_SCRIPT = ("curr_iteration", "consumed_train_samples", "skipped_train_samples")
"""Arguments that the loop sets between its calls, and that a step may read. Where one is made again, the loop may have
gone on from it already: to the next step, if there is no log in between."""
_PLACED = ("curr_iteration", "consumed_train_samples")
"""Those of them that say where the loop is."""
_KEPT = 4
"""Iterations of which it is known what the loop has got. A recovery in place goes back no further."""
_COMMON = (
    "result",
    "params_norm",
    "packed",
    "overflows",
    "totals",
    "consumed_valid_samples",
    "rerun",
    "rerun_mode",
    "positions",
    "exits",
    "trackers",
    "micro_batches_logged",
)
"""What :meth:`LMLoop.save` gives that is the same on all ranks where the layout may change."""


@dataclass(frozen=True)
class TrainResult:
    """What ``train_step`` returns. ``losses``: averages by name, on the last pipeline stage only."""

    losses: dict[str, torch.Tensor]
    skipped: bool
    rest: tuple[Any, ...]
    """should_checkpoint, should_exit, exit_code, grad_norm, num_zeros_in_grad, and what later versions add."""
    params_norm: float | None = None
    """The norm of the parameters after the step, with ``--log-params-norm``."""
    packed: tuple[float | None, float | None] = NONE
    """State of packed samples, see :mod:`.packed`."""

    @staticmethod
    def of(
        returned: tuple[Any, ...],
        params_norm: float | None = None,
        packed: tuple[float | None, float | None] = NONE,
    ) -> TrainResult:
        losses, skipped, *rest = returned
        return TrainResult(dict(losses), bool(skipped), tuple(_plain(value) for value in rest), params_norm, packed)

    def logged(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``training_log`` is ``given`` after the losses, with what this step has found: the loop may have got
        that of a step that was made again since, in another size, with other last bits, or, in a process that skipped
        it, nothing. ``given``: learning rate, iteration, loss scale, whether memory is reported, whether the step was
        skipped, the norms of gradients and parameters, the number of zeros, and, if there is one, the greatest
        attention logit."""
        if self is NOTHING:
            return given
        *_, norm, zeros = self.rest[:5]
        logit = self.rest[5:6] if len(given) > 8 else ()
        return *given[:4], int(self.skipped), norm, self.params_norm, zeros, *logit, *given[8 + len(logit) :]

    def returned(self) -> tuple[Any, ...]:
        return dict(self.losses), int(self.skipped), *self.rest


NOTHING = TrainResult({}, False, (False, False, 0, None, None, 0))
"""The result of an iteration that the dead process had behind it; the loop does not use it."""


@dataclass(frozen=True)
class CallPlace:
    """What the loop has before a call that is the script's, and not a result of calls.

    Attributes:
        kind: of the call.
        running: timers.
        of_script: see :meth:`LMLoop._of_script`.
        summed: of the iterations whose losses were added to the totals since the call before, how that is done.
        hooked, functions: with ``overlap_param_gather``, what the loop gives back after its first iteration, and after
            each evaluation: hooks that gather parameters, by chunk, and functions of the configuration.
    """

    kind: str
    running: tuple[str, ...]
    of_script: Mapping[str, Any]
    summed: tuple[tuple[int, Callable[[dict[str, Any]], object]], ...]
    hooked: tuple[bool, ...]
    functions: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """The loop's, counted from 0."""
        return int(self.of_script["arguments"].get("curr_iteration", 0))


class LMLoop:
    """A :class:`flashrecovery.adapter.PlacedLoop`. ``elastic``: of a job that changes its number of
    replicas, or its layout; ``layouts``: of one that changes its layout. ``far_back``: the job has fallback
    checkpoints.
    ``chunks``: of the model."""

    counted = (
        "calls of Megatron-LM's loop: in each iteration the training step is one, and the log, evaluation, check or "
        "checkpoint that is due"
    )

    def __init__(
        self,
        args: Any,
        timers: Any,
        rerun: Any,
        elastic: ElasticLoop | None = None,
        layouts: LayoutLoop | None = None,
        *,
        far_back: bool = False,
        chunks: Sequence[Any] = (),
    ) -> None:
        self.elastic, self.layouts = elastic, layouts
        self._far_back, self._chunks = far_back, chunks
        self._positions: LayoutLoop | ElasticLoop | None = layouts or elastic
        self._args = args
        self._timers = timers
        self._rerun = rerun
        self.result = NOTHING
        self.overflows: set[int] = set()
        """Iterations whose step was skipped. While they are the first, Megatron gathers parameters in another way."""
        self.totals: dict[str, Any] | None = None
        """The dict in which ``training_log`` sums up, as soon as it is known."""
        self.exits = False
        """The loop has decided to end before its last iteration. A replacement's ends, too."""
        self.changes = 0
        self.kind = ""
        """The kind of the current or last call."""
        self.made_again = False
        """The loop is far ahead of the call that is made, which is made again."""
        self._given_totals: dict[str, Any] | None = None
        self._logged: int | None = None  # the last iteration whose losses are in the totals
        # Of the last iterations, by number: the losses that the loop has got, how they are added to totals where
        # nothing is printed, and the totals after a log that was made again.
        self._losses: dict[int, dict[str, torch.Tensor]] = {}
        self._sums: dict[int, Callable[[dict[str, Any]], object]] = {}
        self._totals_after: dict[int, dict[str, Any]] = {}
        self._left: dict[int, dict[str, Any]] = {}  # what the step of an elastic job has left for its log, as in save()
        self._since: list[tuple[int, Callable[[dict[str, Any]], object]]] = []  # summed up since the last call
        self._common: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def enter_call(self, kind: str) -> None:
        """A call is about to be made, or skipped."""
        self.kind = kind

    def finished(
        self,
        iteration: int,
        returned: tuple[Any, ...],
        params_norm: float | None = None,
        packed: tuple[float | None, float | None] = NONE,
    ) -> tuple[Any, ...]:
        """``train_step`` has returned. Returns what the loop is to get, which may have it already: a step that is made
        again in another size has a loss that differs in its last bits, and that one is logged, and summed up."""
        self.result = TrainResult.of(returned, params_norm, packed)
        if self.result.skipped:
            self.overflows.add(iteration)
        if self.elastic is not None:
            self._left[iteration] = self._for_log()
        returned = self.handed(iteration, returned)
        if iteration in self._sums and self.totals is not None:
            totals = _copied(self.totals)
            self._sums[iteration](totals)
            self._totals_after[iteration] = totals
        self._forget(iteration - _KEPT)
        self.changes += 1
        return returned

    def handed(self, iteration: int, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``train_step`` returns, with its losses in the dict that the loop has got, if it has."""
        losses, found = self._losses.setdefault(iteration, {}), dict(returned[0])
        losses.clear()
        losses.update(found)
        if not self._far_back:
            _drop(self._losses, iteration - _KEPT)
        return losses, *returned[1:]

    def _forget(self, last: int) -> None:
        _drop(self._sums, last)
        _drop(self._totals_after, last)
        _drop(self._left, last)

    def summed(self, iteration: int, again: Callable[[dict[str, Any]], object]) -> None:
        """The losses of ``iteration`` have been added to the totals, outside of a call. ``again``: adds them to
        others."""
        self._sum_up(iteration, again)
        if self._far_back:
            self._since.append((iteration, again))

    def _sum_up(self, iteration: int, again: Callable[[dict[str, Any]], object]) -> None:
        self._logged, self._sums[iteration] = iteration, again
        self._forget(iteration - _KEPT)

    def printed(self, iteration: int) -> None:
        """The log of ``iteration`` has been made, in a call."""
        self._logged = iteration
        if self.totals is not None:
            self._totals_after[iteration] = _copied(self.totals)
        self.changes += 1

    def decided(self, exits: bool) -> None:
        """``checkpoint_and_decide_exit`` has returned."""
        if exits != self.exits:
            self.exits = exits
            self.changes += 1

    def has_ended(self) -> bool:
        """The result of a skipped ``checkpoint_and_decide_exit``: what it returned in the dead process, in which calls
        may have come after it (parameters are gathered at the end)."""
        found = self._restored
        if self.exits or found is None or not found["exits"]:
            return self.exits
        return bool(found["arguments"].get("curr_iteration") == getattr(self._args, "curr_iteration", None))

    def logging(self, totals: dict[str, Any]) -> None:
        """``training_log`` is about to be called with ``totals``."""
        if self.totals is None:
            self.totals = totals
            if self._given_totals is not None:
                _fill(totals, self._given_totals)
                self._given_totals = None

    # -- LoopState --------------------------------------------------------------------------------

    def iteration_of(self, kind: str) -> int:
        """As Megatron's log numbers it, from 1; all calls of an iteration have this number."""
        return int(getattr(self._args, "curr_iteration", getattr(self._args, "iteration", 0))) + 1

    def save(self) -> dict[str, Any]:
        return {
            **self._for_log(),
            "overflows": sorted(self.overflows),
            "totals": _copied(self.totals or self._given_totals or {}),
            "logged": self._logged,
            "consumed_valid_samples": self._args.consumed_valid_samples,
            "kind": self.kind,
            "functions": self._functions(),  # the loop gives them back between two calls, and hooks, too
            "rerun": {name: getattr(self._rerun, name) for name in _RERUN},
            "rerun_mode": self._rerun.mode.value,  # an evaluation switches it off, and may be cut short
            "largest": {name: dict(getattr(self._rerun, name)) for name in _RERUN_LARGEST},
            "positions": [] if self._positions is None else self._positions.positions(),
            "exits": self.exits,
            **self._here(),
        }

    def _for_log(self) -> dict[str, Any]:
        """What ``train_step`` leaves for the log of its step."""
        return {
            "result": self.result.returned(),
            "params_norm": self.result.params_norm,
            "packed": self.result.packed,
            "trackers": trackers.save() if self.elastic is None else self.elastic.losses.entries,
            "micro_batches_logged": 1 if self.elastic is None else self.elastic.losses.micro_batches,
        }

    def _of_script(self) -> dict[str, Any]:
        """What only the loop itself sets, between two calls. An elastic job's number of micro-batches is that of its
        size."""
        of_size = self.elastic is not None
        return {
            "arguments": {name: value for name in _OF_SCRIPT if (value := getattr(self._args, name, None)) is not None},
            "micro_batches": {} if of_size else plain_fields(calculator()),
        }

    def _here(self) -> dict[str, Any]:
        """The part of :meth:`save` that is this script's place."""
        return {"running": self._running(), "hooked": hooked(self._chunks), **self._of_script()}

    def _functions(self) -> dict[str, Any]:
        configs = [chunk.config for chunk in self._chunks[:1]]
        return {name: getattr(config, name) for config in configs for name in PUT_ASIDE if hasattr(config, name)}

    def _set_functions(self, functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(self._chunks[0].config, name, function)

    def _running(self) -> list[str]:
        return [name for name, timer in self._timers._timers.items() if getattr(timer, "_started", False)]

    def load(self, saved: dict[str, Any]) -> None:
        from megatron.core.rerun_state_machine import RerunMode, RerunState

        if saved.get("kind") == "log":  # its step may have been made again since, in another size
            saved = {**saved, **self._left.get(saved["arguments"]["curr_iteration"], {})}
        self.result = TrainResult.of(saved["result"], saved["params_norm"], tuple(saved.get("packed", NONE)))
        self.overflows = set(saved["overflows"])
        self._logged = saved["logged"]
        totals = self._totals_after.get(saved["logged"], saved["totals"])
        if self.totals is None:
            self._given_totals = dict(totals)
        else:
            _fill(self.totals, totals)
        self._args.consumed_valid_samples = saved["consumed_valid_samples"]
        self._set_script(saved, saved["running"])
        set_hooked(self._chunks, saved.get("hooked", hooked(self._chunks)))
        self._set_functions(saved.get("functions", {}))  # none in another process
        self.exits, self.kind = saved["exits"], saved.get("kind", self.kind)  # none in checkpoints of before
        for name, value in saved["rerun"].items():
            setattr(self._rerun, name, value)
        for name, values in saved["largest"].items():
            setattr(self._rerun, name, dict(values))
        self._rerun.state, self._rerun.mode = RerunState.NOT_RUNNING_YET, RerunMode(saved["rerun_mode"])
        trackers.load(saved["trackers"])
        if self._positions is not None:
            self._positions.set_positions(saved["positions"])
        if self.elastic is not None:
            self.elastic.losses.adopt(saved["trackers"], saved["micro_batches_logged"])

    def _set_script(self, of_script: Mapping[str, Any], running: Collection[str]) -> None:
        vars(self._args).update(of_script["arguments"])
        vars(calculator()).update(of_script["micro_batches"])
        for name, timer in self._timers._timers.items():
            if hasattr(timer, "_started"):
                timer._started = name in running  # one that runs refuses to be started again

    def restored(self, saved: dict[str, Any]) -> None:
        saved = {**saved, **self._common}
        self._restored, self._common = saved, {}
        self.overflows = set(saved["overflows"])

    def resume(self) -> None:
        """Raises ConfigError if the script has not come to where the state is from."""
        if self._restored is not None:
            if self.layouts is None:  # of another layout the script's place is no part of the state
                self._check_script(self._restored)
            self.load({**self._restored, **self._here()})

    def _check_script(self, restored: Mapping[str, Any]) -> None:
        there, here = restored["arguments"], self._of_script()["arguments"]
        odd = [name for name in _PLACED if name in there and there[name] != here.get(name)]
        kind = restored.get("kind", self.kind)
        if odd or kind != self.kind:
            said = ", ".join(f"{name} {there[name]} and not {here.get(name)}" for name in odd)
            raise ConfigError(
                f"the state is of another place in Megatron-LM's loop ({said or 'the same iteration'}; behind a call "
                f"{kind!r} and not {self.kind!r}): its job was begun with another checkpoint of Megatron's (--load, "
                "--ckpt-step), other batch sizes, or other intervals of logs, evaluations or checkpoints; the same are "
                "allowed"
            )

    # -- PlacedLoop -------------------------------------------------------------------------------

    def place(self) -> CallPlace:
        summed, self._since = tuple(self._since), []
        self.made_again = False
        gathering = tuple(hooked(self._chunks)), self._functions()
        return CallPlace(self.kind, tuple(self._running()), self._of_script(), summed, *gathering)

    def go_back(self, place: CallPlace, *, restored: bool) -> None:
        self.made_again = True
        if restored:
            if self._restored is None:
                raise RestoreError(f"call {place.kind!r} is to be made again from a restored state, and none has come")
            for kept in (self._sums, self._totals_after, self._left):
                kept.clear()  # of what has been given up
            self.load({**self._restored, "running": place.running, "hooked": place.hooked, **place.of_script})
            for iteration in {place.iteration, *(iteration for iteration, _ in place.summed)}:
                self.handed(iteration, self.result.returned())
        else:
            self._set_script(place.of_script, place.running)
            set_hooked(self._chunks, place.hooked)
        self._set_functions(place.functions)
        if place.kind == "train":
            trackers.load({})  # its log, or the loop after an evaluation, has cleared them
        self.kind = place.kind
        for iteration, again in place.summed:
            if self.totals is None:
                raise RestoreError(f"the losses of iteration {iteration} cannot be added again: no log has come yet")
            again(self.totals)
            self._sum_up(iteration, again)

    def forget(self, place: CallPlace) -> None:
        _drop(self._losses, place.iteration - 2)

    # -- what is the same on all ranks, in every layout -------------------------------------------

    def common(self) -> dict[str, Any]:
        saved = self.save()
        return {name: saved[name] for name in _COMMON} | {"totals": dict(sorted(saved["totals"].items()))}

    def adopt_common(self, common: Mapping[str, Any]) -> None:
        """What is :meth:`restored` next is of a process of another layout, or is older than this."""
        self._common = dict(common)


class LMLoopAdapter(LoopAdapter, ElasticAdapter, RelayoutAdapter):
    """Its part of the rank-local state changes when ``train_step`` returns."""

    name = "megatron-lm-loop"

    def __init__(self, loop: LMLoop) -> None:
        super().__init__(loop)
        self._state = loop

    def capture_rank(self) -> dict[str, Any]:
        return {name: value for name, value in self._state.save().items() if name != "functions"}

    def local_state_mark(self) -> int:
        return self._state.changes

    def in_any_layout(self) -> bool:
        return self._state.layouts is not None

    def capture_common(self) -> dict[str, Any]:
        return self._state.common() if self.in_any_layout() else {}

    def restore_common(self, state: dict[str, Any]) -> None:
        if self.in_any_layout():
            self._state.adopt_common(state)

    def only_as_launched(self, most: int) -> str:
        return "" if self._state.elastic is None else self._state.elastic.only_as_launched()

    def tied_to_size(self) -> Sequence[str]:
        elastic = self._state.elastic
        return () if elastic is None else tuple(elastic.tied_to_size())

    def resized(self) -> None:
        if self._state.elastic is not None:
            self._state.elastic.resized()


def _drop(known: dict[int, Any], last: int) -> None:
    for old in [number for number in known if number <= last]:
        del known[old]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _copied(totals: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in totals.items()}


def _fill(totals: dict[str, Any], saved: Mapping[str, Any]) -> None:
    totals.clear()
    totals.update(_copied(saved))

"""What a script with a loop of its own uses of Megatron besides model, optimizer and scheduler. (Megatron-LM's loop
goes another way, :mod:`fr_megatron.lm.state`.)

=======================  ========================================================================================
number of micro-batches  the calculator behind ``get_num_microbatches``, which a ramp-up of the batch size changes
forward pre-hooks        with ``overlap_param_gather``: taken away for an evaluation, and given back after it
losses for the log       what layers sum up until the script reports it (:mod:`fr_megatron.trackers`): a survivor goes
                         back, a replacement begins with none
timers                   one that was running in an interrupted step would refuse to be started again
reduction of gradients   the interleaved schedule puts aside what begins it (``grad_sync_func``) while it only goes
                         forward, and leaves it so where an evaluation is cut short: survivors would reduce in
                         another order than replacements
=======================  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashrecovery.adapter import plain_fields
from fr_megatron import trackers
from fr_megatron.elastic import resize_calculator

PUT_ASIDE = ("grad_sync_func", "param_sync_func")
"""Fields of the model's configuration that the interleaved schedule puts aside."""


class OwnLoop:
    """What one script's own loop keeps in Megatron's objects. ``chunks``: its model chunks."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._running: frozenset[str] = frozenset()
        self._sums: dict[str, trackers.Entry] = {}
        self._functions: list[dict[str, Any]] = []

    def capture_common(self) -> dict[str, Any]:
        """The state at a step boundary. Timers, functions and losses for the log are only remembered here: they are
        this process's own."""
        self._sums = trackers.save()
        self._running = frozenset(name for name, timer in self._timers().items() if timer._started)
        self._functions = [{name: getattr(config, name, None) for name in PUT_ASIDE} for config in self._configs()]
        return {
            # Not the rank, by which it chooses which one logs: the only field that is each rank's own.
            "micro_batches": {k: v for k, v in plain_fields(calculator()).items() if k != "rank"},
            "replicas": _replicas(),
            "hooked": hooked(self._chunks),
        }

    def restore_common(self, state: Mapping[str, Any]) -> None:
        vars(calculator()).update(state["micro_batches"])
        if state.get("replicas", _replicas()) != _replicas():
            resize_calculator()
        known = state["hooked"]
        if len(known) != len(self._chunks):  # a checkpoint of another layout; a script does the same with all chunks
            known = [any(known)] * len(self._chunks)
        set_hooked(self._chunks, known)
        trackers.load(self._sums)
        for name, timer in self._timers().items():
            timer._started = name in self._running
        for config, functions in zip(self._configs(), self._functions, strict=False):  # none in a replacement
            for name, function in functions.items():
                if function is not None and getattr(config, name) is None:
                    setattr(config, name, function)

    def _configs(self) -> list[Any]:
        return [chunk.config for chunk in self._chunks if hasattr(chunk, "config")]

    def _timers(self) -> dict[str, Any]:
        """The timers of Megatron's own schedules and of the script, without stand-ins that measure nothing."""
        timers = getattr(getattr(self._chunks[0], "config", None), "timers", None)
        return {name: timer for name, timer in getattr(timers, "_timers", {}).items() if hasattr(timer, "_started")}


class _NoCalculator:
    """Stands where the script has none."""


def calculator() -> Any:
    """That of ``get_num_microbatches()``; something without attributes where the script has none."""
    from megatron.core import num_microbatches_calculator as module

    return module._GLOBAL_NUM_MICROBATCHES_CALCULATOR or _NoCalculator()


def _replicas() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size())


def hooked(chunks: Sequence[Any]) -> list[bool]:
    """For each chunk: whether its hooks that gather parameters exist."""
    return [bool(_handles(chunk)) for chunk in chunks]


def set_hooked(chunks: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Have them there, or not."""
    for chunk, there in zip(chunks, wanted, strict=True):
        if there and not _handles(chunk):
            chunk.enable_forward_pre_hook()
        elif _handles(chunk) and not there:
            chunk.disable_forward_pre_hook(param_sync=False)


def _handles(chunk: Any) -> Mapping[Any, Any]:
    """The handles of the hooks that gather parameters; none where the wrapper gathers in another way."""
    handles: Mapping[Any, Any] = getattr(chunk, "remove_forward_pre_hook_handles", {})
    return handles

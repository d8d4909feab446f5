"""Losses that expert layers accumulate in a step for its log, in a job whose size or layout may change before the log.

The log is a separate call. Between the two, ranks may leave, or the job may go back to a checkpoint of that point. The
sums of a lost rank would be unknown, and a mean over micro-batches would use those of another size. So at the end of
each step all ranks compute the values for the log, and the number of micro-batches in the mean. The rank that logs then
prints what would have been logged without the change.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fr_megatron import trackers
from fr_megatron.capabilities import METRICS
from fr_megatron.own_loop import calculator


def has_experts(args: Any) -> bool:
    """Whether these flags are of a model with MoE layers."""
    return bool(getattr(args, "num_experts", None))


def kept_otherwise(args: Any) -> bool:
    """Whether this megatron-core keeps losses of experts in another way than is known here."""
    return has_experts(args) and not METRICS.takes("dictionary")


class LayerLosses:
    """The losses by layer of one process.

    Args:
        args: Megatron's, as the loop uses them.

    Attributes:
        micro_batches: of a replica, in the step in which layers have summed up their losses for the log.
        entries: these, since the last log. (What layers sum up in a step that is under way is each rank's own.)
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self.micro_batches = 1
        self.entries: dict[str, trackers.Entry] = {}

    def stepped(self) -> None:
        """``train_step`` has returned on this rank. A collective of all ranks, if there are experts."""
        if has_experts(self._args):
            self.entries = trackers.settle()
            self.micro_batches = calculator().get()

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Within, Megatron logs a step's losses of experts as it would have in the size and layout of that step."""
        if not has_experts(self._args):
            yield
            return
        training: Any = importlib.import_module("megatron.training.training")
        track = training.track_moe_metrics

        def as_in_the_step(loss_scale: float, *args: Any, **kwargs: Any) -> None:
            track(1 / self.micro_batches, *args, **kwargs)

        trackers.of_one_stage()
        training.track_moe_metrics = as_in_the_step
        try:
            yield
        finally:
            training.track_moe_metrics = track
        self.entries = {}

    def adopt(self, entries: Mapping[str, trackers.Entry], micro_batches: int) -> None:
        """Go back, or forward, to the beginning of a call at which these were kept. The layers get them otherwise
        (:func:`fr_megatron.trackers.load`)."""
        self.entries, self.micro_batches = dict(entries), micro_batches

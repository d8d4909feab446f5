"""A peer that dies while a version is copied at its hand-out takes no other process with it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from flashrecovery.worker.loop import Loop


def loop(*, stop_comes: bool = True, own_calls: bool = False, error: Exception | None = None) -> Loop:
    """One that has committed version 5 in a step whose tensors change above the block."""
    it = Loop.__new__(Loop)
    gate = MagicMock(version=5, stopped=False)

    def explain(_: BaseException) -> bool:
        gate.stopped = stop_comes
        return stop_comes

    it.copies = MagicMock()
    it.copies.before_mutation.side_effect = error or dist.DistBackendError("communication was abandoned: rank 2")
    it.sealing = MagicMock()
    it._gate, it._registry = gate, MagicMock(habits=SimpleNamespace(touched=True, known=True, learn=lambda *a, **k: []))
    it._worker, it._outside, it._touches, it._step = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    it._touches.seen.return_value = False
    it._collectives, it._stops = MagicMock(stood_in_for=False), MagicMock(explain=explain)
    it._own_calls, it._discarded_run, it._unsettled, it._committed = own_calls, None, True, True
    return it


def test_the_version_is_not_handed_out_and_is_as_it_was() -> None:
    it = loop()
    it.settle()
    assert it.gate.stopped and not it.touched, "it can be gone on from"


def test_without_a_stop_it_is_an_error() -> None:
    with pytest.raises(dist.DistBackendError):
        loop(stop_comes=False).settle()


def test_what_is_no_consequence_of_a_death_is_an_error() -> None:
    with pytest.raises(OSError, match="full"):
        loop(error=OSError("disk full")).settle()


def test_where_the_script_makes_the_calls_the_end_of_the_step_deals_with_it() -> None:
    with pytest.raises(dist.DistBackendError):
        loop(own_calls=True).settle()

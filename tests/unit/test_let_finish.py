"""A rank that may finish its step is waited for, but not where it waits for a dead one: on a GPU no one can tell that
from its operations, which count as done when they are launched."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from flashrecovery import groups
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.control.control_thread import Control

GRACE_S, BLOCKED_S = 2.0, 0.1


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How many the training thread has made; ``waiting``: the one that it is in."""
    made = SimpleNamespace(counts=itertools.repeat(7), waiting=None)
    monkeypatch.setattr(groups, "operation_count", lambda: next(made.counts))
    monkeypatch.setattr(groups, "main_op", lambda: made.waiting)
    return made


def waited_s(*, runs_behind: bool, step_s: float = 0.0, blocked_s: float = 0.0, finishes_s: float = 99.0) -> float:
    """How long a rank is waited for that finishes after ``finishes_s``."""
    began = time.monotonic()

    class Gate:
        step_s = 0.0

        @property
        def finishing(self) -> bool:
            return time.monotonic() - began < finishes_s

    gate: Any = Gate()
    gate.step_s = step_s
    device: Any = SimpleNamespace(runs_behind=runs_behind, blocked_s=blocked_s)
    limits: Any = SimpleNamespace(mutation_blocked_s=BLOCKED_S)
    nothing: Any = None
    control = Control(nothing, gate, limits, device, *[nothing] * 5)
    control._let_finish(GRACE_S)
    return time.monotonic() - began


def test_on_a_device_a_rank_that_begins_no_operation_is_waited_for_as_long_as_a_step_takes(
    operations: SimpleNamespace,
) -> None:
    assert BLOCKED_S <= waited_s(runs_behind=True) < GRACE_S / 2
    assert 0.5 <= waited_s(runs_behind=True, step_s=0.5) < GRACE_S / 2 + 0.5


def test_one_that_goes_on_is_waited_for(operations: SimpleNamespace) -> None:
    operations.counts = itertools.count()
    assert waited_s(runs_behind=True) >= GRACE_S
    assert 0.4 <= waited_s(runs_behind=True, finishes_s=0.4) < GRACE_S


def test_one_that_waits_for_the_device_is_not(operations: SimpleNamespace) -> None:
    operations.counts = itertools.count()
    assert waited_s(runs_behind=True, blocked_s=0.2) < GRACE_S / 2


def test_on_a_cpu_an_optimizer_that_makes_no_operation_is_waited_for(operations: SimpleNamespace) -> None:
    assert waited_s(runs_behind=False) >= GRACE_S


def test_on_a_cpu_one_that_is_in_an_operation_is_not(operations: SimpleNamespace) -> None:
    since = time.monotonic()
    operations.waiting = SimpleNamespace(since=since)
    assert waited_s(runs_behind=False) < GRACE_S / 2
    assert time.monotonic() - since >= BLOCKED_S


@pytest.mark.parametrize("waits_in_barrier", [False, True])
def test_communication_is_given_up_when_it_has_finished(
    waits_in_barrier: bool, operations: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it still sends, others may need; but no one lets it through a barrier in which the dead rank is missing."""
    operations.counts = itertools.count()
    began = time.monotonic()
    finishing_when_given_up: list[bool] = []

    class Gate(MagicMock):
        @property
        def finishing(self) -> bool:
            return time.monotonic() < began + 0.3

    gate: Any = Gate()
    gate.stale.return_value, gate.stop.return_value = False, True
    gate.waits_in_barrier, gate.outside, gate.between, gate.above_call = waits_in_barrier, False, False, False
    gate.step_s = 0.0
    device, limits = SimpleNamespace(runs_behind=True, blocked_s=0.0), SimpleNamespace(mutation_blocked_s=BLOCKED_S)
    monkeypatch.setattr(groups, "abandon", lambda reason: finishing_when_given_up.append(gate.finishing))
    control: Any = Control(MagicMock(), gate, limits, device, *[MagicMock()] * 5)  # type: ignore[arg-type]
    control._stop(pb.Command(generation=1, stop=pb.Stop(finish_to=3, mutation_grace_s=GRACE_S)))
    assert finishing_when_given_up == ([True, False] if waits_in_barrier else [False])
    control.resumed()

"""The gate between training thread and control thread: a step is void before its mutation, and complete after it."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery.errors import StepInterrupted
from flashrecovery.runtime.page import TAG_MUTATING, Page
from flashrecovery.util.clock import lease_clock
from flashrecovery.worker.control.control_thread import Control
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.control.overhead import Overhead


@pytest.fixture
def gate():  # type: ignore[no-untyped-def]
    page = Page.create("gate")
    g = Gate(page)
    g.initialised()
    yield g
    page.close()


class Clock:
    """Of whole milliseconds, which pass when they are asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000_000
        monkeypatch.setattr("flashrecovery.worker.control.overhead.time.monotonic_ns", lambda: self.ns)

    def run(self, ms: int) -> None:
        self.ns += ms * 1_000_000


def test_what_recovery_takes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, overhead = Clock(monkeypatch), Overhead()
    with overhead:
        clock.run(2)
    clock.run(100)  # the step's own
    with overhead:
        clock.run(3)
        with overhead:
            clock.run(1)
        overhead.aside(lambda: clock.run(50))
        assert overhead.committed(clock.ns) == 6_000_000
        clock.run(4)  # what follows the commit counts for the next step
    overhead.aside(lambda: clock.run(50))  # not in the middle of a hook: nothing to set right
    with overhead:
        assert overhead.committed(clock.ns) == (4 * 6_000_000 + 4_000_000) // 5
        clock.run(1000)  # a recovery
        overhead.restart()
        clock.run(7)
    with overhead:
        assert overhead.committed(clock.ns) == 7_000_000


def test_what_recovery_takes_is_on_the_page(gate: Gate) -> None:
    gate.resume(0, 0)
    gate.begin()
    with gate.overhead:
        gate.mutate()
        gate.commit()
    assert 0 < gate.page.health().overhead_s < 1
    gate.resume(1, 1)
    assert gate.page.health().overhead_s == 0


def test_tags_of_a_step(gate: Gate) -> None:
    gate.begin()
    assert gate.page.tag == 0 and gate.live == 0
    gate.mutate()
    assert gate.page.tag == TAG_MUTATING and gate.live == -1
    assert gate.commit()
    assert gate.page.tag == 1 and gate.live == 1 and gate.version == 1


def test_a_stop_before_the_mutation_voids_the_step(gate: Gate) -> None:
    gate.begin()
    gate.stop(1, 0)
    with pytest.raises(StepInterrupted):
        gate.mutate()
    with pytest.raises(StepInterrupted):
        gate.commit()
    assert gate.live == 0 and gate.version == 0


def test_a_stop_after_the_mutation_lets_the_step_finish(gate: Gate) -> None:
    gate.begin()
    gate.mutate()
    gate.stop(1, 1)
    assert gate.commit() is False
    assert gate.live == 1


def test_a_held_rank_may_finish_what_another_has_finished(gate: Gate) -> None:
    gate.resume(4, 0)
    gate.begin()
    assert gate.hold(1) == (True, False, 4)
    mutated = threading.Thread(target=gate.mutate)
    mutated.start()
    mutated.join(0.05)
    assert mutated.is_alive(), "no mutation begins while held"
    assert gate.stop(1, finish_to=5) is True
    mutated.join(5)
    assert gate.commit() is False and gate.live == 5
    gate.begin()
    with pytest.raises(StepInterrupted):
        gate.mutate()


def test_an_outdated_resume_does_not_start_the_rank(gate: Gate) -> None:
    gate.stop(3, -1)
    assert gate.resume(0, 2) is False and gate.stopped
    assert gate.resume(0, 3) is True and not gate.stopped
    assert gate.outdated(2) and not gate.outdated(3)


def test_an_older_resume_does_not_clear_a_newer_hold(gate: Gate) -> None:
    """The hold is heard by the control thread, while the resume still waits for the training thread."""
    gate.resume(4, 0)
    gate.stop(1, 4)
    gate.leave_step()
    assert gate.hold(2) == (False, False, 4)
    assert gate.resume(4, 1) is False and gate.outdated(1)
    assert gate.generation == 0 and gate.page.health().generation == 0, "it takes no step in generation 1"
    gate.begin()
    with pytest.raises(StepInterrupted):
        gate.mutate()
    gate.stop(2, -1)
    assert gate.resume(4, 2) is True
    gate.begin()
    gate.mutate()
    assert gate.commit() and gate.version == 5


def test_a_hold_and_a_stop_that_are_older_than_the_resume_do_nothing(gate: Gate) -> None:
    gate.stop(3, -1)
    gate.resume(4, 3)
    gate.begin()
    gate.hold(3)
    gate.stop(2, -1)
    gate.mutate()
    assert gate.commit() and gate.version == 5 and gate.live == 5 and gate.stale(3) and not gate.stale(4)


def test_the_barrier_before_the_mutation_is_known(gate: Gate) -> None:
    gate.begin()
    assert not gate.waits_in_barrier
    with pytest.raises(ValueError), gate.in_barrier():
        assert gate.waits_in_barrier
        raise ValueError
    assert not gate.waits_in_barrier


def test_no_change_of_state_begins_after_the_lease(gate: Gate) -> None:
    """Its node may have been declared dead, and its agent may stand still."""
    gate.begin()
    gate.page.lend(lease_clock() + 60)
    assert not gate.page.lease_over()
    gate.mutate()
    gate.commit()
    gate.begin()
    gate.page.lend(lease_clock() - 0.001)
    assert gate.page.lease_over()
    thread = threading.Thread(target=gate.mutate)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not gate.mutating
    gate.page.lend(lease_clock() + 60)  # an answer has come
    thread.join(5)
    assert gate.mutating
    gate.commit()
    gate.page.lend(0.001)
    gate.stop(1, 0)
    with pytest.raises(StepInterrupted):  # a rank that is stopped waits for nothing
        gate.mutate()


def test_a_module_is_interrupted_by_a_stop_unless_it_runs_while_data_is_read() -> None:
    page = Page.create("reading")
    interruptions: list[None] = []
    gate = Gate(page, on_interrupt=lambda: interruptions.append(None))
    gate.initialised()
    reading = [True]
    control = Control(MagicMock(), gate, *[MagicMock()] * 6, is_reading=lambda: reading[0])  # type: ignore[arg-type]
    module = torch.nn.Identity()
    try:
        gate.resume(0, 0)
        gate.enter_block()
        gate.begin()
        gate.stop(1, 0)
        control._interrupt_modules()
        module(1)
        assert interruptions == []
        reading[0] = False
        with pytest.raises(StepInterrupted):
            module(1)
        assert interruptions == [None]
        control.resumed()
        module(1)
    finally:
        control.resumed()
        page.close()

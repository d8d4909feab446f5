"""The gate between training thread and control thread: a step is void before its mutation, and complete after it."""

from __future__ import annotations

import threading

import pytest

from flashrecovery.errors import StepInterrupted
from flashrecovery.page import TAG_MUTATING, Page
from flashrecovery.worker.gate import Gate


@pytest.fixture
def gate():  # type: ignore[no-untyped-def]
    page = Page.create("gate")
    g = Gate(page)
    g.live = 0
    yield g
    page.close()


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
    assert gate.hold() == (True, False, 4)
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


def test_the_barrier_before_the_mutation_is_known(gate: Gate) -> None:
    gate.begin()
    assert not gate.waits_in_barrier
    with pytest.raises(ValueError), gate.in_barrier():
        assert gate.waits_in_barrier
        raise ValueError
    assert not gate.waits_in_barrier

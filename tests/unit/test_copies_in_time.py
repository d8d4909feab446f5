"""No one can know that all ranks have come to the mutation before the copies of the version are complete."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from flashrecovery.worker.step.transaction import Transaction

Told = list[str]


def step(told: Told, *, barrier: bool = False, in_every_step: bool = True) -> Transaction:
    """A step whose collaborators write down what matters here."""

    class Step(Transaction):
        def _needs_barrier(self, *, apart: bool) -> bool:
            return barrier

        def _barrier(self) -> None:
            told.append("barrier")

    worker, copies, touches = MagicMock(), MagicMock(), MagicMock()
    worker.gate.version, worker.gate.mutating, worker.gate.in_block = 5, False, True
    worker.registry.habits.reseal = worker.registry.habits.needs_undo = False
    worker.gate.mutate.side_effect = lambda: told.append("mutated")
    copies.wait.side_effect = lambda: told.append("copied")
    copies.local_states_only, copies.in_every_step = False, in_every_step
    touches.seen.return_value = False
    on_device = MagicMock(holding=False)
    on_device.guards.return_value = False
    return Step(worker, copies, MagicMock(), touches, _quiet(), MagicMock(), MagicMock(), on_device)


def _quiet() -> Any:
    collectives = MagicMock()
    collectives.failed = False
    return collectives


@pytest.fixture
def told() -> Told:
    return []


def test_one_wait_a_step_when_the_gradients_are_about_to_be_synchronised(told: Told) -> None:
    it = step(told)
    for _ in range(2):
        it.begin()
        it.sealed()
        it.sealed()
        assert told == [], "a micro-batch after another, and no wait"
        it.synchronising()
        it.synchronising()
        it.sealed(recheck=True)
        it.mutating()
        assert told == ["copied", "mutated"]
        told.clear()


@pytest.mark.parametrize("in_every_step", [True, False])
def test_a_wait_that_comes_after_the_synchronisation_is_followed_by_a_barrier(told: Told, in_every_step: bool) -> None:
    it = step(told, in_every_step=in_every_step)
    it.begin()
    it.sealed()
    it.mutating()
    assert told == (["copied", "barrier", "mutated"] if in_every_step else ["copied", "mutated"])


def test_the_barrier_comes_after_the_copies(told: Told) -> None:
    it = step(told, barrier=True)
    it.begin()
    it.sealed()
    it.synchronising()
    it.mutating()
    assert told == ["copied", "barrier", "mutated"]


def test_a_step_without_a_forward_pass_has_a_barrier(told: Told) -> None:
    it = step(told, in_every_step=False)
    it.begin()
    it.sealed()
    it.synchronising()
    it.mutating()
    assert told == ["copied", "mutated"]
    told.clear()
    it.begin()
    it.mutating()
    assert told == ["copied", "barrier", "mutated"]


def test_what_the_script_does_between_two_steps_waits_for_nothing(told: Told) -> None:
    it = step(told)
    it._gate.in_block = False
    it.sealed()
    it.synchronising()
    assert told == []

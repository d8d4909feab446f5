"""On a device the host runs ahead: a step waits for the device where a tag says something about the state, and what has
been aborted since its mutation began is torn, though nothing has raised."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest

from flashrecovery.errors import StepInterrupted
from flashrecovery.worker.step.transaction import Transaction


class Step:
    """One whose collaborators write down the order of what matters here."""

    def __init__(self, *, quiet: bool = True, abandoned: bool = False, on_device: bool = True) -> None:
        self.told: list[str] = []
        self.worker, self.collectives, self.stops = MagicMock(), MagicMock(), MagicMock()
        gate = self.worker.gate
        gate.version, gate.mutating, gate.in_block, gate.stopped = 5, False, True, True
        gate.overhead.aside.side_effect = self._call
        gate.mutate.side_effect = self._mutate
        gate.torn.side_effect = self._writes("torn")
        gate.commit.side_effect = self._writes("committed")
        self.worker.device.runs_behind = on_device
        self.worker.device.before_mutation.side_effect = self._writes("waited")
        self.worker.device.before_commit.side_effect = self._writes("waited")
        self.worker.registry.world_size = 1  # no barrier
        self.worker.registry.habits.reseal = self.worker.registry.habits.needs_undo = False
        self.collectives.failed = self.collectives.raised = False
        self.collectives.quiet, self.collectives.abandoned = quiet, abandoned
        copies, touches = MagicMock(), MagicMock()
        copies.local_states_only, copies.in_every_step, touches.seen.return_value = False, False, False
        others = MagicMock(), touches, self.collectives, MagicMock(), self.stops
        self.transaction = Transaction(self.worker, copies, *others)
        self.transaction.begin()
        self.transaction.sealed()

    @staticmethod
    def _call(action: Callable[[], None]) -> None:
        action()

    def _writes(self, word: str) -> Callable[..., None]:
        return lambda *arguments, **more: self.told.append(word)

    def _mutate(self) -> None:
        self.told.append("mutated")
        self.worker.gate.mutating = True


def test_the_device_is_waited_for_before_the_first_mutation() -> None:
    step = Step()
    step.transaction.mutating()
    assert step.told == ["waited", "mutated"], "the gradients are whole, and no kernel runs on garbage"


@pytest.mark.parametrize("quiet", [True, False])
def test_before_its_commit_if_something_was_communicated_after_it(quiet: bool) -> None:
    step = Step(quiet=quiet)
    step.transaction.mutating()
    step.transaction.commit(outside=True)
    assert step.told == ["waited", "mutated", *([] if quiet else ["waited"]), "committed"]


def test_what_was_aborted_after_the_mutation_had_begun_is_torn_though_nobody_was_told() -> None:
    step = Step(quiet=False, abandoned=True)
    step.transaction.mutating()
    with pytest.raises(StepInterrupted):
        step.transaction.commit(outside=True)
    assert step.told == ["waited", "mutated", "waited", "torn"]


@pytest.mark.parametrize(("quiet", "on_device"), [(True, True), (False, False)])
def test_otherwise_an_abort_tears_nothing(quiet: bool, on_device: bool) -> None:
    """Nothing was under way; or it would have raised, as it does without a device."""
    step = Step(quiet=quiet, abandoned=True, on_device=on_device)
    step.transaction.mutating()
    step.transaction.commit(outside=True)
    assert step.told[-1] == "committed"

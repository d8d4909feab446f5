"""On a device the host runs ahead: a step waits for the device where a tag says something about the state, and what has
been aborted since its mutation began is torn, though nothing has raised."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from flashrecovery.errors import StepInterrupted
from flashrecovery.worker.step.transaction import Transaction


class Step:
    """One whose collaborators write down the order of what matters here."""

    def __init__(
        self, *, quiet: bool = True, abandoned: bool = False, on_device: bool = True, held_back: bool = False
    ) -> None:
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
        self.habits = self.worker.registry.habits
        self.habits.reseal = self.habits.needs_undo = self.habits.touched = False
        self.collectives.failed = self.collectives.raised = False
        self.collectives.quiet, self.collectives.abandoned = quiet, abandoned
        copies, touches = MagicMock(), MagicMock()
        self.copies, self.touches, self.proving = copies, touches, MagicMock(due=False)
        copies.local_states_only, copies.in_every_step, touches.seen.return_value = False, False, False
        self.barrier = MagicMock(holding=False)
        self.barrier.guards.return_value = held_back
        self.barrier.begin.side_effect = self._hold
        self.barrier.end.side_effect = self._let_go
        self.worker.device.until.side_effect = self._writes("waited")
        others = MagicMock(), touches, self.collectives, self.proving, self.stops, self.barrier
        self.transaction = Transaction(self.worker, copies, *others)
        self.transaction.begin()
        self.transaction.sealed()

    @staticmethod
    def _call(action: Callable[[], None]) -> None:
        action()

    def _writes(self, word: str) -> Callable[..., None]:
        return lambda *arguments, **more: self.told.append(word)

    def _hold(self, _optimizer: object) -> None:
        self.told.append("held")
        self.barrier.holding = True

    def _let_go(self, *, void: bool) -> None:
        self.told.append("void" if void else "let go")
        self.barrier.holding = False

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


OPTIMIZER = MagicMock()


def test_what_is_held_back_happens_when_the_gradients_are_whole_and_the_state_may_change() -> None:
    """The order of what the host does is that without it; only the launches come before."""
    step = Step(held_back=True)
    step.transaction.mutating(OPTIMIZER)
    assert step.told == ["held"]
    step.transaction.launched()
    step.transaction.commit(outside=True)
    assert step.told == ["held", "waited", "mutated", "let go", "committed"]


@pytest.mark.parametrize(
    "needs",
    ["a comparison", "a barrier", "rank-local states", "an early write", "early writes", "a first step", "proof"],
)
def test_where_the_step_needs_the_host_it_waits_first(needs: str) -> None:
    step = Step(held_back=True)
    step.worker.gate.version = 64 if needs == "a comparison" else 5
    step.habits.reseal, step.copies.local_states_only = needs == "a barrier", needs == "rank-local states"
    step.touches.seen.return_value, step.habits.touched = needs == "an early write", needs == "early writes"
    step.habits.known, step.proving.due = needs != "a first step", needs == "proof"
    step.transaction._compare_habits = MagicMock(return_value=False)  # type: ignore[method-assign]
    step.transaction.mutating(OPTIMIZER)
    assert step.told == ["waited", "mutated"]


def test_so_it_does_where_nothing_says_which_optimizer_it_is() -> None:
    step = Step(held_back=True)
    step.transaction.mutating()
    assert step.told == ["waited", "mutated"]


@pytest.mark.parametrize("how", ["stopped", "aborted", "not told in time", "interrupted"])
def test_a_step_that_no_longer_counts_is_void_and_nothing_has_been_touched(how: str) -> None:
    """Its kernels have moved the version counters of what they have not written to."""
    step = Step(held_back=True)
    step.transaction.mutating(OPTIMIZER)
    gate = step.worker.gate
    if how == "stopped":
        gate.check.side_effect = StepInterrupted
    elif how == "interrupted":
        step.worker.device.until.side_effect = KeyboardInterrupt
    else:
        step.collectives.failed = step.collectives.given_up = True
        gate.stopped = False
        step.stops.wait.return_value = how == "aborted"
        gate.check.side_effect = StepInterrupted
    step.touches.begin.reset_mock()
    with pytest.raises((StepInterrupted, KeyboardInterrupt, dist.DistBackendError)):
        step.transaction.launched()
    assert step.told == ["held", *([] if how == "interrupted" else ["waited"]), "void"]
    step.touches.begin.assert_called_once_with()


def test_a_body_that_ends_by_an_error_leaves_nothing_held_back() -> None:
    step = Step(held_back=True)
    step.transaction.mutating(OPTIMIZER)
    step.transaction.unwound()
    step.transaction.unwound()
    assert step.told == ["held", "void"]


def test_a_script_that_catches_the_error_of_its_optimizer_commits_what_was_launched() -> None:
    step = Step(held_back=True)
    step.transaction.mutating(OPTIMIZER)
    step.transaction.commit(outside=True)
    assert step.told == ["held", "waited", "mutated", "let go", "committed"]


def test_whatever_else_changes_the_state_comes_after_what_is_held_back() -> None:
    step = Step(held_back=True)
    step.transaction.mutating(OPTIMIZER)
    step.transaction.mutating()
    assert step.told == ["held", "waited", "mutated", "let go"]

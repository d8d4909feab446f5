"""What must be in place on all ranks before one changes its state, and what a commit refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery import groups
from flashrecovery.errors import JobFailedError, StepInterrupted, UnsupportedError
from flashrecovery.plan.divergence import Past
from flashrecovery.worker.consistency import divergence_check
from flashrecovery.worker.consistency.divergence_check import DivergenceCheck, Unequal
from flashrecovery.worker.consistency.early_writes import EarlyWriteDetector
from flashrecovery.worker.local_state.step_profile import TOUCHED
from flashrecovery.worker.step.collectives import CollectiveWatch
from flashrecovery.worker.step.transaction import Transaction


class Step:
    """One of two ranks whose collaborators write down what is done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, compares: bool = False, spans: bool = True) -> None:
        """``compares``: the ranks compare what they have learned. ``spans``: gradients are synchronised by all."""
        self.done: list[str] = []
        self.in_barrier = False
        self.worker, self.copies, self.sealing = MagicMock(), MagicMock(), MagicMock()
        self.touches, self.collectives, self.stops = MagicMock(), MagicMock(), MagicMock()
        self.gate, self.habits = self.worker.gate, self.worker.registry.habits
        self.gate.version, self.gate.mutating, self.gate.in_block, self.gate.stopped = 5, False, True, False
        self.gate.overhead.aside.side_effect = lambda action: action()
        self.gate.mutate.side_effect = self._mutate
        self.gate.in_barrier = self._in_barrier
        self.gate.commit.side_effect = self._commit
        self.goes_on = True
        registry = self.worker.registry
        registry.world_size, registry.tensor_shards.return_value = 2, []
        adapter = MagicMock()
        adapter.sync_spans_world.return_value = spans
        registry.adapters = [adapter]
        self.habits.reseal = self.habits.needs_undo = self.habits.touched = False
        self.collectives.failed = self.collectives.raised = self.collectives.given_up = False
        self.collectives.quiet, self.worker.device.runs_behind = True, False
        self.collectives.step_is_committed.side_effect = self._writes("counted")
        self.copies.local_states_only = self.copies.in_every_step = False
        self.copies.wait.side_effect = self._writes("copies waited for")
        self.touches.seen.return_value = False
        self.sealing.step_begins.side_effect = self._writes("seals begin")
        self.sealing.forward_ends.side_effect = self._writes("sealed")
        self.sealing.more_belongs.side_effect = self._writes("sealed more")
        proving = MagicMock()
        proving.before_commit.return_value = {}
        group = MagicMock()
        group.barrier.side_effect = self._barrier
        monkeypatch.setattr(groups, "control_group", lambda: group)
        monkeypatch.setattr(groups, "stand_in", lambda on: self.done.append(f"stand in {on}"))
        monkeypatch.setattr(divergence_check, "is_due", lambda version: compares)
        monkeypatch.setattr(divergence_check, "compare_habits", self._compare)
        self.learned = False
        barrier = MagicMock(holding=False)
        self.transaction = Transaction(
            self.worker, self.copies, self.sealing, self.touches, self.collectives, proving, self.stops, barrier
        )
        self.transaction.begin()

    def _writes(self, word: str) -> Callable[..., None]:
        return lambda *arguments, **more: self.done.append(word)

    def _mutate(self) -> None:
        self.done.append("mutates")
        self.gate.mutating = True

    def _commit(self, *, outside: bool) -> bool:
        self.done.append("committed")
        return self.goes_on

    @contextmanager
    def _in_barrier(self) -> Iterator[None]:
        self.in_barrier = True
        yield
        self.in_barrier = False

    def _barrier(self) -> Any:
        self.done.append(f"barrier {self.in_barrier}")
        return MagicMock()

    def _compare(self, registry: object) -> tuple[list[str], bool]:
        self.done.append(f"compared {self.in_barrier}")
        return [], self.learned

    def forward(self) -> Step:
        """With its gradients' synchronisation."""
        self.transaction.sealed()
        self.transaction.synchronising()
        return self


def test_each_step_seals_again_and_waits_for_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    for _ in range(2):
        step.forward().transaction.mutating()
        step.gate.mutating = False
        step.transaction.begin()
    a_step = ["seals begin", "sealed", "copies waited for", "mutates"]
    assert step.done == [*a_step, *a_step, "seals begin"]


def test_the_next_step_does_not_count_a_forward_pass_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch).forward()
    step.transaction.begin()
    step.done.clear()
    step.transaction.mutating()
    assert step.done == ["sealed", "copies waited for", "barrier True", "mutates"], "nothing has said that all came"


def test_no_optimizer_steps_outside_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    step.gate.in_block = False
    with pytest.raises(UnsupportedError, match="outside of `with step:`"):
        step.transaction.mutating()
    assert "mutates" not in step.done


@pytest.mark.parametrize("mutates", [True, False])
def test_a_step_in_which_a_collective_failed_comes_to_nothing(mutates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its body has swallowed the error. Where no stop follows, it is the script's error."""
    step = Step(monkeypatch).forward()
    step.collectives.failed, step.stops.wait.return_value = True, False
    with pytest.raises(JobFailedError, match="and the step's body swallowed the error"):
        step.transaction.mutating() if mutates else step.transaction.commit(outside=True)
    step.stops.wait.return_value, step.gate.check.side_effect = True, StepInterrupted
    with pytest.raises(StepInterrupted):
        step.transaction.mutating() if mutates else step.transaction.commit(outside=True)
    assert "mutates" not in step.done and "committed" not in step.done


@pytest.mark.parametrize("why", ["", "forward", "habit", "copies", "groups"])
def test_what_needs_a_barrier_before_the_first_mutation(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward pass was seen; the ranks seal again; copies are not waited for on the way; part of the ranks only
    synchronise their gradients together."""
    step = Step(monkeypatch, spans=why != "groups")
    step.habits.reseal, step.copies.in_every_step = why == "habit", why == "copies"
    if why == "copies":
        step.transaction.sealed()  # its gradients are not synchronised where the copies are waited for
    elif why != "forward":
        step.forward()
    step.transaction.mutating()
    assert ("barrier True" in step.done) == bool(why) and step.done[-1] == "mutates"


@pytest.mark.parametrize("learned", [True, False])
def test_what_is_compared_is_sealed_once_more_if_more_belongs(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, compares=True).forward()
    step.learned, step.habits.silent = learned, []
    step.done.clear()
    step.transaction.mutating()
    assert step.done == ["compared True", *(["sealed more", "barrier True"] if learned else []), "mutates"]


def test_a_step_that_has_changed_tensors_early_lets_all_later_ones_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch).forward()
    step.touches.seen.return_value = True
    step.transaction.mutating()
    step.habits.hear.assert_called_once_with(TOUCHED)
    step.worker.notice.assert_called_once()
    step.copies.before_mutation.assert_called_once_with(5, touched=True)


def test_a_step_that_changes_nothing_is_sealed_with_its_copies_before_its_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(monkeypatch).forward()
    step.done.clear()
    step.transaction.commit(outside=True)
    assert step.done == ["copies waited for", "sealed", "barrier True", "committed", "counted"]


@pytest.mark.parametrize("outside", [True, False])
def test_a_rank_that_commits_when_stopped_is_answered_by_stand_ins_outside(
    outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(monkeypatch).forward()
    step.transaction.mutating()
    step.goes_on = False
    step.done.clear()
    step.transaction.commit(outside=outside)
    assert step.done == ["committed", "counted", f"stand in {outside}"], "what the step has counted is none of theirs"


def test_a_failed_collective_counts_against_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [0]
    monkeypatch.setattr(groups, "failure_count", lambda: failures[0])
    watch = CollectiveWatch()
    for _ in range(2):
        watch.step_begins()
        assert not watch.failed
        failures[0] += 1
        assert watch.failed


def test_a_write_that_no_version_counter_shows_is_seen_in_the_first_step() -> None:
    weight, registry = torch.zeros(2), MagicMock(adapters=[])
    registry.tensor_shards.return_value = [MagicMock(tensors=lambda: {"weight": weight})]
    writes = EarlyWriteDetector(registry)
    for known in (False, True):
        registry.habits.known = known
        writes.begin()
        assert not writes.seen()
        weight.data += 1
        assert writes.seen() != known


def test_the_step_after_a_recovery_is_compared_once() -> None:
    check = DivergenceCheck(MagicMock(), MagicMock(), tensors=True, replacement=False)
    check.resumed(0, 0)
    assert not check.due
    check.resumed(3, 1)
    assert check.due
    check.committed()
    assert not check.due


@pytest.mark.parametrize("differs", ["", "setting seed"])
def test_replicas_are_looked_at_closer_where_their_summaries_differ(
    differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []

    def gather_objects(mine: Any) -> list[Any]:
        gathered.append(mine)
        theirs = (mine[0], dict(mine[1])) if isinstance(mine, tuple) else dict(mine)
        digests = theirs[1] if isinstance(theirs, tuple) else theirs
        if differs:
            digests[differs if differs in digests else next(iter(digests))] = "another"
        return [mine, theirs]

    monkeypatch.setattr(divergence_check, "gather_objects", gather_objects)
    registry = MagicMock()
    registry.tensor_shards.return_value, registry.settings.return_value = [], {"seed": b"1", "rate": b"2"}
    found = divergence_check.compare_replicas(registry, 1, Past())
    assert found == Unequal(settings=("seed",) if differs else ())
    assert len(gathered) == (2 if differs else 1)

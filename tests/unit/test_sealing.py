"""What is written of a rank's own state, and when: whatever moments a script changes it at, the last rank-local state
is right, and an early one is right unless the step is said to have been late."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.state.version import VERSIONS_KEPT
from flashrecovery.worker.local_state.step_profile import IN_ALL_STEPS, TOUCHED, UNTIL_RESEALED, StepProfile
from flashrecovery.worker.step.sealing import Sealing

MOMENTS = ("forward", "second forward", "backward", "optimizer", "below")


@dataclass
class Rank:
    """Own state is a number."""

    state: int = 0
    written: dict[int, tuple[int, bool]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=lambda: count(1))

    def drawn(self) -> int:
        return self.state

    def write(self, version: int, drawn: int, *, early: bool) -> None:
        assert drawn == self.state, "it is captured as it is now"
        self.written[version] = drawn, early

    def finish(self, version: int) -> None:
        self.written[version] = self.written[version][0], False

    def change(self) -> None:
        self.state = next(self.numbers)


@given(st.lists(st.tuples(st.sets(st.sampled_from(MOMENTS)), st.booleans()), min_size=1, max_size=12))
def test_the_last_local_state_is_right_and_an_early_one_unless_it_is_late(steps: list[tuple[set[str], bool]]) -> None:
    """Of each step: the moments at which it changes something, and whether the ranks compare their habits in it."""
    rank, habits = Rank(), StepProfile()
    sealing = Sealing(habits, rank)
    sealing.start()
    for version, (changes, compared) in enumerate(steps, 1):
        sealing.step_begins()
        if "forward" in changes:
            rank.change()
        sealing.forward_ends(version)
        if "second forward" in changes:
            rank.change()
        sealing.forward_ends(version, recheck=True)
        if "backward" in changes:
            rank.change()
        sealed = sealing.mutation_begins(version)
        if sealed:
            assert rank.written[version] == (rank.state, True)
        if compared:
            habits.reseal = habits.changed
        early = rank.written.get(version)
        if "optimizer" in changes:
            rank.change()
        if "below" in changes:
            rank.change()
        shown = sealing.shown(version)
        assert shown.late == (not changes.isdisjoint({"optimizer", "below"}))
        assert shown.changed == ("backward" in changes)
        if sealed and early is not None and early[0] != rank.state:
            assert sealing.late[version], "a wrong early rank-local state would be taken for the version"
        sealing.complete(version, shown)
        assert rank.written[version] == (rank.state, False)
        habits.learn(version - 1, quiet=True, late=shown.late, changed=shown.changed)
    assert len(sealing.late) <= VERSIONS_KEPT


def test_what_belongs_to_it_from_now_on_is_sealed_once_more() -> None:
    rank, habits = Rank(), StepProfile(known=True)
    sealing = Sealing(habits, rank)
    sealing.step_begins()
    sealing.forward_ends(1)
    sealed = sealing.mutation_begins(1)
    rank.change()  # as far as the marks tell: more is looked at
    sealing.more_belongs(1, sealed=sealed)
    assert rank.written[1] == (rank.state, True)
    shown = sealing.shown(1)
    assert not shown.late and not shown.changed and not sealing.late[1]


def test_peers_hear_what_one_has_learned_once() -> None:
    here, there = StepProfile(), StepProfile()
    for step in (3, 4):
        for reason in here.learn(step, quiet=False, late=True, changed=True):
            assert step == 3, "told already"
            there.hear(reason)
    there.hear(TOUCHED)
    assert (there.undo, there.changed, there.late, there.touched) == (True, True, True, True)
    assert StepProfile().learn(0, quiet=True, late=False, changed=False) == []
    assert {IN_ALL_STEPS, UNTIL_RESEALED, TOUCHED}.isdisjoint(range(10)), "a step's number means something else"

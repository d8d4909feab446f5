"""What happens once all ranks are stopped: both pure functions that decide it, case by case."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from flashrecovery.controller.next_move import (
    BeginAgainOrFail,
    Move,
    Relayout,
    Restore,
    Settle,
    StoppedFacts,
    TakeBack,
    next_move,
)
from flashrecovery.controller.relayout.next_step import NextLayout, RelayoutFacts, relayout_step
from flashrecovery.controller.state.relayout_outcome import (
    CannotChange,
    KeepLayout,
    RelayoutStep,
    StartLayout,
    WriteState,
)
from flashrecovery.controller.state.restore_plan import Decision, NothingLeft, RestoreRound
from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb

MEMORY = Decision(RestoreRound.from_checkpoint(7, {}, "all have it"))
DISK = Decision(RestoreRound.from_checkpoint(5, {}, "no rank has it"), "/checkpoints/5")
NOTHING = NothingLeft("no rank has it; and there is no checkpoint")
KEEP = KeepLayout()
START = StartLayout(SavedState(5, pb.StagingPlace(), "/checkpoints/5"))
WRITE = WriteState(7)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (StoppedFacts(MEMORY, KEEP), Restore(MEMORY)),
        (StoppedFacts(MEMORY, KEEP, given_up_there=True), Restore(MEMORY)),  # nothing is missing
        (StoppedFacts(MEMORY, WRITE), Relayout(WRITE)),
        (StoppedFacts(MEMORY, WRITE, settled=False), Relayout(WRITE)),
        (StoppedFacts(MEMORY, KEEP, settled=False), Settle()),
        (StoppedFacts(DISK, KEEP), Restore(DISK)),
        (StoppedFacts(DISK, START), Relayout(START)),
        (StoppedFacts(DISK, START, given_up_there=True), TakeBack()),  # rather than lose steps
        (StoppedFacts(NOTHING, KEEP), BeginAgainOrFail(NOTHING.reason)),
        (StoppedFacts(NOTHING, START), Relayout(START)),
        (StoppedFacts(NOTHING, START, settled=False), Settle()),  # a rank that is to leave may have it
        (StoppedFacts(NOTHING, KEEP, given_up_there=True), TakeBack()),
        (StoppedFacts(NOTHING, CannotChange("why")), Relayout(CannotChange("why"))),
    ],
)
def test_what_happens_next(facts: StoppedFacts, wanted: Move) -> None:
    assert next_move(facts) == wanted


def test_it_is_decided_in_every_case_and_settled_members_are_not_settled_again() -> None:
    cases = itertools.product((MEMORY, DISK, NOTHING), (KEEP, START, WRITE, CannotChange("why")), (False, True))
    for found, step, there in cases:
        assert not isinstance(next_move(StoppedFacts(found, step, there)), Settle)


WANTED = NextLayout(Strategy(dp=4), ("commanded",), step=6)
LOST = replace(WANTED, step=-1, lost=True)
KEPT = SavedState(3, pb.StagingPlace(directory="3-1-3"))
WRITTEN = replace(KEPT, written=100)
ON_OTHERS = SavedState(3, pb.StagingPlace(directory="3-1-3", sources=[pb.StagingSource(rank=1)]))


def facts(found: Decision | NothingLeft, wanted: NextLayout | None, **known: Any) -> RelayoutFacts:
    return RelayoutFacts(found, wanted, **{"rooms": 4, **known})


@pytest.mark.parametrize(
    ("known", "step"),
    [
        (facts(MEMORY, None), KEEP),
        (facts(DISK, None), KEEP),
        (facts(NOTHING, None), KEEP),
        (facts(MEMORY, WANTED), WRITE),
        (facts(MEMORY, replace(WANTED, step=8)), KEEP),  # it is too early
        (facts(MEMORY, WANTED, rooms=3), KeepLayout("a node has gone, and there is room for 3 ranks")),
        (facts(MEMORY, LOST, rooms=3), WRITE),  # another layout is chosen for the room that there is
        (facts(DISK, LOST), START),
        (facts(DISK, WANTED), KEEP),  # version 5 comes before step 6
        (facts(NOTHING, WANTED), KEEP),
        (facts(NOTHING, WANTED, elastic=True), KeepLayout(NOTHING.reason)),
        (facts(NOTHING, LOST, elastic=True), CannotChange(NOTHING.reason)),
        (facts(MEMORY, replace(WANTED, step=7)), WRITE),  # at its step
        (facts(DISK, LOST, unknown="who knows", checkpoint=(4, "/checkpoints/4")), START),  # which has all of it
        (facts(MEMORY, LOST, unknown="who knows"), CannotChange("who knows; and there is no checkpoint")),
        (facts(MEMORY, LOST, unknown="who knows", checkpoint=(5, "/checkpoints/5")), START),
        (facts(MEMORY, None, kept=KEPT, readable=KEPT), KEEP),
        (facts(NOTHING, None, kept=KEPT, readable=KEPT), StartLayout(KEPT, once_more=True)),
        (facts(NOTHING, None, kept=KEPT, lost_with="gone"), CannotChange("gone; and there is no checkpoint")),
        (facts(DISK, None, kept=KEPT), replace(START, once_more=True)),
        (facts(DISK, None, kept=KEPT, readable=KEPT), StartLayout(KEPT, once_more=True)),
        (facts(DISK, None, kept=KEPT, readable=KEPT, retries=1), replace(START, once_more=True)),
        (facts(DISK, None, kept=ON_OTHERS, readable=ON_OTHERS, retries=1), StartLayout(ON_OTHERS, once_more=True)),
        (facts(DISK, None, kept=ON_OTHERS, readable=ON_OTHERS, retries=2), replace(START, once_more=True)),
        (facts(DISK, None, kept=START.kept, readable=START.kept), replace(START, once_more=True)),
        (facts(NOTHING, None, kept=WRITTEN, readable=WRITTEN), StartLayout(KEPT, once_more=True)),  # not again
        (facts(NOTHING, None, kept=START.kept, readable=START.kept), CannotChange(NOTHING.reason)),
    ],
)
def test_what_becomes_of_a_change_of_the_layout(known: RelayoutFacts, step: RelayoutStep) -> None:
    assert relayout_step(known) == step


def test_an_elastic_jobs_checkpoint_is_none_for_another_layout() -> None:
    step = relayout_step(facts(DISK, LOST, elastic=True))
    assert isinstance(step, CannotChange) and "as /checkpoints/5, another layout reads none" in step.why

"""All ranks are stopped: what happens next, as a pure function of what is known then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flashrecovery.controller.state.relayout_outcome import (
    CannotChange,
    KeepLayout,
    RelayoutStep,
    StartLayout,
    WriteState,
)
from flashrecovery.controller.state.restore_plan import Decision, NothingLeft


@dataclass(frozen=True)
class StoppedFacts:
    """What is known when all ranks are stopped.

    Attributes:
        found: what they could go on from.
        relayout: what becomes of a change of the parallel layout.
        given_up_there: released processes still run, and can be taken back.
        settled: those of whose replica others have left have left, too. Before that nothing is lost for good.
    """

    found: Decision | NothingLeft
    relayout: RelayoutStep
    given_up_there: bool = False
    settled: bool = True


@dataclass(frozen=True)
class Restore:
    """All go to one version, and on from there."""

    decision: Decision


@dataclass(frozen=True)
class Relayout:
    """All start in another parallel layout, or their state is written for that, or neither can be done."""

    step: StartLayout | WriteState | CannotChange


@dataclass(frozen=True)
class TakeBack:
    """Released processes belong to the job again, and the recovery starts over with them."""


@dataclass(frozen=True)
class Settle:
    """Those of whose replica others have left leave, too; then it is decided again."""


@dataclass(frozen=True)
class BeginAgainOrFail:
    """There is nothing to go on from."""

    reason: str


Move: TypeAlias = Restore | Relayout | TakeBack | Settle | BeginAgainOrFail


def next_move(facts: StoppedFacts) -> Move:
    """What happens next."""
    found = facts.found
    if facts.given_up_there and (isinstance(found, NothingLeft) or found.checkpoint):
        return TakeBack()
    if not facts.settled and (isinstance(found, NothingLeft) or isinstance(facts.relayout, KeepLayout)):
        return Settle()
    if not isinstance(facts.relayout, KeepLayout):
        return Relayout(facts.relayout)
    return BeginAgainOrFail(found.reason) if isinstance(found, NothingLeft) else Restore(found)

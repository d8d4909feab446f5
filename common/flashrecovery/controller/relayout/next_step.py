"""All that live are stopped, and it is known what they could go on from: what becomes of a change of the parallel
layout now. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashrecovery.controller.state.relayout_outcome import (
    CannotChange,
    KeepLayout,
    RelayoutStep,
    StartLayout,
    WriteState,
)
from flashrecovery.controller.state.restore_plan import Decision, NothingLeft
from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class NextLayout:
    """What the job is to change to. ``step``: from this one on; -1: the next one. ``lost``: it has to, because ranks
    cannot be replaced."""

    strategy: Strategy
    why: tuple[str, ...]
    step: int = -1
    lost: bool = False


@dataclass(frozen=True)
class RelayoutFacts:
    """On which it depends.

    Attributes:
        found: what the job could go on from in the layout that it has.
        wanted: the layout that it is to change to; None: it is not to.
        kept: what is in the staging area since the last change, because not all ranks have taken a step since;
            ``readable``: the same, if all of it can still be read.
        lost_with: why it cannot be read.
        retries: how often a failed restore was tried again in this recovery.
        unknown: why it is not known that the ranks that are left have the whole state; "": they have.
        checkpoint: the newest one that any layout can read, as version and directory.
        rooms: ranks for which there is room.
        elastic: the number of replicas may change, too; of such a job's checkpoints another layout reads none.
    """

    found: Decision | NothingLeft
    wanted: NextLayout | None
    kept: SavedState | None = None
    readable: SavedState | None = None
    lost_with: str = ""
    retries: int = 0
    unknown: str = ""
    checkpoint: tuple[int, str] | None = None
    rooms: int = 0
    elastic: bool = False


def relayout_step(facts: RelayoutFacts) -> RelayoutStep:
    """What becomes of the change."""
    found, wanted = facts.found, facts.wanted
    if facts.elastic and isinstance(found, Decision) and found.checkpoint:
        found = NothingLeft(
            f"the layout cannot change: {found.round.reason}; and of an elastic job's checkpoints, as "
            f"{found.checkpoint}, another layout reads none"
        )
    if facts.kept is not None and (isinstance(found, NothingLeft) or found.checkpoint):
        return _once_more(facts, found)  # no rank had read the state yet
    if isinstance(found, NothingLeft):
        if wanted is None or not facts.elastic:
            return KeepLayout()
        return CannotChange(found.reason) if wanted.lost else KeepLayout(given_up=found.reason)  # no whole replicas
    if wanted is None:
        return KeepLayout()
    version, checkpoint = found.round.version, found.checkpoint
    if facts.unknown and not checkpoint:
        if facts.checkpoint is None:
            return CannotChange(f"{facts.unknown}; and there is no checkpoint")
        version, checkpoint = facts.checkpoint
    if version < wanted.step:
        return KeepLayout()
    if not wanted.lost and wanted.strategy.ranks > facts.rooms:
        return KeepLayout(given_up=f"a node has gone, and there is room for {facts.rooms} ranks")
    return StartLayout(SavedState(version, pb.StagingPlace(), checkpoint)) if checkpoint else WriteState(version)


def _once_more(facts: RelayoutFacts, found: Decision | NothingLeft) -> RelayoutStep:
    """Start the layout again. State that could not be read, although no rank died of it, is not read again if there is
    another source. State on other nodes is read at most twice: a dead node breaks its connections at once, but is found
    to be lost only later."""
    kept = facts.readable
    tries = 2 if kept is not None and kept.place.sources else 1
    tried_enough = isinstance(found, Decision) and facts.retries >= tries
    if kept is not None and not kept.checkpoint and not tried_enough:
        return StartLayout(replace(kept, written=0), once_more=True)
    if isinstance(found, Decision):
        return StartLayout(SavedState(found.round.version, pb.StagingPlace(), found.checkpoint), once_more=True)
    return CannotChange(found.reason if kept is not None else f"{facts.lost_with}; and there is no checkpoint")

"""What to do about a node that is to leave, or that a health check has warned of, while it still works. Pure.

At best its ranks get processes on other nodes, which are started beside training and take over at a step boundary. If
there is no room, an elastic job continues without these ranks from a step boundary on. If that is not possible either,
the state can still be written to disk before the node ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flashrecovery.plan.elastic.replicas import ReplicaShape, singles
from flashrecovery.plan.elastic.resize import ReplicaRange, leaving
from flashrecovery.plan.membership.placement import Room, place
from flashrecovery.plan.words import ranks_text


class HandOffWay(str, Enum):
    """What is done."""

    LET_GO = "let go"
    """It holds no rank: it leaves at once."""
    MOVE = "move"
    """Its ranks get processes on other nodes."""
    SHRINK = "shrink"
    """Its ranks leave the job."""
    SAVE = "save"
    """A checkpoint is taken."""
    NOTHING = "nothing"
    """The job goes on, and will lose it."""


@dataclass(frozen=True)
class Parting:
    """A node that is to leave.

    Attributes:
        ranks: that it holds.
        members: all ranks of the job.
        rooms: of all nodes.
        cannot_move: why no process can take over a rank of this job while it trains; "": it can.
        sizes: None: the job is not elastic.
        shape: which ranks make up its replicas; None: each is one.
        saves: the job takes checkpoints.
    """

    node: str
    domain: str
    ranks: tuple[int, ...]
    members: Sequence[int]
    rooms: Sequence[Room]
    cannot_move: str = ""
    sizes: ReplicaRange | None = None
    shape: ReplicaShape | None = None
    saves: bool = False


@dataclass(frozen=True)
class HandOff:
    """The decision. ``places``: the node that gets each rank; ``reason``: as text."""

    way: HandOffWay
    places: Mapping[int, str]
    reason: str


def hand_off(parting: Parting) -> HandOff:
    """What to do about a node that is to leave. Deterministic."""
    if not parting.ranks:
        return HandOff(HandOffWay.LET_GO, {}, f"node {parting.node} holds no rank")
    who = ranks_text(list(parting.ranks))
    others = [room for room in parting.rooms if room.name != parting.node and not room.suspect]
    places = place(list(parting.ranks), others, parting.domain)
    if places is not None and not parting.cannot_move:
        where = ", ".join(sorted(set(places.values())))
        return HandOff(HandOffWay.MOVE, places, f"{who} of node {parting.node} move to {where}, at a step boundary")
    why_not = parting.cannot_move or f"no other node has room for {who}"
    shape = parting.shape or singles(parting.members)
    by_replica = shape.by_replica(parting.members)
    theirs = {shape.replica(rank) for rank in parting.ranks}
    ranks = {rank for replica in theirs for rank in by_replica[replica]}
    if parting.sizes is not None and set(leaving(parting.members, parting.ranks, parting.sizes, shape)) == ranks:
        size = len(by_replica) - len(theirs)
        text = f"{why_not}; the job is elastic and goes on with {size} replicas, from a step boundary on"
        return HandOff(HandOffWay.SHRINK, {}, text)
    if parting.saves:
        return HandOff(HandOffWay.SAVE, {}, f"{why_not}; a checkpoint is taken before node {parting.node} ends")
    text = f"{why_not}, the job is not elastic, or too small, and it takes no checkpoints"
    return HandOff(HandOffWay.NOTHING, {}, text)

"""What one event takes along: a process, the GPUs that read each other's memory, a node, a rack. Pure.

An event ends every process in its reach, and what lies on their devices. Host memory that a node's snapshot process
holds outlives all but the loss of the node itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class LossEvent(Enum):
    """The failures that may happen at one moment, smallest first. The value is a text that says what is lost."""

    RANK = "a rank"
    GPUS = "the GPUs that share NVLink"
    NODE = "a node"
    RACK = "what shares a failure domain"

    @property
    def takes_nodes(self) -> bool:
        """Whether host memory goes with it."""
        return self in (LossEvent.NODE, LossEvent.RACK)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is.

    Attributes:
        gpus: number of its domain among the GPUs of its node; -1: its GPU reads no other one's memory.
        rack: failure domain above the node; "": the node shares nothing that is known of.
    """

    rank: int
    node: int
    gpus: int = -1
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Which ranks have a shard.

    Attributes:
        live: ranks that have it live, one at least.
        copies: ranks in whose host memory there is a copy.
        outlives: the copies are there although these ranks' processes are not.
        group: ranks that keep its parity together, its owner among them. losses: how many of them may be lost.
    """

    live: tuple[int, ...]
    copies: tuple[int, ...] = ()
    outlives: bool = False
    group: tuple[int, ...] = ()
    losses: int = 0


def labelled_gpus(size: int | None, per_node: int) -> tuple[int, ...]:
    """By local rank, as in :class:`RankLocation`, where ``size`` GPUs after each other are a domain (None: nothing is
    said of them)."""
    return () if size is None else tuple(local // size for local in range(per_node))


def locations(world: int, per_node: int, gpus: Sequence[int], shared: Sequence[int] = ()) -> tuple[RankLocation, ...]:
    """Of all ranks, at the launch. ``gpus``: by local rank, as in :class:`RankLocation`; empty: nothing is known.
    ``shared``: see :func:`~flashrecovery.plan.membership.placement.shared_domains`."""
    return tuple(
        RankLocation(
            rank,
            rank // per_node,
            gpus[rank % per_node] if gpus else -1,
            str(shared[rank // per_node]) if shared else "",
        )
        for rank in range(world)
    )


def may_be_lost_together(one: RankLocation, other: RankLocation, event: LossEvent) -> bool:
    """Whether one ``event`` may take both ranks."""
    if one.rank == other.rank:
        return True
    if event is LossEvent.RANK:
        return False
    if event is LossEvent.RACK and one.rack:
        return one.rack == other.rack
    if event is LossEvent.GPUS and (one.gpus < 0 or one.gpus != other.gpus):
        return False
    return one.node == other.node


def survives(kept: Kept, places: Sequence[RankLocation], event: LossEvent) -> bool:
    """Whether something is left of a shard after any ``event``. ``places``: of all ranks, by rank."""
    first = places[kept.live[0]]

    def gone(rank: int) -> bool:
        return may_be_lost_together(first, places[rank], event)

    if not all(map(gone, kept.live)):
        return True
    if kept.group and sum(map(gone, kept.group)) <= kept.losses:
        return True
    return any((kept.outlives and not event.takes_nodes) or not gone(rank) for rank in kept.copies)


def survival_text(lost: dict[LossEvent, int]) -> str:
    """What a job survives, and what not, and why. ``lost``: for each event that there may be, a rank of whose state
    nothing would be left, -1: none."""
    good = [event.value for event, rank in lost.items() if rank < 0]
    bad = [
        f"{event.value}: all that has the state of rank {rank}, copies included, may go with it"
        for event, rank in lost.items()
        if rank >= 0
    ]
    text = f"survives the loss of {', or of '.join(good) or 'nothing'}"
    return f"{text}; not of {'; nor of '.join(bad)} (a checkpoint does)" if bad else text

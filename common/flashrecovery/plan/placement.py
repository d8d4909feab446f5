"""Which node takes which ranks, and how far apart a rank and its copies are. Pure.

A lost node's ranks go to one node *as a whole* if any can take them: a spare one first, then one with free slots, so
that the job keeps its shape (tensor parallelism stays within a node). Only if no single node can are they spread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """A living node with room for more ranks.

    Attributes:
        domain: failure domain, such as a switch or a rack.
        free: ranks that it can still take.
        spare: it holds no rank yet, and was brought for this.
        suspect: a device plugin has warned of it.
    """

    name: str
    domain: str
    free: int
    spare: bool = False
    suspect: bool = False


def place(ranks: Sequence[int], rooms: Sequence[Room], lost_domain: str = "") -> dict[int, str] | None:
    """Node name for each of ``ranks``, which have lost their node together; None if there is not enough room.

    Between equals, healthy nodes come first, then those outside of ``lost_domain`` (its switch may be what has
    failed), then the one that fits best.
    """

    def preference(room: Room) -> tuple[bool, bool, bool, int, str]:
        return room.suspect, not room.spare, room.domain == lost_domain, room.free, room.name

    ordered = sorted((r for r in rooms if r.free > 0), key=preference)
    for room in ordered:
        if room.free >= len(ranks):
            return dict.fromkeys(ranks, room.name)
    if sum(r.free for r in ordered) < len(ranks):
        return None
    places: dict[int, str] = {}
    left = list(ranks)
    for room in sorted(ordered, key=lambda r: (r.suspect, -r.free, r.name)):
        taken, left = left[: room.free], left[room.free :]
        places.update(dict.fromkeys(taken, room.name))
    return places


def shared_domains(domains: Sequence[str]) -> tuple[int, ...]:
    """A number for the failure domain of each node, counted as they come; empty if no two nodes share one."""
    numbers = {domain: number for number, domain in enumerate(dict.fromkeys(domains))}
    return tuple(numbers[domain] for domain in domains) if len(numbers) < len(domains) else ()


def copied_by(
    name: str, holders: Sequence[int], domains: Sequence[str], losses: int, keeper: Callable[[int], int] | None = None
) -> int | None:
    """The rank that has a shard copied, or added to its parity, because its holders may all be lost at once: they are
    on no more than ``losses`` failure domains. None if there are more. All ranks come to the same one.

    Args:
        name: of the shard; it spreads shards with the same holders over them.
        domains: failure domain of each rank; where there are no more than ``losses`` in all, no copy would help, and
            one is made only of what a single rank holds.
        keeper: rank -> the rank that would keep its copy. If it can be, that is one on another domain.
    """
    if len(holders) > 1 and (_differ(losses, map(domains.__getitem__, holders)) or not _differ(losses, domains)):
        return None
    lost = {domains[h] for h in holders}
    safe = [h for h in holders if keeper is None or domains[keeper(h)] not in lost] or list(holders)
    return safe[zlib.crc32(name.encode()) % len(safe)]


def _differ(losses: int, domains: Iterable[str]) -> bool:
    """Whether there are more than ``losses`` different ones. Asked for each shard, and thousands of shards may have
    thousands of holders: no more are looked at than it takes."""
    seen: set[str] = set()
    for domain in domains:
        seen.add(domain)
        if len(seen) > losses:
            return True
    return False


_SETUP_LOGS = 2
"""Other ranks' agents that keep a rank's set-up log: so that two nodes may be lost at once."""


def setup_log_keepers(rank: int, stride: int, world: int) -> tuple[int, ...]:
    """The ranks whose agents keep the set-up log of ``rank`` for when its own node is lost: the one that keeps its
    copies, and the next one in the same ring."""
    ring = dict.fromkeys((rank + step * stride) % world for step in range(1, _SETUP_LOGS + 1))
    return tuple(keeper for keeper in ring if keeper != rank)


def keeper_of_copies(place: int, size: int, stride: int) -> int:
    """The place of the rank that keeps the copies of the one at ``place``, of ``size`` ranks: ``stride`` away, as in a
    job of the launch's size, or next to it where that would be itself."""
    return (place + (stride % size or 1)) % size


def ring_of(size: int, stride: int) -> list[int]:
    """By the place of each of ``size`` (2 or more) ranks, the place of the one that keeps its copies."""
    return [keeper_of_copies(place, size, stride) for place in range(size)]


def neighbour_stride(domains: Sequence[str], ranks_per_node: int) -> int:
    """Rank r's copies go to rank ``r + stride`` (modulo the world size), on another node and as far as possible in
    another failure domain. ``domains``: of each node, in node order. One node: the next rank.
    """
    nodes = len(domains)
    if nodes == 1:
        return 1

    def together(step: int) -> int:
        return sum(domains[i] == domains[(i + step) % nodes] for i in range(nodes))

    return min(range(1, nodes), key=lambda step: (together(step), step)) * ranks_per_node

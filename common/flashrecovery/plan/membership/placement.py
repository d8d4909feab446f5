"""Which node takes which ranks, and how far apart a rank and its copies are. Pure.

A lost node's ranks go to one node *as a whole* if any can take them: a spare one first, then one with free slots, so
that the job keeps its shape (tensor parallelism stays within a node). Only if no single node can are they spread.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from flashrecovery.plan.membership.failure_domains import LossEvent, RankLocation, locations, may_be_lost_together


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


def apart(places: Mapping[int, str], homes: Mapping[int, str], keepers: Mapping[int, int]) -> dict[int, str]:
    """The same places for ranks that no single node could take, exchanged among them so that fewer are on the node of
    the rank that keeps their copies. ``homes``: of all ranks that have a place already; ``keepers``: which rank that
    is, of each rank."""
    found, at = dict(places), {**homes, **places}
    concerned = [(rank, keeper) for rank, keeper in keepers.items() if rank in found or keeper in found]

    def together() -> int:
        return sum(at[rank] == at[keeper] for rank, keeper in concerned if rank in at and keeper in at)

    least = together()
    for one, other in combinations(sorted(found), 2):
        if least > 0 and found[one] != found[other]:
            at[one], at[other] = found[other], found[one]
            now = together()
            if now < least:
                least, found[one], found[other] = now, at[one], at[other]
            else:
                at[one], at[other] = found[one], found[other]
    return found


def place_joining(
    ranks: Sequence[int], rooms: Sequence[Room], homes: Mapping[int, str], per_node: int
) -> dict[int, str]:
    """The same for ranks that come into a running job, which had ``per_node`` ranks on each node at its launch: where
    others of their node of the launch are (``homes``: of all ranks that there are), and else together; if possible not
    where ranks of another node of the launch are. So which rank keeps whose copies (:func:`ring_of`) stays right. Empty
    if there is not enough room."""
    on: dict[str, set[int]] = {}  # of which nodes of the launch there are ranks
    mates: dict[int, Counter[str]] = {}  # where ranks of each node of the launch are
    for rank, home in homes.items():
        on.setdefault(home, set()).add(rank // per_node)
        mates.setdefault(rank // per_node, Counter())[home] += 1
    free = {room.name: room.free for room in rooms}
    coming: dict[int, list[int]] = {}
    for rank in ranks:
        coming.setdefault(rank // per_node, []).append(rank)

    def with_mates(node: int) -> list[Room]:
        homes_of_mates = [name for name, _ in mates.get(node, Counter()).most_common()]
        return sorted((r for r in sound if r.name in homes_of_mates), key=lambda r: homes_of_mates.index(r.name))

    sound = [room for room in rooms if not room.suspect]
    places: dict[int, str] = {}

    def give(node: int, chosen: Sequence[Room], *, whole: bool = False) -> None:
        """Those of a node for which there is room there, in this order."""
        for room in chosen:
            left = coming[node] if not whole or free[room.name] >= len(coming[node]) else []
            some = left[: max(free[room.name], 0)]
            places.update(dict.fromkeys(some, room.name))
            if some:
                on.setdefault(room.name, set()).add(node)
            free[room.name] -= len(some)
            coming[node] = coming[node][len(some) :]

    for node in coming:
        give(node, [room for room in with_mates(node) if on[room.name] == {node}])
    for node in sorted(coming, key=lambda node: -len(coming[node])):
        empty = [room for room in sound if room.name not in on]
        give(node, sorted(empty, key=lambda room: (not room.spare, room.free, room.name)), whole=True)
        give(node, with_mates(node))
        if coming[node]:
            found = place(coming[node], [replace(room, free=free[room.name]) for room in rooms])
            if found is None:
                return {}
            for name, count in Counter(found.values()).items():
                free[name] -= count
                on.setdefault(name, set()).add(node)
            places.update(found)
    return dict(sorted(places.items()))


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


_SHIFTS = 9
"""Number of distances that are tried after ranks have left."""
_SETUP_LOGS = 2
"""Other ranks' agents that keep a rank's set-up log: so that two nodes may be lost at once."""


def setup_log_keepers(rank: int, stride: int, world: int) -> tuple[int, ...]:
    """The ranks whose agents keep the set-up log of ``rank`` for when its own node is lost: the one that keeps its
    copies, and the next one in the same ring."""
    ring = dict.fromkeys((rank + step * stride) % world for step in range(1, _SETUP_LOGS + 1))
    return tuple(keeper for keeper in ring if keeper != rank)


def setup_log_keepers_among(rank: int, stride: int, world: int, nodes: Mapping[int, str]) -> tuple[int, ...]:
    """The same where some of the launch's ``world`` ranks have left: the next ones in the ring that there are, each on
    a separate node. ``nodes``: of the ranks that there are, this one among them."""
    found: list[int] = []
    taken = {nodes[rank]}
    rings = math.gcd(stride, world)
    for ring in range(rings):
        for step in range(world // rings):
            keeper = (rank + ring + step * stride) % world
            if nodes.get(keeper, nodes[rank]) not in taken:
                taken.add(nodes[keeper])
                found.append(keeper)
                if len(found) == _SETUP_LOGS:
                    return tuple(found)
    return tuple(found)


def ring_of(
    members: Sequence[int], stride: int, per_node: int, shared: Sequence[int] = (), gpus: Sequence[int] = ()
) -> list[int]:
    """By the place of each of the ``members`` (2 or more ranks of the launch, ascending), the place of the one that
    keeps its copies: ``stride`` away, as in a job of the launch's size, unless more of them could have another one on
    another node, in another failure domain, or on GPUs that are not lost with theirs.

    Nodes are those of the launch, which had ``per_node`` ranks each, so that all come to the same ring by themselves;
    ``shared``: a number for the failure domain of each (:func:`shared_domains`); ``gpus``: see :func:`.locations`.
    """
    size = len(members)
    nodes = [rank // per_node for rank in members]
    # A node beyond those of the launch has ranks that no launch has had; it shares nothing that is known of.
    domains = [shared[node] if node < len(shared) else len(shared) + node for node in nodes] if shared else nodes
    most = max(Counter(nodes).values())  # from this shift on, no rank gets its own node if all have as many ranks
    within = range(1, per_node) if gpus else ()
    shifts = dict.fromkeys(shift % size or 1 for shift in (stride, *range(most, _SHIFTS * most, most), *within))
    where = locations(max(members) + 1, per_node, gpus) if gpus else ()

    def together(shift: int) -> tuple[int, int, int]:
        to = [(place + shift) % size for place in range(size)]
        near = [(nodes[place] == nodes[at], domains[place] == domains[at]) for place, at in enumerate(to)]
        joined = sum(_joined(where[members[place]], where[members[at]]) for place, at in enumerate(to)) if gpus else 0
        return sum(node for node, _ in near), sum(domain for _, domain in near), joined

    shift = next(iter(shifts))
    if together(shift) > (0, 0, 0):
        shift = min(shifts, key=together)
    return [(place + shift) % size for place in range(size)]


def _joined(one: RankLocation, other: RankLocation) -> bool:
    """Whether the death of one rank's process may take the other along."""
    return may_be_lost_together(one, other, LossEvent.GPUS)


def neighbour_stride(domains: Sequence[str], ranks_per_node: int, gpus: Sequence[int] = ()) -> int:
    """Rank r's copies go to rank ``r + stride`` (modulo the world size), on another node and as far as possible in
    another failure domain. ``domains``: of each node, in node order. One node: the next rank whose GPU is not lost with
    that of r (``gpus``: see :func:`.locations`), for as many ranks as possible.
    """
    nodes = len(domains)
    if nodes == 1:
        where = locations(ranks_per_node, ranks_per_node, gpus)

        def joined(step: int) -> int:
            return sum(_joined(one, where[(one.rank + step) % ranks_per_node]) for one in where)

        return min(range(1, ranks_per_node), key=joined, default=1) if gpus else 1

    def together(step: int) -> int:
        return sum(domains[i] == domains[(i + step) % nodes] for i in range(nodes))

    best = fewest = 0
    for step in range(1, nodes):
        shared = together(step)
        if not best or shared < fewest:
            best, fewest = step, shared
        if not shared:  # mostly the first one: with thousands of nodes, looking at all of them takes seconds
            break
    return best * ranks_per_node

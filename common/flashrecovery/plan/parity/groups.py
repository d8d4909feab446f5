"""Which ranks protect each other by parity: sharding groups (REFT, section 4.1), on different failure domains. Pure.

A group's members have unique shards of one kind (ZeRO's partitions, experts' partitions, FSDP's): their bytes are added
up, so nothing else needs to be equal. Any member, or any two with parity 2, can be lost together; two that a single
fault takes would be two at once, so no two members of a group share a failure domain.

How the ranks are dealt: with c ranks on the fullest domain there are at least c groups. Domain after domain, each rank
goes to one of the groups with the fewest members, at most one of a domain to each; so sizes differ by one at most.
With as many ranks on each node, group i has the i-th rank of every node. Where sizes in bytes are uneven, the largest
go together: parity is as long as the longest member.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashrecovery.plan.words import ranks_text, shortened

ALIGN = 64
"""A shard starts at a multiple of this many bytes in its member's flat bytes."""


@dataclass(frozen=True, slots=True)
class UniqueShard:
    """``rank`` holds ``name`` (``nbytes`` bytes), and no other rank does. ``kind``: only shards of one kind share a
    group."""

    rank: int
    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """A rank with its shards of a group's kind, as (name, bytes) by name; ``domain``: the node, or a label."""

    rank: int
    domain: str
    shards: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        """The number of its flat bytes: the shards one after another, each aligned."""
        return sum(-(-nbytes // ALIGN) * ALIGN for _, nbytes in self.shards)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each shard begins in the flat bytes."""
        found, offset = {}, 0
        for name, nbytes in self.shards:
            found[name] = offset
            offset += -(-nbytes // ALIGN) * ALIGN
        return found


@dataclass(frozen=True, slots=True)
class ShardingGroup:
    """Ranks that protect each other; ``members`` by rank, all on different domains. ``parity`` of them may be lost."""

    kind: str
    members: tuple[Member, ...]
    parity: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Ranks whose shards of ``kind`` no group protects, and why."""

    kind: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups by kind and rank. ``kept``: those that :func:`regroup` left as they were, parity and all."""

    groups: tuple[ShardingGroup, ...]
    uncovered: tuple[Uncovered, ...] = ()
    kept: frozenset[ShardingGroup] = frozenset()


def form_groups(shards: Iterable[UniqueShard], domains: Sequence[str], parity: int = 1, max_size: int = 8) -> Grouping:
    """Groups for all ranks that have unique shards. Deterministic; independent of the order of ``shards``.

    Args:
        domains: failure domain of each rank.
        parity: 1 or 2.
        max_size: members of a group at most, if the ranks can be divided so; larger groups need less memory for parity
            and send more in a decode, and two losses are likelier in them.

    Raises:
        ValueError: parity or size that is not allowed; a shard of a rank that has no domain.
    """
    return regroup((), shards, domains, parity, max_size)


def regroup(
    old: Iterable[ShardingGroup],
    shards: Iterable[UniqueShard],
    domains: Sequence[str],
    parity: int = 1,
    max_size: int = 8,
) -> Grouping:
    """Groups for the ranks as they are now. An old group stays if its members have the same shards and are still on
    different domains: also when one of them is another process on another node, whose part of the parity is then made
    again. What is left of the others forms new ones; if it cannot, as few old groups as possible are dissolved with it
    (in order, from the last one). Arguments and errors as of :func:`form_groups`.
    """
    if parity not in (1, 2):
        raise ValueError(f"parity = {parity}: 1 and 2 are allowed")
    if max_size <= parity:
        raise ValueError(f"max_size = {max_size}: more than parity ({parity}) is allowed")
    members = _members(shards, domains)
    groups: list[ShardingGroup] = []
    kept: list[ShardingGroup] = []
    uncovered: list[Uncovered] = []
    before = sorted(old, key=lambda g: (g.kind, g.ranks))
    for kind in sorted(members):
        here = members[kind]
        staying = [g for g in (_now(g, here) for g in before if g.kind == kind and g.parity == parity) if g]
        while True:
            covered = {rank for group in staying for rank in group.ranks}
            formed, reason = _deal(kind, [m for rank, m in here.items() if rank not in covered], parity, max_size)
            if not reason or not staying:
                break
            staying.pop()
        kept += staying
        groups += [*staying, *formed]
        if reason:
            uncovered.append(Uncovered(kind, tuple(here), reason))
    return Grouping(tuple(sorted(groups, key=lambda g: (g.kind, g.ranks))), tuple(uncovered), frozenset(kept))


_EVERYTHING = "what no other rank holds"
Groups = tuple[tuple[int, ...], ...]
"""The ranks of each group, ascending."""


def launch_domains(world: int, nodes: int, shared: Sequence[int] = (), gpus: Sequence[int] = ()) -> list[str]:
    """The failure domain of each rank when a job is launched on this many nodes: its node, or what the node shares with
    others (``shared``: a number for each node); on a single node, its process, or the GPUs that are lost with it
    (``gpus``: a number by rank), if there are others."""
    if nodes == 1 and len({*gpus}) > 1:
        return [f"GPUs {number}" for number in gpus]
    if nodes == 1:
        return [f"rank {rank}" for rank in range(world)]
    on = [rank // (world // nodes) for rank in range(world)]
    return [f"domain {shared[node]}" if shared else f"node {node}" for node in on]


def groups_of_all(
    domains: Sequence[str], losses: int, max_size: int, old: Iterable[Sequence[int]] = ()
) -> Groups | str:
    """Groups of all ranks, whatever each of them has; why there are none.

    Args:
        old: the ranks' groups as each of those that live has them. They stay where they can, see :func:`regroup`. Where
            two have a rank in common, the one that more ranks name is meant: a rank that has just come knows only of
            the launch.
    """
    shards = [UniqueShard(rank, _EVERYTHING, _EVERYTHING, 0) for rank in range(len(domains))]
    all_members = _members(shards, domains).get(_EVERYTHING, {})
    named = Counter(tuple(ranks) for ranks in old)
    known: list[tuple[int, ...]] = []
    for ranks in sorted(named, key=lambda ranks: (-named[ranks], ranks)):
        if not any({*ranks} & {*others} for others in known):
            known.append(ranks)
    before = [ShardingGroup(_EVERYTHING, tuple(all_members[rank] for rank in ranks), losses) for ranks in known]
    found = regroup(before, shards, domains, losses, max_size)
    if found.uncovered:
        return found.uncovered[0].reason
    return tuple(group.ranks for group in found.groups)


def _members(shards: Iterable[UniqueShard], domains: Sequence[str]) -> dict[str, dict[int, Member]]:
    """By kind and rank, ascending."""
    found: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for shard in shards:
        if not 0 <= shard.rank < len(domains):
            raise ValueError(f"shard {shard.name!r} of rank {shard.rank}: the job has {len(domains)} ranks")
        mine = found[shard.kind][shard.rank]
        if shard.name in mine or shard.nbytes < 0:
            raise ValueError(f"shard {shard.name!r} of rank {shard.rank}: one of each name, 0 bytes or more is allowed")
        mine[shard.name] = shard.nbytes
    return {
        kind: {rank: Member(rank, domains[rank], tuple(sorted(ranks[rank].items()))) for rank in sorted(ranks)}
        for kind, ranks in found.items()
    }


def _now(group: ShardingGroup, members: dict[int, Member]) -> ShardingGroup | None:
    """The group with its members' domains as they are now; None if it cannot stay."""
    now = tuple(members[rank] for rank in group.ranks if rank in members)
    same = [m.shards for m in now] == [m.shards for m in group.members]
    apart = len({m.domain for m in now}) == len(now)
    return ShardingGroup(group.kind, now, group.parity) if same and apart else None


def _deal(kind: str, members: Sequence[Member], parity: int, max_size: int) -> tuple[list[ShardingGroup], str]:
    """The groups, or why there are none."""
    by_domain: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        by_domain[member.domain].append(member)
    if not members:
        return [], ""
    fullest = max(by_domain, key=lambda d: (len(by_domain[d]), d))
    at_least, most = len(by_domain[fullest]), len(members) // (parity + 1)
    if at_least > most:
        return [], _reason(kind, members, by_domain, fullest, parity)
    count = max(at_least, min(-(-len(members) // max_size), most))
    dealt: list[list[Member]] = [[] for _ in range(count)]
    for domain in sorted(by_domain, key=lambda d: (-len(by_domain[d]), min(m.rank for m in by_domain[d]))):
        mine = sorted(by_domain[domain], key=lambda m: (-m.nbytes, m.rank))
        open_to = sorted(range(count), key=lambda g: (len(dealt[g]), g))[: len(mine)]
        open_to.sort(key=lambda g: (-max((m.nbytes for m in dealt[g]), default=0), g))
        for member, group in zip(mine, open_to, strict=True):
            dealt[group].append(member)
    return [ShardingGroup(kind, tuple(sorted(group, key=lambda m: m.rank)), parity) for group in dealt], ""


def _reason(kind: str, members: Sequence[Member], by_domain: dict[str, list[Member]], fullest: str, parity: int) -> str:
    needed, there = parity + 1, len(by_domain)
    if there < needed:
        names = shortened(sorted(by_domain), 4)
        return (
            f"parity {parity} of {kind!r} needs ranks on {needed} failure domains; "
            f"{ranks_text(m.rank for m in members)} are on {there} ({names})"
        )
    rest = len(members) - len(by_domain[fullest])
    return (
        f"parity {parity} of {kind!r} needs {parity} rank{'s' * (parity > 1)} on other failure domains for each of "
        f"the {len(by_domain[fullest])} on {fullest}; there are {rest}"
    )

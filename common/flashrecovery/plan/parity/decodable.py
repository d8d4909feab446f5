"""What parity can give back: from what the ranks say they hold to shards that exist, and orders to decode them. Pure.

A shard that is decoded counts as one that its rank has itself (:attr:`.Kind.PARITY`): after the decoding it lies in
that rank's memory, like an own copy. Which versions exist then follows as for every other shard
(:mod:`flashrecovery.plan.restore.consistent_cut`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from flashrecovery.plan.parity.code import ParityLayout, StripePart
from flashrecovery.plan.parity.decode import Held, lost_members, undecodable
from flashrecovery.plan.restore.types import Holding, Kind
from flashrecovery.plan.words import ranks_text


@dataclass(frozen=True)
class EncodingHeld:
    """The parity of one layout that a rank holds.

    Attributes:
        key: says all about the layout, the same for all members.
        sizes: bytes of each member's shards.
        p, q: versions of which it has the first parity of the stripe with its own number, and the second one of the
            stripe before, whole.
    """

    key: int
    sizes: tuple[int, ...]
    losses: int
    bucket: int
    p: frozenset[int]
    q: frozenset[int]


@dataclass(frozen=True)
class Told:
    """What a rank knows of ``owner`` at ``version``: its unique shards, as (name, bytes), and how they are laid out."""

    owner: int
    version: int
    shards: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ParityHeld:
    """All that a rank says of parity.

    Attributes:
        ranks: of its group, in order.
        losses, max_size: of groups, as the rank is configured.
        own: bytes of its own shards, by version of which it has them whole.
        doubted: versions of which something has turned out to be wrong.
    """

    rank: int
    ranks: tuple[int, ...]
    losses: int
    max_size: int
    own: Mapping[int, int]
    encodings: tuple[EncodingHeld, ...] = ()
    told: tuple[Told, ...] = ()
    doubted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DecodeOrder:
    """How the members of a group decode a version, the same words for all of them.

    Attributes:
        ranks: of the group, in order; ``lost``: numbers in it of the members that get their shards back.
        p, q: stripes whose first and second parity is whole at that version.
        tellers: for each lost member, the rank that knows how its shards are laid out.
    """

    ranks: tuple[int, ...]
    key: int
    sizes: tuple[int, ...]
    losses: int
    bucket: int
    version: int
    lost: tuple[int, ...]
    p: tuple[int, ...]
    q: tuple[int, ...]
    tellers: tuple[int, ...]

    @property
    def layout(self) -> ParityLayout:
        return ParityLayout(self.sizes, self.losses, self.bucket)

    @property
    def held(self) -> dict[int, Held]:
        """What each member has of this version."""
        layout, version = self.layout, frozenset({self.version})
        parity: dict[int, dict[tuple[int, StripePart], frozenset[int]]] = defaultdict(dict)
        for part, stripes in ((StripePart.P, self.p), (StripePart.Q, self.q)):
            for stripe in stripes:
                parity[layout.holder(stripe, part)][stripe, part] = version
        return {
            m: Held(frozenset() if m in self.lost else version, parity[m])
            for m in range(layout.members)
            if m not in self.lost or m in parity
        }


@dataclass(frozen=True)
class Decodable:
    """Shards that exist because they can be decoded."""

    order: DecodeOrder
    holdings: tuple[Holding, ...]


def decodable(held: Collection[ParityHeld]) -> list[Decodable]:
    """What can be decoded of every version, group by group."""
    return [one for ranks, members in _groups(held) for one in _of_group(ranks, members)]


def needed(found: Iterable[Decodable], version: int, lacking: Collection[tuple[int, str]]) -> tuple[DecodeOrder, ...]:
    """The orders with which (rank, shard) of ``lacking`` come to ``version``; of a group one is enough."""
    orders: dict[tuple[int, ...], DecodeOrder] = {}
    for one in found:
        if one.order.version == version and any((h.rank, h.shard) in lacking for h in one.holdings):
            orders.setdefault(one.order.ranks, one.order)
    return tuple(orders.values())


def why_not(held: Collection[ParityHeld]) -> str:
    """Why a group cannot decode what it has lost, as text, for the first such group and its newest version; "" if there
    is none."""
    for ranks, members in _groups(held):
        versions = [(max(_versions(by_rank), default=-1), key) for key, by_rank in _encodings(members).items()]
        newest, key = max(versions, default=(-1, 0))
        if newest < 0:
            continue
        layout, known = _members_at(ranks, members, _encodings(members)[key], newest)
        why = undecodable(layout, known, newest)
        if why is not None:
            return f"the parity group of {ranks_text(ranks)}: {why.reason}"
    return ""


def _groups(held: Iterable[ParityHeld]) -> list[tuple[tuple[int, ...], dict[int, ParityHeld]]]:
    """The ranks of each group, and its members that have said something, by rank."""
    groups: dict[tuple[int, ...], dict[int, ParityHeld]] = defaultdict(dict)
    for one in held:
        groups[one.ranks][one.rank] = one
    return sorted(groups.items(), key=lambda group: group[0])


def _encodings(members: Mapping[int, ParityHeld]) -> dict[int, dict[int, EncodingHeld]]:
    """By key and rank."""
    found: dict[int, dict[int, EncodingHeld]] = defaultdict(dict)
    for rank, member in members.items():
        for encoding in member.encodings:
            found[encoding.key][rank] = encoding
    return found


def _versions(encodings: Mapping[int, EncodingHeld]) -> frozenset[int]:
    """The versions of which there is any parity."""
    return frozenset[int]().union(*(e.p | e.q for e in encodings.values()))


def _members_at(
    ranks: tuple[int, ...], members: Mapping[int, ParityHeld], encodings: Mapping[int, EncodingHeld], version: int
) -> tuple[ParityLayout, dict[int, Held]]:
    """The layout of an encoding, and what the members have of it at this version."""
    first = next(iter(encodings.values()))
    layout = ParityLayout(first.sizes, first.losses, first.bucket)
    known = {m: _held(members, encodings, rank, m, layout, version) for m, rank in enumerate(ranks) if rank in members}
    return layout, known


def _of_group(ranks: tuple[int, ...], members: Mapping[int, ParityHeld]) -> Iterable[Decodable]:
    doubted = frozenset[int]().union(*(m.doubted for m in members.values()))
    for _, by_rank in sorted(_encodings(members).items()):
        versions = _versions(by_rank) - doubted
        for version in sorted(versions):
            one = _of_version(ranks, members, by_rank, version)
            if one is not None:
                yield one


def _of_version(
    ranks: tuple[int, ...], members: Mapping[int, ParityHeld], encodings: Mapping[int, EncodingHeld], version: int
) -> Decodable | None:
    first = next(iter(encodings.values()))
    layout, held = _members_at(ranks, members, encodings, version)
    lost = [m for m in lost_members(layout, held, version) if layout.sizes[m]]
    if not lost or undecodable(layout, held, version) is not None:
        return None
    told = [_teller(members, ranks[m], version) for m in lost]
    if any(t is None for t in told):
        return None
    known = [t for t in told if t is not None]
    order = DecodeOrder(
        ranks,
        first.key,
        first.sizes,
        first.losses,
        first.bucket,
        version,
        tuple(lost),
        _stripes(held, version, StripePart.P),
        _stripes(held, version, StripePart.Q),
        tuple(teller for teller, _ in known),
    )
    holdings = [
        Holding(ranks[m], name, version, Kind.PARITY, nbytes)
        for m, (_, told_of) in zip(lost, known, strict=True)
        for name, nbytes in told_of.shards
    ]
    return Decodable(order, tuple(holdings))


def _held(
    members: Mapping[int, ParityHeld],
    encodings: Mapping[int, EncodingHeld],
    rank: int,
    member: int,
    layout: ParityLayout,
    version: int,
) -> Held:
    own = members[rank].own.get(version) == layout.sizes[member]
    encoding = encodings.get(rank)
    parity = {}
    if encoding is not None:
        n = layout.members
        parity = {(member, StripePart.P): encoding.p, ((member - 1) % n, StripePart.Q): encoding.q}
    return Held(frozenset({version} if own else ()), parity)


def _stripes(held: Mapping[int, Held], version: int, part: StripePart) -> tuple[int, ...]:
    places = ((place, versions) for one in held.values() for place, versions in one.parity.items())
    return tuple(sorted(stripe for (stripe, p), versions in places if p is part and version in versions))


def _teller(members: Mapping[int, ParityHeld], owner: int, version: int) -> tuple[int, Told] | None:
    """The first rank that knows ``owner`` at this version."""
    for rank in sorted(members):
        for told in members[rank].told:
            if (told.owner, told.version) == (owner, version):
                return rank, told
    return None

"""Parity of a group's unique shards: which bytes are added, which member holds the sum, and what is sent.

Pure arithmetic on sizes; :mod:`flashrecovery.redundancy.parity.store`, ``parity_member`` and ``parity_bucket`` do the
same with bytes. How what was lost is decoded: :mod:`.decode`.

**Stripes** (RAID-5's rotation; REFT's RAIM5). A group of n members has n stripes. Stripe i's parity P lies at member i,
with parity 2 its second parity Q at member i + 1 (modulo n). The others, k = n - 1 or n - 2 of them, are its *columns*:
each gives one of the k *units* into which its own bytes are cut. So every member has k units in k stripes and holds the
parity of the rest: largest / (n - 1) bytes with parity 1, 2 x largest / (n - 2) with parity 2 (and 64 (n - 3) bytes a
bucket for Q's overhang), a version. No scheme needs less: what is left of a group must be as much as its members'
bytes.

**Uneven sizes.** A shorter unit ends in zeros that are not stored, sent or added. Parity is as long as the longest
unit.

**The code.** P is the XOR of the columns. Q is their XOR with column c moved c rows of 64 bytes further:

    P[r] = D0[r] ^ D1[r] ^ D2[r] ^ ...          Q[r] = D0[r] ^ D1[r-1] ^ D2[r-2] ^ ...

This is EVENODD without the wrap-around (a zigzag-decodable code: Gong and Sung, JCSS 89, 2017): of the diagonals each
is stored as it is, n - 3 rows more than a unit has. So there is no prime and no group size that has to be filled up,
and a changed byte changes exactly one byte of P and one of Q, where it changes three of RDP and up to a whole column of
EVENODD: what is updated in every step wants that. Two lost columns a < b: after the others have been taken away,
Q' has row 0 of a alone; P' then gives row 0 of b, that gives the row b - a of a, and so on.

**Buckets.** A unit is cut into buckets, and each bucket has its own code. So a change of one bucket is sent alone, is
checked alone, and is decoded in memory of the bucket's size.

**What travels** in a step. The shards are distinct, so parity cannot be computed in one place (REFT's replicas can):
each member must send its changes, ``delta = old ^ new``. With parity 1 it sends each unit's delta to that stripe's P:
its own bytes once, the same as neighbour copies, and it receives as much. A chain (reduce-scatter) sends the same bytes
and adds as many, but over n - 1 hops one after the other, and a bucket that one member has changed travels on through
all that come after. With parity 2 sending each delta to P and Q would be twice the bytes. Instead P's holder, which
sees all deltas of the stripe, adds them up as Q wants them and sends *one* unit on: (n - 1) / (n - 2) times the bytes
(:attr:`Route.RELAY`). No route has fewer: n members that all have to do with the stripe cannot be connected by fewer
than n - 1 units. The price is memory for sums on their way, at worst a unit (buckets wait only for their own deltas).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

ROW = 64
"""Bytes; by so much Q's columns are moved against each other. Also the alignment of units."""
BUCKET = 256 << 10
"""Small enough that parity, a delta and a sum stay in a core's second-level cache together (benchmarks/parity.py)."""
_BUCKETS = 128
"""The most buckets of a unit, if they need not be longer than :data:`_LARGEST` for that: each costs the interpreter
some tens of microseconds a step, in which training may have to wait for its lock."""
_LARGEST = 4 << 20
HEADER_BYTES = 64
"""Before each delta, and alone at the end of a member's deltas for one stripe."""
DIGEST_BYTES = 16


class StripePart(str, Enum):
    """What of a stripe a member has."""

    P = "P"
    Q = "Q"
    DATA = "data"


class Route(str, Enum):
    """How deltas get to the second parity."""

    DIRECT = "direct"
    RELAY = "relay"


def bucket_for(sizes: Sequence[int], parity: int) -> int:
    """Bytes of a bucket for a group with shards of these sizes, in bytes."""
    longest = max(sizes) / max(len(sizes) - parity, 1)
    bucket = BUCKET
    while bucket < _LARGEST and longest > _BUCKETS * bucket:
        bucket *= 2
    return bucket


@dataclass(frozen=True)
class ParityLayout:
    """Where everything of a group lies. Members are numbered from 0, in the order of the group.

    Attributes:
        sizes: bytes of each member's flat shards.
        parity: how many members may be lost, 1 or 2.
        bucket: bytes; a multiple of :data:`ROW`.
    """

    sizes: tuple[int, ...]
    parity: int = 1
    bucket: int = BUCKET

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.parity not in (1, 2):
            raise ValueError(f"parity = {self.parity}: 1 and 2 are allowed")
        if len(self.sizes) <= self.parity:
            raise ValueError(
                f"{len(self.sizes)} members: at least {self.parity + 1} are allowed with parity {self.parity}"
            )
        if min(self.sizes) < 0:
            raise ValueError(f"sizes of {self.sizes}: 0 bytes or more are allowed")
        if self.bucket <= 0 or self.bucket % ROW:
            raise ValueError(f"bucket = {self.bucket}: a multiple of {ROW} bytes is allowed")

    @property
    def members(self) -> int:
        return len(self.sizes)

    @property
    def columns(self) -> int:
        """Units of a stripe, and of a member."""
        return self.members - self.parity

    # -- where it is ------------------------------------------------------------------------------

    def holder(self, stripe: int, part: StripePart) -> int:
        """The member that holds P or Q of a stripe."""
        return (stripe + (part is StripePart.Q)) % self.members

    def parts(self) -> tuple[StripePart, ...]:
        """The parities of a stripe."""
        return (StripePart.P, StripePart.Q)[: self.parity]

    def part(self, stripe: int, member: int) -> StripePart:
        """What of the stripe a member has."""
        return next((part for part in self.parts() if self.holder(stripe, part) == member), StripePart.DATA)

    def column(self, stripe: int, member: int) -> int:
        """Its number among the stripe's data; for members that hold no parity of it."""
        return (member - stripe - self.parity) % self.members

    def member(self, stripe: int, column: int) -> int:
        """The member that has a column of the stripe."""
        return (stripe + self.parity + column) % self.members

    def data_stripes(self, member: int) -> list[int]:
        """The stripes in which it has a unit, by the order of its units."""
        return [(member + 1 + unit) % self.members for unit in range(self.columns)]

    # -- how long it is ---------------------------------------------------------------------------

    def unit(self, stripe: int, member: int) -> tuple[int, int]:
        """(offset, length) in the member's bytes; the length may be 0."""
        return self._units[member][(stripe - member - 1) % self.members]

    @cached_property
    def _units(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(_cut(size, self.columns) for size in self.sizes)

    def buckets(self, stripe: int) -> int:
        """How many buckets the stripe's longest unit has."""
        longest = max(self.unit(stripe, self.member(stripe, c))[1] for c in range(self.columns))
        return -(-longest // self.bucket)

    def data_bucket(self, stripe: int, bucket: int, member: int) -> tuple[int, int]:
        """(offset, length) in the member's bytes; length 0 past its end."""
        offset, length = self.unit(stripe, member)
        start = min(bucket * self.bucket, length)
        return offset + start, min(self.bucket, length - start)

    def data_length(self, stripe: int, bucket: int, column: int) -> int:
        return self.data_bucket(stripe, bucket, self.member(stripe, column))[1]

    def shift(self, part: StripePart, column: int) -> int:
        """Bytes by which a column is moved in this parity."""
        return column * ROW if part is StripePart.Q else 0

    def parity_length(self, stripe: int, part: StripePart, bucket: int) -> int:
        """The bytes of a bucket of parity."""
        lengths = [self.data_length(stripe, bucket, column) for column in range(self.columns)]
        return max(self.shift(part, column) + length if length else 0 for column, length in enumerate(lengths))

    def parity_offsets(self, stripe: int, part: StripePart) -> list[int]:
        """Where each bucket begins if they lie one after another, each on a row, and where the last one ends."""
        offsets = [0]
        for bucket in range(self.buckets(stripe)):
            offsets.append(-(-(offsets[-1] + self.parity_length(stripe, part, bucket)) // ROW) * ROW)
        return offsets

    def parity_bytes(self, stripe: int, part: StripePart) -> int:
        """The bytes of parity of one version."""
        return self.parity_offsets(stripe, part)[-1]

    def memory(self, member: int) -> int:
        """Bytes of parity that a member holds of one version."""
        return sum(
            self.parity_bytes(stripe, part)
            for stripe in range(self.members)
            for part in self.parts()
            if self.holder(stripe, part) == member
        )


def _cut(size: int, units: int) -> tuple[tuple[int, int], ...]:
    """Units of whole rows whose lengths differ by a row at most; the last ones may be empty."""
    rows, longer = divmod(-(-size // ROW), units)
    found, offset = [], 0
    for unit in range(units):
        end = min(offset + (rows + (unit < longer)) * ROW, size)
        found.append((offset, end - offset))
        offset = end
    return tuple(found)


# -- a step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes by member, in both. ``frames``: of the sent bytes, those of headers and digests, where they are counted."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    frames: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent)

    @property
    def busiest(self) -> int:
        """What the busiest link carries one way."""
        return max(*self.sent, *self.received)


Changed = Collection[tuple[int, int, int]]
"""(member, stripe, bucket) whose bytes differ from the version before."""


def encode_traffic(layout: ParityLayout, changed: Changed | None = None, route: Route = Route.RELAY) -> Traffic:
    """What a step's parity sends, headers included. ``changed``: None means everything. With parity 1 both routes are
    the same."""
    sent, received = [0] * layout.members, [0] * layout.members
    frames = 0

    def send(source: int, target: int, payload: int, extra: int = 0) -> None:
        nonlocal frames
        sent[source] += HEADER_BYTES + extra + payload
        received[target] += HEADER_BYTES + extra + payload
        frames += HEADER_BYTES + extra

    for stripe in range(layout.members):
        p = layout.holder(stripe, StripePart.P)
        direct = layout.parts() if route is Route.DIRECT else (StripePart.P,)
        for bucket in range(layout.buckets(stripe)):
            summed = []
            for column in range(layout.columns):
                member, length = layout.member(stripe, column), layout.data_length(stripe, bucket, column)
                if length and (changed is None or (member, stripe, bucket) in changed):
                    summed.append(column)
                    for part in direct:
                        send(member, layout.holder(stripe, part), length)
            if route is Route.RELAY and layout.parity == 2 and summed:
                length = max(layout.shift(StripePart.Q, c) + layout.data_length(stripe, bucket, c) for c in summed)
                send(p, layout.holder(stripe, StripePart.Q), length, DIGEST_BYTES * layout.columns)
        for column in range(layout.columns):
            for part in direct:
                send(layout.member(stripe, column), layout.holder(stripe, part), 0)
        if route is Route.RELAY and layout.parity == 2:
            send(p, layout.holder(stripe, StripePart.Q), 0)
    return Traffic(tuple(sent), tuple(received), frames)

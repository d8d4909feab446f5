"""What the members of a parity group send each other: the buckets of a new version that differ.

A frame is a header and a payload. :func:`deltas` makes the frames of one member: ``old ^ new`` of each bucket that has
changed. The caller delivers them, in order for each pair of members. No torch, no processes, no network.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from flashrecovery.errors import ProtocolError
from flashrecovery.plan.parity.code import DIGEST_BYTES, HEADER_BYTES, ParityLayout, Route, StripePart
from flashrecovery.redundancy.parity.xor import Buffer, Xor, xor

NO_BASE = -1
"""The base of a version that is encoded completely, as if the one before it were zeros."""
ABSENT = bytes(DIGEST_BYTES)
"""The digest of a bucket of which there is nothing."""


ParityPlace = tuple[int, StripePart]
"""Which parity: (stripe, P or Q)."""
FrameStream = tuple[int, int]
"""A stream of frames from one member to another."""
PayloadRoom = Callable[[ParityPlace, int], memoryview]
"""Memory for that many bytes of payload that go to the holder of a parity; valid until it is requested again."""


def digest(data: Buffer) -> bytes:
    """xxh3-128 of one bucket's bytes."""
    return xxhash.xxh3_128_digest(data)


class FrameKind(IntEnum):
    """What a frame is."""

    DELTA = 1
    """The delta of one member's bucket."""
    SUM = 2
    """The sum of all members' deltas of a bucket, as Q adds them; the payload begins with the columns' digests."""
    DONE = 3
    """The sender has no more for this stripe; ``bucket``: for how many buckets it had something."""


_HEADER = struct.Struct("<IBBxxqqIIII16s")
_CHECK = struct.Struct("<Q")
"""After the rest of a header: of that and the payload."""
_MAGIC = 0x46525059


class Frame(NamedTuple):
    """A message from ``member`` about a stripe's parity ``part``.

    Attributes:
        version, base: the parity of ``version`` is that of ``base`` with all its deltas added.
        digest: of the member's bucket at ``version``.
        payload: valid until the next frame is asked for.
    """

    kind: FrameKind
    part: StripePart
    version: int
    base: int
    member: int
    stripe: int
    bucket: int
    digest: bytes = ABSENT
    payload: Buffer = b""

    def header(self) -> bytes:
        """64 bytes, which the payload follows."""
        place = self.member, self.stripe, self.bucket, len(self.payload)
        second = self.part is StripePart.Q
        head = _HEADER.pack(_MAGIC, self.kind, second, self.version, self.base, *place, self.digest)
        return head + _CHECK.pack(_check(head, self.payload))

    @staticmethod
    def parse(header: Buffer, payload: Buffer) -> Frame:
        """What :meth:`header` and the payload say. Raises ProtocolError if they have been changed on the way."""
        head = bytes(header[: _HEADER.size])
        magic, kind, second, version, base, member, stripe, bucket, length, known = _HEADER.unpack(head)
        (check,) = _CHECK.unpack(header[_HEADER.size :])
        if magic != _MAGIC or length != len(payload) or check != _check(head, payload):
            raise ProtocolError(f"what arrived as {len(payload)} bytes of parity is not what was sent")
        part = StripePart.Q if second else StripePart.P
        return Frame(FrameKind(kind), part, version, base, member, stripe, bucket, known, payload)

    @staticmethod
    def payload_bytes(header: Buffer) -> int:
        """How much follows a header."""
        length = _HEADER.unpack(header[: _HEADER.size])[8]
        assert isinstance(length, int)
        return length

    @property
    def nbytes(self) -> int:
        """On the wire."""
        return HEADER_BYTES + len(self.payload)


assert _HEADER.size + _CHECK.size == HEADER_BYTES


def _check(head: bytes, payload: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(head))


@dataclass(frozen=True)
class DeltaBase:
    """The version from which a member's deltas lead to the next one, and its flat bytes at that version."""

    version: int
    content: Buffer


def deltas(
    layout: ParityLayout,
    member: int,
    version: int,
    new: Buffer,
    base: DeltaBase | None = None,
    route: Route = Route.RELAY,
    arithmetic: Xor | None = None,
    places: Collection[ParityPlace] | None = None,
    room: PayloadRoom | None = None,
) -> Iterator[Frame]:
    """What ``member`` sends so that the group's parity becomes that of ``version``; a frame's target is the holder of
    its part. All stripes side by side, so that no holder waits for the others'.

    Args:
        new: the member's flat bytes at ``version``. Neither these nor those of ``base`` may change meanwhile.
        base: None: everything is sent as it is.
        places: the parities that are made, the same for all members; all of them if not given.
        room: where a delta that goes to one holder only is written; without it, into new memory.
    """
    compute = arithmetic or xor()
    now, size = flat(new, layout.sizes[member]), layout.sizes[member]
    before, base_version = (None, NO_BASE) if base is None else (flat(base.content, size), base.version)
    parts = {stripe: _sent_to(layout, stripe, route, places) for stripe in layout.data_stripes(member)}
    scratch = memoryview(bytearray(layout.bucket))
    stripes = [stripe for stripe in layout.data_stripes(member) if parts[stripe]]
    sent = dict.fromkeys(stripes, 0)
    for bucket in range(max(map(layout.buckets, stripes), default=0)):
        for stripe in stripes:
            offset, length = layout.data_bucket(stripe, bucket, member)
            if not length:
                continue
            payload = content = now[offset : offset + length]
            if before is not None:
                # What goes to two has to stay until the second one has got it.
                there = room if len(parts[stripe]) == 1 else None
                payload = scratch[:length] if there is None else there((stripe, parts[stripe][0]), length)
                if not compute.delta(payload, before[offset : offset + length], content):
                    continue
            sent[stripe] += 1
            known = digest(content)
            for part in parts[stripe]:
                yield Frame(FrameKind.DELTA, part, version, base_version, member, stripe, bucket, known, payload)
    for stripe in stripes:
        for part in parts[stripe]:
            yield Frame(FrameKind.DONE, part, version, base_version, member, stripe, sent[stripe])


def _sent_to(
    layout: ParityLayout, stripe: int, route: Route, places: Collection[ParityPlace] | None
) -> tuple[StripePart, ...]:
    """The parities to whose holders the members themselves send."""
    made = [part for part in layout.parts() if places is None or (stripe, part) in places]
    by_relay = relayed(layout, stripe, route, places)
    return tuple(part for part in made if part is StripePart.P or not by_relay)


def relayed(layout: ParityLayout, stripe: int, route: Route, places: Collection[ParityPlace] | None) -> bool:
    """Whether the stripe's second parity gets sums from the holder of its first one."""
    both = layout.parity == 2 and (places is None or all((stripe, part) in places for part in layout.parts()))
    return both and route is Route.RELAY


def streams(
    layout: ParityLayout, places: Collection[ParityPlace] | None = None, route: Route = Route.RELAY
) -> set[FrameStream]:
    """(sender, target) of all frames with which these parities are made (None: all of them)."""
    found = set()
    for stripe in range(layout.members):
        for part in _sent_to(layout, stripe, route, places):
            target = layout.holder(stripe, part)
            found |= {(layout.member(stripe, column), target) for column in range(layout.columns)}
        if relayed(layout, stripe, route, places):
            found.add((layout.holder(stripe, StripePart.P), layout.holder(stripe, StripePart.Q)))
    return found


def flat(buffer: Buffer, nbytes: int) -> memoryview:
    """The buffer's first ``nbytes`` bytes. Raises ValueError if it has fewer."""
    view = memoryview(buffer).cast("B")
    if len(view) < nbytes:
        raise ValueError(f"a buffer of {len(view)} bytes: at least {nbytes} are allowed")
    return view[:nbytes]

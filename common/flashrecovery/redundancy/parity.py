"""Parity of a group's shards, over plain buffers: encoded by what changes, and decoded.

:mod:`flashrecovery.plan.parity` says what lies where. Here are the bytes:

* :func:`deltas`: what a member sends of a new version, ``old ^ new`` of the buckets that differ.
* :class:`ParityStore`: one parity of one stripe, two versions of it, in memory that another process may take over.
* :class:`ParityMember`: everything that a member holds; frames in, frames out (those that it relays).
* :func:`decode_bucket`: what is lost, from what is left.

No torch, no processes, no network: a frame is a header and a payload, and whoever uses this brings it to its target, in
order for each pair of members. Nothing here is safe for several threads; different stores may be used by different
ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.parity import DIGEST_BYTES, HEADER_BYTES, ROW, ParityLayout, Route, StripePart
from flashrecovery.redundancy.xor import Buffer, Xor, xor

NO_BASE = -1
"""Of a version that is encoded whole, as if the one before it were zeros."""
_ABSENT = bytes(DIGEST_BYTES)


ParityPlace = tuple[int, StripePart]
"""Which parity: (stripe, P or Q)."""
FrameStream = tuple[int, int]
"""Of frames, from one member to another."""
PayloadRoom = Callable[[ParityPlace, int], memoryview]
"""Memory for so many bytes of payload that go to the holder of a parity; valid until it is asked for again."""


def digest(data: Buffer) -> bytes:
    """xxh3-128 of one bucket's bytes."""
    return xxhash.xxh3_128_digest(data)


# -- frames --------------------------------------------------------------------------------------


class FrameKind(IntEnum):
    """What a frame is."""

    DELTA = 1
    """Of one member's bucket."""
    SUM = 2
    """Of all members' deltas of a bucket, as Q adds them; the payload begins with the columns' digests."""
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
    digest: bytes = _ABSENT
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


def deltas(
    layout: ParityLayout,
    member: int,
    version: int,
    new: Buffer,
    base: int = NO_BASE,
    old: Buffer | None = None,
    route: Route = Route.RELAY,
    arithmetic: Xor | None = None,
    places: Collection[ParityPlace] | None = None,
    room: PayloadRoom | None = None,
) -> Iterator[Frame]:
    """What ``member`` sends so that the group's parity becomes that of ``version``; a frame's target is the holder of
    its part. All stripes side by side, so that no holder waits for the others'.

    Args:
        new, old: the member's flat bytes at ``version`` and ``base``; neither may change meanwhile. Without ``old``
            everything is sent as it is.
        places: the parities that are made, the same for all members; all of them if not given.
        room: where a delta that goes to one holder only is written; without it, into memory of its own.
    """
    compute = arithmetic or xor()
    now, before = _flat(new, layout.sizes[member]), None if old is None else _flat(old, layout.sizes[member])
    if (before is None) != (base == NO_BASE):
        raise ValueError("a base and its bytes belong together")
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
                yield Frame(FrameKind.DELTA, part, version, base, member, stripe, bucket, known, payload)
    for stripe in stripes:
        for part in parts[stripe]:
            yield Frame(FrameKind.DONE, part, version, base, member, stripe, sent[stripe])


def _sent_to(
    layout: ParityLayout, stripe: int, route: Route, places: Collection[ParityPlace] | None
) -> tuple[StripePart, ...]:
    """The parities to whose holders the members themselves send."""
    made = [part for part in layout.parts() if places is None or (stripe, part) in places]
    relayed = _relayed(layout, stripe, route, places)
    return tuple(part for part in made if part is StripePart.P or not relayed)


def _relayed(layout: ParityLayout, stripe: int, route: Route, places: Collection[ParityPlace] | None) -> bool:
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
        if _relayed(layout, stripe, route, places):
            found.add((layout.holder(stripe, StripePart.P), layout.holder(stripe, StripePart.Q)))
    return found


# -- what a holder keeps -------------------------------------------------------------------------

_STORE_MAGIC = b"FRparity"
_STORE_HEADER = 64
_WORD = struct.Struct("<Qq")
"""At the beginning of a record: digest of the rest, version. A digest of 0: no version."""


@dataclass(frozen=True)
class _Record:
    """A clean version: in which slot each bucket is, and the digests of parity and data."""

    version: int
    slots: bytes
    parity: bytes
    data: bytes


@dataclass
class _Dirty:
    """A version that is being made."""

    version: int
    base: int
    slots: bytearray
    data: bytearray
    applied: list[set[int]]
    done: set[int]


class ParityStore:
    """One parity of one stripe in ``memory``, with its newest two versions.

    ``memory`` holds two slots for the content and two records. A record says which version is whole, in which slot each
    of its buckets is, and what their digests are. A new version is built in whatever slot the newest clean version does
    not use, bucket by bucket; a bucket that did not change is not touched, both versions use the same bytes. So:

    * :meth:`begin` takes the older version's record away *before* anything of it is overwritten;
    * :meth:`flip` writes the new record, and its first word, the digest of the rest, last.

    A process that is killed at any moment leaves a newest clean version that is whole, and whoever opens the memory
    then finds this version and no other. What it reads is compared with its digest each time.
    """

    def __init__(
        self, layout: ParityLayout, stripe: int, part: StripePart, memory: Buffer, arithmetic: Xor | None = None
    ) -> None:
        """``memory``: writable, :meth:`nbytes` bytes; zeros, or what another store of the same layout has left there.
        Raises RestoreError if it is something else."""
        self.layout, self.stripe, self.part = layout, stripe, part
        self._xor = arithmetic or xor()
        self._memory = _flat(memory, self.nbytes(layout, stripe, part))
        self._buckets = layout.buckets(stripe)
        self._offsets = layout.parity_offsets(stripe, part)
        self._lengths = [layout.parity_length(stripe, part, bucket) for bucket in range(self._buckets)]
        size = _record_bytes(layout, stripe)
        self._record_at = (_STORE_HEADER, _STORE_HEADER + size)
        first = _STORE_HEADER + 2 * size
        self._slot_at = (first, first + self._offsets[-1])
        self._dirty: _Dirty | None = None
        self._identify()
        self._records = [self._parse(where) for where in self._record_at]

    @staticmethod
    def nbytes(layout: ParityLayout, stripe: int, part: StripePart) -> int:
        """Memory that it takes: twice the parity, and a little."""
        return _STORE_HEADER + 2 * (_record_bytes(layout, stripe) + layout.parity_bytes(stripe, part))

    def _identify(self) -> None:
        place = f"{self.layout.sizes} {self.layout.parity} {self.layout.bucket} {self.stripe} {self.part.value}"
        ident = _STORE_MAGIC + digest(place.encode())
        known = bytes(self._memory[: len(ident)])
        if known == bytes(len(ident)):
            for where in self._record_at:
                self._memory[where : where + _WORD.size] = bytes(_WORD.size)
            self._memory[: len(ident)] = ident
        elif known != ident:
            raise RestoreError(f"this memory does not hold {self.part.value} of stripe {self.stripe} of this group")

    # -- what is held -----------------------------------------------------------------------------

    def clean(self) -> list[int]:
        """Versions held whole, ascending."""
        return sorted({record.version for record in self._records if record is not None})

    @property
    def dirty(self) -> int | None:
        """The version that is being made."""
        return None if self._dirty is None else self._dirty.version

    def bucket(self, version: int, bucket: int) -> memoryview:
        """The content, not copied. Raises RestoreError if that version is not clean or the bytes are wrong."""
        record = self._record(version)
        content = self._content(record.slots[bucket], bucket)
        if digest(content) != _nth(record.parity, bucket):
            where = f"{self.part.value} of stripe {self.stripe}"
            raise RestoreError(f"{where} does not have its digest in bucket {bucket} of version {version}")
        return content

    def data_digest(self, version: int, bucket: int, column: int) -> bytes:
        """Of a member's bucket as this version's parity has it; zeros if there is nothing of it."""
        return _nth(self._record(version).data, bucket * self.layout.columns + column)

    def verify(self, version: int) -> None:
        """Look at all of a version. Raises RestoreError."""
        for bucket in range(self._buckets):
            self.bucket(version, bucket)

    def _record(self, version: int) -> _Record:
        for record in self._records:
            if record is not None and record.version == version:
                return record
        making = "" if self.dirty is None else f"; {self.dirty} is being made"
        raise RestoreError(
            f"{self.part.value} of stripe {self.stripe} is not held at version {version}; held: {self.clean()}{making}"
        )

    # -- a new version ----------------------------------------------------------------------------

    @property
    def making_from(self) -> int | None:
        """The base of the version that is being made."""
        return None if self._dirty is None else self._dirty.base

    def begin(self, version: int, base: int = NO_BASE) -> None:
        """From now on deltas make ``version`` from ``base``, the newest clean one; the one before it is given up. With
        :data:`NO_BASE` every member sends everything. What had been begun before is dropped. Raises ProtocolError."""
        newest = max(self.clean(), default=NO_BASE)
        if base not in (newest, NO_BASE) or version <= newest:
            raise ProtocolError(
                f"{self.part.value} of stripe {self.stripe} cannot become version {version} from {base}: its newest "
                f"clean version is {newest}"
            )
        keep = next((r for r in self._records if r is not None and r.version == newest), None)
        for index, record in enumerate(self._records):
            if record is not keep or keep is None:
                self._erase(index)
        data = bytearray(keep.data) if keep is not None and base != NO_BASE else bytearray(self._data_bytes)
        slots = bytearray(keep.slots if keep is not None else bytes(self._buckets))
        self._dirty = _Dirty(version, base, slots, data, [set() for _ in range(self._buckets)], set())

    @property
    def _data_bytes(self) -> int:
        return self._buckets * self.layout.columns * DIGEST_BYTES

    def apply(self, bucket: int, payload: Buffer, digests: Mapping[int, bytes], shift: int = 0) -> None:
        """Add ``payload``, the delta of the columns in ``digests``, ``shift`` bytes into a bucket. ``digests``: of
        these columns' buckets as they are now. Raises ProtocolError for what is there already, or cannot be."""
        dirty = self._making()
        if not 0 <= bucket < self._buckets or not 0 <= shift <= shift + len(payload) <= self._lengths[bucket]:
            raise ProtocolError(
                f"{len(payload)} bytes do not fit {shift} bytes into bucket {bucket} of {self._where()}"
            )
        columns = set(digests)
        if (
            not columns
            or not columns <= set(range(self.layout.columns))
            or columns & (dirty.applied[bucket] | dirty.done)
        ):
            raise ProtocolError(
                f"the deltas of columns {sorted(columns)} come again, in bucket {bucket} of {self._where()}"
            )
        first = not dirty.applied[bucket]
        # Whatever happens from here on, a delta is never added twice: the version would have to begin again.
        dirty.applied[bucket] |= columns
        clean = self._newest()
        if first and clean is not None:
            dirty.slots[bucket] = 1 - clean.slots[bucket]
        to = self._content(dirty.slots[bucket], bucket)
        end = shift + len(payload)
        if not first:
            self._xor.into(to[shift:end], payload)
        elif dirty.base == NO_BASE or clean is None:
            to[:shift], to[shift:end], to[end:] = bytes(shift), payload, bytes(len(to) - end)
        else:
            was = self._content(clean.slots[bucket], bucket)
            to[:shift], to[end:] = was[:shift], was[end:]
            last = self.layout.columns == len(columns)
            (self._xor.stream if last else self._xor.delta)(to[shift:end], was[shift:end], payload)
        for column, known in digests.items():
            _put(dirty.data, bucket * self.layout.columns + column, known)

    def done(self, columns: Iterable[int], buckets: int) -> None:
        """These columns' deltas are in, in so many buckets. Raises ProtocolError if it is another number."""
        dirty, finished = self._making(), set(columns)
        seen = sum(bool(applied & finished) for applied in dirty.applied)
        if seen != buckets or finished & dirty.done:
            raise ProtocolError(
                f"columns {sorted(finished)} have sent {buckets} buckets, {seen} arrived, in {self._where()}"
            )
        dirty.done |= finished

    @property
    def complete(self) -> bool:
        """Whether all members' deltas are in."""
        return self._dirty is not None and len(self._dirty.done) == self.layout.columns

    def flip(self) -> None:
        """The version that was being made is clean from now on. Raises ProtocolError before all deltas are in."""
        dirty = self._making()
        if not self.complete:
            raise ProtocolError(f"{self._where()} lacks deltas of columns {self._lacking(dirty)}")
        if dirty.base == NO_BASE:
            self._check_whole(dirty)
        clean = self._newest()
        parity = bytearray(clean.parity if clean is not None else bytes(self._buckets * DIGEST_BYTES))
        for bucket, applied in enumerate(dirty.applied):
            if applied:
                _put(parity, bucket, digest(self._content(dirty.slots[bucket], bucket)))
        record = _Record(dirty.version, bytes(dirty.slots), bytes(parity), bytes(dirty.data))
        index = next(i for i, other in enumerate(self._records) if other is None)
        self._write(index, record)
        self._records[index] = record
        self._dirty = None

    def abandon(self) -> None:
        """Give up what was begun; clean versions stay."""
        self._dirty = None

    def drop_after(self, version: int) -> None:
        """Forget newer versions: the steps that led to them have been undone."""
        self.abandon()
        for index, record in enumerate(self._records):
            if record is not None and record.version > version:
                self._erase(index)

    def _check_whole(self, dirty: _Dirty) -> None:
        for bucket, applied in enumerate(dirty.applied):
            for column in range(self.layout.columns):
                if self.layout.data_length(self.stripe, bucket, column) and column not in applied:
                    raise ProtocolError(f"column {column} did not send bucket {bucket} of {self._where()}")

    def _lacking(self, dirty: _Dirty) -> list[int]:
        return sorted(set(range(self.layout.columns)) - dirty.done)

    def _making(self) -> _Dirty:
        if self._dirty is None:
            raise ProtocolError(f"no version of {self.part.value} of stripe {self.stripe} has been begun")
        return self._dirty

    def _where(self) -> str:
        return f"version {self.dirty} of {self.part.value} of stripe {self.stripe}"

    def _newest(self) -> _Record | None:
        return max((r for r in self._records if r is not None), key=lambda r: r.version, default=None)

    # -- memory -----------------------------------------------------------------------------------

    def _content(self, slot: int, bucket: int) -> memoryview:
        start = self._slot_at[slot] + self._offsets[bucket]
        return self._memory[start : start + self._lengths[bucket]]

    def _erase(self, index: int) -> None:
        self._records[index] = None
        where = self._record_at[index]
        self._memory[where : where + _WORD.size] = bytes(_WORD.size)

    def _write(self, index: int, record: _Record) -> None:
        where = self._record_at[index]
        body = struct.pack("<q", record.version) + record.slots + record.parity + record.data
        self._memory[where + 8 : where + 8 + len(body)] = body
        # Last: before this word is there, there is no record. One aligned store.
        self._memory[where : where + 8].cast("Q")[0] = xxhash.xxh3_64_intdigest(body) or 1

    def _parse(self, where: int) -> _Record | None:
        body_bytes = 8 + self._buckets * (1 + DIGEST_BYTES) + self._data_bytes
        body = bytes(self._memory[where + 8 : where + 8 + body_bytes])
        check, version = _WORD.unpack(self._memory[where : where + _WORD.size])
        if check == 0 or check != (xxhash.xxh3_64_intdigest(body) or 1):
            return None
        slots, rest = body[8 : 8 + self._buckets], body[8 + self._buckets :]
        split = self._buckets * DIGEST_BYTES
        return _Record(version, slots, rest[:split], rest[split:])


def _record_bytes(layout: ParityLayout, stripe: int) -> int:
    content = _WORD.size + layout.buckets(stripe) * (1 + DIGEST_BYTES * (1 + layout.columns))
    return -(-content // ROW) * ROW


# -- what a member does --------------------------------------------------------------------------


class _Relay:
    """The deltas of one stripe, added up as Q wants them, bucket by bucket."""

    def __init__(self, layout: ParityLayout, stripe: int, compute: Xor) -> None:
        self._layout, self._stripe, self._xor = layout, stripe, compute
        self._sums: dict[int, tuple[bytearray, dict[int, bytes]]] = {}
        self._next = dict.fromkeys(range(layout.columns), 0)
        """The first bucket of which a column may still send something."""
        self._done: set[int] = set()
        self._sent = 0

    def check(self, frame: Frame, column: int) -> None:
        """Raises ProtocolError if it comes too late: the sum has been sent on without it."""
        if frame.kind is FrameKind.DELTA and frame.bucket < self._next[column]:
            raise ProtocolError(f"member {frame.member} sends bucket {frame.bucket} of stripe {frame.stripe} too late")

    def add(self, frame: Frame, column: int) -> list[Frame]:
        """What can be sent on now."""
        if frame.kind is FrameKind.DONE:
            self._next[column] = self._layout.buckets(self._stripe)
            self._done.add(column)
            return self._ready(frame)
        self._next[column] = frame.bucket + 1
        if frame.bucket not in self._sums:
            length = self._layout.parity_length(self._stripe, StripePart.Q, frame.bucket)
            self._sums[frame.bucket] = bytearray(length), {}
        total, digests = self._sums[frame.bucket]
        shift = self._layout.shift(StripePart.Q, column)
        self._xor.into(memoryview(total)[shift : shift + len(frame.payload)], frame.payload)
        digests[column] = frame.digest
        return self._ready(frame)

    @property
    def ended(self) -> bool:
        """Whether all of it has been sent on."""
        return len(self._done) == self._layout.columns

    @property
    def waiting_bytes(self) -> int:
        """Of sums that are not complete yet."""
        return sum(len(total) for total, _ in self._sums.values())

    def _ready(self, frame: Frame) -> list[Frame]:
        layout, first = self._layout, min(self._next.values())
        sender = layout.holder(self._stripe, StripePart.P)
        place = StripePart.Q, frame.version, frame.base, sender, self._stripe
        found = []
        for bucket in sorted(b for b in self._sums if b < first):
            total, digests = self._sums.pop(bucket)
            lengths = [layout.shift(StripePart.Q, c) + layout.data_length(self._stripe, bucket, c) for c in digests]
            head = b"".join(digests.get(column, _ABSENT) for column in range(layout.columns))
            found.append(Frame(FrameKind.SUM, *place, bucket, _ABSENT, head + memoryview(total)[: max(lengths)]))
            self._sent += 1
        if len(self._done) == layout.columns:
            found.append(Frame(FrameKind.DONE, *place, self._sent))
        return found


class ParityMember:
    """All parity that one member of a group holds."""

    def __init__(
        self,
        layout: ParityLayout,
        member: int,
        memory: Mapping[ParityPlace, Buffer] | None = None,
        route: Route = Route.RELAY,
        arithmetic: Xor | None = None,
    ) -> None:
        """``memory``: for each of :meth:`places`; without it, of this process."""
        self.layout, self.member = layout, member
        self._xor = arithmetic or xor()
        self._route = route
        self._summed: frozenset[int] = frozenset()
        self._relay: dict[int, _Relay] = {}
        self.stores = {
            place: ParityStore(layout, *place, memory[place] if memory else bytearray(nbytes), self._xor)
            for place, nbytes in self.places(layout, member).items()
        }

    @staticmethod
    def places(layout: ParityLayout, member: int) -> dict[ParityPlace, int]:
        """(stripe, part) that this member holds, and the bytes of memory that each takes."""
        return {
            (stripe, part): ParityStore.nbytes(layout, stripe, part)
            for stripe in range(layout.members)
            for part in layout.parts()
            if layout.holder(stripe, part) == member
        }

    def begin(self, version: int, base: int = NO_BASE, places: Collection[ParityPlace] | None = None) -> None:
        """Before the first frame of ``version``. ``places``: see :func:`deltas`; the parities that are not made stay as
        they are."""
        layout = self.layout
        for place, store in self.stores.items():
            if places is None or place in places:
                store.begin(version, base)
        stripes = range(layout.members)
        self._summed = frozenset(stripe for stripe in stripes if _relayed(layout, stripe, self._route, places))
        held = {stripe for stripe, part in self.stores if part is StripePart.P}
        self._relay = {stripe: _Relay(layout, stripe, self._xor) for stripe in self._summed & held}

    def owes_sums(self, target: int) -> bool:
        """Whether a sum of others' deltas has still to be sent on to that member."""
        return any(
            not relay.ended and self.layout.holder(stripe, StripePart.Q) == target
            for stripe, relay in self._relay.items()
        )

    def receive(self, frame: Frame) -> list[Frame]:
        """Take a frame in; returns those to be sent on, each to the holder of its part. A parity becomes clean with the
        last frame that it needs. Raises ProtocolError for what does not belong here; nothing has been changed then."""
        store = self.stores.get((frame.stripe, frame.part))
        if store is None or store.dirty != frame.version or store.making_from != frame.base:
            raise ProtocolError(
                f"member {self.member} does not make version {frame.version} from {frame.base} of {frame.part.value} "
                f"of stripe {frame.stripe}"
            )
        layout, summed = self.layout, frame.part is StripePart.Q and frame.stripe in self._summed
        if summed:
            senders, kind = {layout.holder(frame.stripe, StripePart.P)}, FrameKind.SUM
        else:
            senders, kind = {layout.member(frame.stripe, c) for c in range(layout.columns)}, FrameKind.DELTA
        if frame.member not in senders or frame.kind not in (kind, FrameKind.DONE):
            raise ProtocolError(f"member {frame.member} does not send {frame.kind.name} for {frame.part.value}")
        column = 0 if summed else layout.column(frame.stripe, frame.member)
        relay = self._relay.get(frame.stripe) if frame.part is StripePart.P else None
        if relay is not None:
            relay.check(frame, column)
        if frame.kind is FrameKind.DONE:
            store.done(range(layout.columns) if summed else [column], frame.bucket)
        elif summed:
            head, payload = _split(frame.payload, DIGEST_BYTES * layout.columns)
            known = {c: _nth(head, c) for c in range(layout.columns) if _nth(head, c) != _ABSENT}
            store.apply(frame.bucket, payload, known)
        else:
            if len(frame.payload) != layout.data_length(frame.stripe, frame.bucket, column):
                raise ProtocolError(f"{len(frame.payload)} bytes of bucket {frame.bucket} from member {frame.member}")
            store.apply(frame.bucket, frame.payload, {column: frame.digest}, layout.shift(frame.part, column))
        onward = relay.add(frame, column) if relay is not None else []
        if store.complete:
            store.flip()
        return onward

    def clean(self) -> dict[ParityPlace, list[int]]:
        """Versions held whole, of each parity."""
        return {place: store.clean() for place, store in self.stores.items()}

    def drop_after(self, version: int) -> None:
        """Forget newer versions, and what is being made."""
        for store in self.stores.values():
            store.drop_after(version)
        self._relay = {}

    @property
    def waiting_bytes(self) -> int:
        """Memory of sums that wait for somebody's delta."""
        return sum(relay.waiting_bytes for relay in self._relay.values())


# -- decoding ------------------------------------------------------------------------------------


def encode_bucket(
    layout: ParityLayout,
    stripe: int,
    part: StripePart,
    bucket: int,
    columns: Mapping[int, Buffer],
    compute: Xor | None = None,
) -> bytearray:
    """A bucket of parity from all of the stripe's columns."""
    arithmetic = compute or xor()
    total = bytearray(layout.parity_length(stripe, part, bucket))
    _add(arithmetic, layout, part, total, columns)
    return total


def decode_bucket(
    layout: ParityLayout,
    stripe: int,
    bucket: int,
    columns: Mapping[int, Buffer],
    parity: Mapping[StripePart, Buffer],
    digests: Mapping[int, bytes] | None = None,
    compute: Xor | None = None,
) -> dict[int, memoryview]:
    """The columns of a stripe's bucket that are not given, from those that are and as much parity as there are missing
    ones; all of one version.

    Args:
        digests: of the missing columns, as :meth:`ParityStore.data_digest` has them.

    Raises:
        RestoreError: not enough parity, or what comes out is wrong; nothing is returned then.
    """
    arithmetic = compute or xor()
    lengths = [layout.data_length(stripe, bucket, column) for column in range(layout.columns)]
    missing = [column for column, length in enumerate(lengths) if length and column not in columns]
    place = f"bucket {bucket} of stripe {stripe}"
    if wrong := [c for c, data in columns.items() if len(data) != lengths[c]]:
        raise RestoreError(f"{place}: columns {wrong} do not have the lengths of this layout")
    if len(missing) > len(parity):
        raise RestoreError(f"{place}: columns {missing} are missing, and there are {len(parity)} parities")
    if wrong_parts := [p.value for p, data in parity.items() if len(data) != layout.parity_length(stripe, p, bucket)]:
        raise RestoreError(f"{place}: {wrong_parts} do not have the lengths of this layout")
    used = {part: parity[part] for part in (StripePart.P, StripePart.Q) if part in parity}
    while len(used) > len(missing):
        used.popitem()
    rest: dict[StripePart, bytearray] = {}
    for part, content in used.items():
        rest[part] = bytearray(content)
        _add(arithmetic, layout, part, rest[part], columns)
    found: dict[int, memoryview] = {}
    if len(missing) == 2:
        found = _unzip(arithmetic, missing[0], missing[1], max(lengths[c] for c in missing), rest)
    for column, (part, left) in zip(missing, rest.items(), strict=True) if len(missing) == 1 else ():
        shift = layout.shift(part, column)
        found[column] = memoryview(left)[shift:]
        if not _zero(memoryview(left)[:shift]):
            raise RestoreError(f"{place}: what is left for column {column} begins too early")
    result = {}
    for column, data in found.items():
        result[column] = data[: lengths[column]]
        if not _zero(data[lengths[column] :]):
            raise RestoreError(f"{place}: what comes out for column {column} is longer than it was")
        if digests is not None and digests.get(column) != digest(result[column]):
            raise RestoreError(f"{place}: what comes out for column {column} does not have its digest")
    return result


def _unzip(compute: Xor, a: int, b: int, longest: int, rest: Mapping[StripePart, bytearray]) -> dict[int, memoryview]:
    """Columns a < b from what is left of P and Q without the others."""
    size = -(-longest // ROW) * ROW
    p, q = bytearray(size), bytearray(size)
    from_p, from_q = memoryview(rest[StripePart.P])[:size], memoryview(rest[StripePart.Q])[a * ROW : a * ROW + size]
    p[: len(from_p)], q[: len(from_q)] = from_p, from_q
    compute.unzip(p, q, b - a)
    return {a: memoryview(q), b: memoryview(p)}


def _add(compute: Xor, layout: ParityLayout, part: StripePart, total: bytearray, columns: Mapping[int, Buffer]) -> None:
    """Add the columns to a bucket of parity; those of one length and place in one go."""
    view = memoryview(total)
    together: dict[tuple[int, int], list[Buffer]] = {}
    for column, data in columns.items():
        if len(data):
            together.setdefault((layout.shift(part, column), len(data)), []).append(data)
    for (shift, length), buffers in together.items():
        compute.many(view[shift : shift + length], buffers)


# -- small things --------------------------------------------------------------------------------


def _flat(buffer: Buffer, nbytes: int) -> memoryview:
    view = memoryview(buffer).cast("B")
    if len(view) < nbytes:
        raise ValueError(f"a buffer of {len(view)} bytes: at least {nbytes} are allowed")
    return view[:nbytes]


def _zero(view: memoryview) -> bool:
    return bytes(view) == bytes(len(view))


def _nth(digests: Buffer, index: int) -> bytes:
    return bytes(digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])


def _put(digests: bytearray, index: int, known: Sequence[int] | bytes) -> None:
    digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = bytes(known)


def _split(payload: Buffer, at: int) -> tuple[memoryview, memoryview]:
    view = memoryview(payload)
    return view[:at], view[at:]

"""The parities that a member of a group holds: two versions of each, in memory that another process may take over.

Not safe for several threads; different stores may be used by different ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.parity.code import DIGEST_BYTES, ROW, ParityLayout, StripePart
from flashrecovery.redundancy.parity.frames import NO_BASE, digest, flat
from flashrecovery.redundancy.parity.xor import Buffer, Xor, xor

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

    A process that is killed at any moment leaves a newest clean version that is complete, and a process that opens the
    memory afterwards finds exactly this version. Everything it reads is compared with its digest.
    """

    def __init__(
        self, layout: ParityLayout, stripe: int, part: StripePart, memory: Buffer, arithmetic: Xor | None = None
    ) -> None:
        """``memory``: writable, :meth:`nbytes` bytes; zeros, or what another store of the same layout has left there.
        Raises RestoreError if it is something else."""
        self.layout, self.stripe, self.part = layout, stripe, part
        self._xor = arithmetic or xor()
        self._memory = flat(memory, self.nbytes(layout, stripe, part))
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
        if digest(content) != nth_digest(record.parity, bucket):
            where = f"{self.part.value} of stripe {self.stripe}"
            raise RestoreError(f"{where} does not have its digest in bucket {bucket} of version {version}")
        return content

    def data_digest(self, version: int, bucket: int, column: int) -> bytes:
        """The digest of a member's bucket in this version's parity; zeros if there is nothing of it."""
        return nth_digest(self._record(version).data, bucket * self.layout.columns + column)

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
        """The deltas of these columns have arrived, in that many buckets. Raises ProtocolError for another number."""
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


def nth_digest(digests: Buffer, index: int) -> bytes:
    """The n-th of digests that are stored one after another."""
    return bytes(digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])


def _put(digests: bytearray, index: int, known: Sequence[int] | bytes) -> None:
    digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = bytes(known)

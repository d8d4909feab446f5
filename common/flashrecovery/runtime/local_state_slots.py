"""Where a page keeps rank-local states: slots for the newest versions, and one more to write the next into.

A version is written into a slot that holds none of those that are kept. Its content comes first, then the words that
describe it, then its version; only then is the slot of the version that it replaces emptied. Stores of a process that
has died are all there, up to one and none after it: so a slot with a version is whole. Content is digested
nevertheless, chunk by chunk. The digests lie behind it, and the words have a digest of them.

Most of a large state is often the same as when the slot was last written: chunks with an equal digest are not copied
again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

from flashrecovery.state import witness
from flashrecovery.state.version import VERSIONS_KEPT

SLOTS = VERSIONS_KEPT + 1
WORDS = 8
"""The words of each slot: version + 1 (0: empty), length, digest, final, two for the witness, whether there is one, and
the number of the writing."""

_VERSION, _LENGTH, _DIGEST, _FINAL, _WITNESS, _HAS_WITNESS, _WRITING = 0, 1, 2, 3, 4, 6, 7
_END = struct.Struct("<qq")
_CHUNK = 1 << 20
_JOINED = 64 << 10
"""Smaller parts that follow one another become one chunk."""
_ROW = struct.Struct("<qq")
"""A chunk's length and digest."""
_LOOKED_THROUGH = 1 << 20
"""Up to this size in bytes, content is digested even if only the versions are requested."""

_Part = bytes | memoryview


def slot_bytes(limit: int) -> int:
    """The bytes of a slot for ``limit`` bytes, whole pages of memory: two chunks in 64 KiB are the most."""
    return -(-(limit + limit // 1024 + 4096) // 4096) * 4096


class LocalStateSlots:
    """The slots of one page; the worker writes, worker and agent read."""

    def __init__(self, words: memoryview, slots: Sequence[memoryview]) -> None:
        self._words = words
        self._slots = list(slots)
        self._written: dict[int, list[tuple[int, int]]] = {}  # by slot: the chunks that this process has left there

    def close(self) -> None:
        self._words.release()
        for slot in self._slots:
            slot.release()

    # -- writing ----------------------------------------------------------------------------------

    def write(self, version: int, parts: Sequence[_Part], *, final: bool) -> None:
        """Store the parts one after another, beside what is there of ``version``."""
        slot = self._free(version)
        at = slot * WORDS
        words = self._words
        words[at + _VERSION] = 0
        rows = self._written[slot] = self._copy(self._slots[slot], parts, self._written.pop(slot, []))
        length = sum(nbytes for nbytes, _ in rows)
        directory = b"".join(_ROW.pack(*row) for row in rows)
        self._slots[slot][length : length + len(directory)] = directory
        words[at + _LENGTH] = length
        words[at + _DIGEST] = _digest(directory)
        words[at + _FINAL] = int(final)
        words[at + _HAS_WITNESS] = 0
        words[at + _WRITING] = 1 + max(words[i * WORDS + _WRITING] for i in range(SLOTS))
        words[at + _VERSION] = version + 1
        for other in range(SLOTS):
            there = words[other * WORDS + _VERSION] - 1
            if other != slot and there >= 0 and there % VERSIONS_KEPT == version % VERSIONS_KEPT:
                words[other * WORDS + _VERSION] = 0

    def _free(self, version: int) -> int:
        """A slot without any of the versions that are kept: of each remainder by their number there is one."""
        there = [self._words[i * WORDS + _VERSION] - 1 for i in range(SLOTS)]
        empty = [i for i, held in enumerate(there) if held < 0]
        if empty:  # the one that was written longest ago: where only a few versions are written it is used, too
            return min(empty, key=lambda i: self._words[i * WORDS + _WRITING])
        # Its writer died before it had emptied the slot of an older version.
        newest = {held % VERSIONS_KEPT: i for i, held in sorted(enumerate(there), key=self._age)}
        return next(i for i in range(SLOTS) if i not in newest.values())

    def _age(self, held: tuple[int, int]) -> int:
        return self._words[held[0] * WORDS + _WRITING]

    @staticmethod
    def _copy(target: memoryview, parts: Sequence[_Part], known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the length and digest of each chunk. ``known``: of those that are there."""
        at, rows = 0, []
        for number, chunk in enumerate(_chunks(parts)):
            row = len(chunk), _digest(chunk)
            # Chunks of equal lengths before it: it lies where it did.
            if number >= len(known) or known[number] != row:
                target[at : at + len(chunk)] = chunk
                row = len(chunk), _digest(target[at : at + len(chunk)])
            rows.append(row)
            at += len(chunk)
            if number < len(known) and known[number][0] != len(chunk):
                known = ()
        return rows

    def finish(self, version: int, end: bytes) -> None:
        """What is there of ``version`` is final; ``end``, if it is known, is in the place of its last bytes."""
        slot = self._slot_of(version)
        if slot is None:
            return
        at = slot * WORDS
        if end != witness.UNKNOWN:
            self._words[at + _WITNESS], self._words[at + _WITNESS + 1] = _END.unpack(end)
            self._words[at + _HAS_WITNESS] = 1
        self._words[at + _FINAL] = 1

    # -- what a dead process has left -------------------------------------------------------------

    def used(self) -> list[tuple[int, int]]:
        """(slot, bytes with the digests behind them) of each version that is there whole."""
        found = []
        for version in self.versions():
            slot = self._slot_of(version)
            rows = None if slot is None else self._rows(slot)
            if slot is not None and rows is not None:
                found.append((slot, self._words[slot * WORDS + _LENGTH] + len(rows) * _ROW.size))
        return found

    def adopt(self, old: LocalStateSlots) -> None:
        """What ``old`` has :meth:`used` has been copied into the same slots, which were empty."""
        for slot, _ in old.used():
            at = slot * WORDS
            self._words[at + 1 : at + WORDS] = old._words[at + 1 : at + WORDS]
            self._words[at] = old._words[at]

    # -- reading ----------------------------------------------------------------------------------

    def read(self, version: int) -> bytes | None:
        """None if it is not there whole."""
        slot = self._slot_of(version)
        if slot is None:
            return None
        rows = self._rows(slot)
        if rows is None or not self._whole(slot, rows):
            return None
        at = slot * WORDS
        data = bytes(self._slots[slot][: self._words[at + _LENGTH]])
        if not self._words[at + _HAS_WITNESS]:
            return data
        return witness.put(data, _END.pack(*self._words[at + _WITNESS : at + _WITNESS + 2]))

    def nbytes(self, version: int) -> int:
        """0 if it is not there."""
        slot = self._slot_of(version)
        return 0 if slot is None else self._words[slot * WORDS + _LENGTH]

    def versions(self) -> list[int]:
        """Those that are there whole. Large ones are taken to be so, as their versions are; :meth:`read` does not."""
        stored = {self._words[i * WORDS + _VERSION] - 1 for i in range(SLOTS)}
        return sorted(v for v in stored if v >= 0 and self._looks_whole(v))

    def early(self) -> list[int]:
        """The versions among :meth:`versions` that are not final."""
        found = [(v, self._slot_of(v)) for v in self.versions()]
        return [v for v, slot in found if slot is not None and not self._words[slot * WORDS + _FINAL]]

    def _looks_whole(self, version: int) -> bool:
        slot = self._slot_of(version)
        rows = None if slot is None else self._rows(slot)
        if slot is None or rows is None:
            return False
        return self._words[slot * WORDS + _LENGTH] > _LOOKED_THROUGH or self._whole(slot, rows)

    def _slot_of(self, version: int) -> int | None:
        found = [i for i in range(SLOTS) if self._words[i * WORDS + _VERSION] == version + 1]
        return max(found, key=lambda i: self._words[i * WORDS + _WRITING], default=None)

    def _rows(self, slot: int) -> list[tuple[int, int]] | None:
        """The lengths and digests of a slot's chunks; None if they are not what was written."""
        memory, length = self._slots[slot], self._words[slot * WORDS + _LENGTH]
        rows: list[tuple[int, int]] = []
        covered, at = 0, length
        while covered < length:
            if at + _ROW.size > len(memory):
                return None
            rows.append(_ROW.unpack_from(memory, at))
            covered, at = covered + rows[-1][0], at + _ROW.size
            if rows[-1][0] <= 0:
                return None
        whole = covered == length and _digest(memory[length:at]) == self._words[slot * WORDS + _DIGEST]
        return rows if whole else None

    def _whole(self, slot: int, rows: Sequence[tuple[int, int]]) -> bool:
        at = 0
        for nbytes, digest in rows:
            if _digest(self._slots[slot][at : at + nbytes]) != digest:
                return False
            at += nbytes
        return True


def _chunks(parts: Sequence[_Part]) -> Iterator[_Part]:
    """The same bytes in pieces: large parts are split, small ones joined."""
    small: list[_Part] = []
    held = 0
    for part in parts:
        if len(part) < _JOINED:
            small.append(part)
            held += len(part)
            if held >= _JOINED:
                yield b"".join(small)
                small, held = [], 0
            continue
        if held:
            yield b"".join(small)
            small, held = [], 0
        view = memoryview(part)
        for at in range(0, len(view), _CHUNK):
            yield view[at : at + _CHUNK]
    if held:
        yield b"".join(small)


def _digest(data: _Part) -> int:
    """xxh3-64 as a signed 64-bit word."""
    value = xxhash.xxh3_64_intdigest(data)
    return value - (1 << 64) if value >= 1 << 63 else value

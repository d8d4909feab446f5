"""Parts of tensors that lie in a DCP checkpoint: only the bytes that are needed are read, and each is checked.

DCP reads a stored tensor as a whole. Its file has the tensor as an archive of ``torch.save`` in which the bytes lie
uncompressed, row by row; where they begin, the archive's own directory says. Digests are of *blocks* of 1 MiB, so that
a reader of a part of a tensor can check it: what is read begins and ends with a block. Of smaller parts many lie in one
block, which is read once.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from flashrecovery.errors import DamagedCheckpointError
from flashrecovery.plan.reshard.boxes import Box, chunks
from flashrecovery.redundancy.checkpoint.dcp import CheckpointIndex
from flashrecovery.redundancy.checkpoint.manifest import UNREADABLE

BLOCK = 1 << 20
_BLOCKS_KEPT = 16
"""The number of tensors being read whose last block is kept, one each."""
_DIGEST_BYTES = 8
_RECORD = "/data/0"
_LOCAL_HEADER = 30
_BAD = (*UNREADABLE, zipfile.BadZipFile, struct.error)


def digests(tensor: torch.Tensor) -> bytes:
    """The digests of each block of a contiguous host tensor's bytes (xxh3-64), one after another."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return b"".join(xxhash.xxh3_64_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def runs(box: Box, outer: Box) -> Iterator[tuple[int, int]]:
    """Where ``box``, which lies in ``outer``, is in that one's elements, counted row by row: contiguous ranges, in
    order."""
    weight, weights = 1, []
    for length in reversed(outer.shape):
        weights.append(weight)
        weight *= length
    weights.reverse()
    start = 0
    for part in chunks(box, _contiguous(box, outer)):
        start = sum((lo - o) * w for lo, o, w in zip(part.low, outer.low, weights, strict=True))
        yield start, start + part.size


def _contiguous(box: Box, outer: Box) -> int:
    """How many elements of ``box`` lie next to each other in ``outer``."""
    size = 1
    for mine, theirs in zip(reversed(box.shape), reversed(outer.shape), strict=True):
        size *= mine
        if mine < theirs:
            break
    return max(size, 1)


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a tensor lie."""

    file: Path
    start: int
    nbytes: int


class _Window(io.RawIOBase):
    """A range of an open file, as a file that is only read."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        size = left if size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        found = self._file.read(size)
        self._at += len(found)
        return found


class StoredTensors:
    """The tensors of a checkpoint, to be read in part.

    Attributes:
        nbytes: of tensors that have been read so far.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._path = index.directory
        self.nbytes = 0
        self._places: dict[str, _Place] = {}
        self._blocks: OrderedDict[str, tuple[int, bytearray]] = OrderedDict()  # by tensor, the one that was read last
        stored = index.metadata.storage_data or {}
        self._stored = {place.fqn: info for place, info in stored.items()}

    def read(self, key: str, start: int, stop: int, total: int, known: bytes) -> bytearray:
        """Bytes ``start`` up to ``stop`` of a tensor of ``total`` bytes. ``known``: the digests of its blocks.

        Raises DamagedCheckpointError, which names the file, if they are not there or are not what was written.
        """
        if start >= stop:
            return bytearray()
        first, last = start // BLOCK, -(-stop // BLOCK)
        if last - first > 1:
            return self._read(key, start, stop, total, known)
        number, block = self._blocks.pop(key, (-1, bytearray()))
        if number != first:
            block = self._read(key, first * BLOCK, min(last * BLOCK, total), total, known)
        self._blocks[key] = first, block
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return block[start - first * BLOCK : stop - first * BLOCK]

    def _read(self, key: str, start: int, stop: int, total: int, known: bytes) -> bytearray:
        first, last = start // BLOCK, -(-stop // BLOCK)
        low, high = first * BLOCK, min(last * BLOCK, total)
        place: _Place | None = None
        try:
            place = self._place(key)
            if place.nbytes != total or len(known) != -(-total // BLOCK) * _DIGEST_BYTES:
                raise ValueError(f"{key!r} has {place.nbytes} bytes, and {total} are needed")
            with place.file.open("rb") as file:
                file.seek(place.start + low)
                data = bytearray(high - low)
                if file.readinto(data) != len(data):
                    raise EOFError("it ends too early")
        except _BAD as e:
            where = f"{key!r} in {place.file}" if place is not None else repr(key)
            raise DamagedCheckpointError(
                f"checkpoint {self._path} cannot be read: {where}: {type(e).__name__}: {e}"
            ) from e
        self.nbytes += len(data)
        whole = memoryview(data)
        for number in range(first, last):
            block = whole[number * BLOCK - low : (number + 1) * BLOCK - low]
            if xxhash.xxh3_64_digest(block) != known[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]:
                raise DamagedCheckpointError(
                    f"checkpoint {self._path}: {key!r} in {place.file} does not have the digests it was written with"
                )
        whole.release()
        return data[start - low : stop - low] if (start, stop) != (low, high) else data

    def _place(self, key: str) -> _Place:
        """Raises what reading files that are damaged or missing can raise."""
        if key not in self._places:
            info = self._stored[key]
            file = self._path / info.relative_path
            with file.open("rb") as opened:
                self._places[key] = _find(file, opened, info.offset, info.length)
        return self._places[key]


def _find(file: Path, opened: io.BufferedReader, offset: int, length: int) -> _Place:
    """The bytes of the one tensor in an archive of ``torch.save`` that lies in a file."""
    with zipfile.ZipFile(_Window(opened, offset, length)) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith(_RECORD)]
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed")
    opened.seek(offset + record.header_offset)
    name, extra = struct.unpack_from("<HH", opened.read(_LOCAL_HEADER), _LOCAL_HEADER - 4)
    return _Place(file, offset + record.header_offset + _LOCAL_HEADER + name + extra, record.file_size)

"""Token sequences in Megatron's ``.bin``/``.idx`` format (``MMIDIDX``, version 1), read through a memory map.

``PREFIX.bin`` is nothing but tokens, one after another. ``PREFIX.idx`` says where each is, little-endian::

    offset  type          content
    0       9 bytes       b"MMIDIDX\\0\\0"
    9       uint64        version, always 1
    17      uint8         dtype of the tokens, see ``DTYPE_CODES``
    18      uint64        S = number of sequences
    26      uint64        D = number of document bounds = documents + 1
    34      int32[S]      tokens in each sequence
    ..      int64[S]      byte offset of each sequence in the .bin file
    ..      int64[D]      sequence index where each document starts; last = S

Files written here are read by megatron-core's ``IndexedDataset`` and the other way round; Megatron itself is
not needed. The optional per-sequence modes of multimodal data sets are not supported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}


class DatasetFormatError(ValueError):
    """A file is not a readable data set; the message names the file and what is wrong with it."""


def bin_path(prefix: str | Path) -> Path:
    """The file that holds the tokens of the data set ``prefix``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file that holds the index of the data set ``prefix``."""
    return Path(f"{prefix}.idx")


def exists(prefix: str | Path) -> bool:
    """True if both files of the data set are there."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


class IndexedDataset:
    """Read access to one data set; the operating system pages tokens in as they are used.

    Attributes:
        dtype: numpy dtype of the tokens.
        sequence_lengths: int32[S], in tokens.
        sequence_pointers: int64[S], in bytes from the start of the ``.bin`` file.
        document_indices: int64[D], sequence index at which each document starts, plus S at the end.
        tokens: all tokens of the data set as one read-only array.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Raises FileNotFoundError if a file is missing, DatasetFormatError if its content is wrong."""
        self.prefix = str(prefix)
        self._open()

    def _open(self) -> None:
        index_file, token_file = idx_path(self.prefix), bin_path(self.prefix)
        if index_file.stat().st_size < HEADER.size:
            raise DatasetFormatError(f"{index_file}: shorter than the {HEADER.size} bytes of a header")
        index = np.memmap(index_file, mode="r", dtype=np.uint8)
        magic, version, code, sequences, bounds = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise DatasetFormatError(f"{index_file}: starts with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise DatasetFormatError(f"{index_file}: version {version}; only version {VERSION} is known")
        if code not in DTYPE_CODES:
            raise DatasetFormatError(f"{index_file}: dtype code {code}; known: {sorted(DTYPE_CODES)}")
        needed = HEADER.size + sequences * (4 + 8) + bounds * 8
        if index.size < needed:
            raise DatasetFormatError(f"{index_file}: {index.size} bytes, but its header speaks of {needed}")

        self.dtype = DTYPE_CODES[code]
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(index, np.int32, sequences, at)
        at += self.sequence_lengths.nbytes
        self.sequence_pointers = np.frombuffer(index, np.int64, sequences, at)
        at += self.sequence_pointers.nbytes
        self.document_indices = np.frombuffer(index, np.int64, bounds, at)

        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        actual = token_file.stat().st_size
        if actual != expected:
            raise DatasetFormatError(f"{token_file}: {actual} bytes, but the index speaks of {expected}")
        # An empty file cannot be mapped.
        self.tokens: Tokens = np.memmap(token_file, mode="r", dtype=self.dtype) if expected else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> Tokens:
        """The tokens of one sequence: a read-only view of shape (length,)."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        """``length`` tokens (default: all that follow) of one sequence, from token ``offset`` on.

        Raises IndexError if this reaches outside of the sequence or of the data set.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        available = int(self.sequence_lengths[index])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise IndexError(f"tokens {offset}..{offset + count} of sequence {index}, which has {available}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + count]

    # Data loader workers that are spawned get the prefix and map the files again; the content never travels.
    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix = state["prefix"]
        self._open()


class IndexedDatasetBuilder:
    """Writes a data set: tokens as they come, the index at the end by ``finalize``.

    Use as a context manager; leaving it without ``finalize`` only closes the token file.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike = np.int32) -> None:
        """Raises ValueError if the format has no code for ``dtype``."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        codes = {known: code for code, known in DTYPE_CODES.items()}
        if self.dtype not in codes:
            raise ValueError(f"dtype {self.dtype} has no code in this format; known: {sorted(map(str, codes))}")
        self._code = codes[self.dtype]
        self._lengths: list[int] = []
        self._bounds: list[int] = [0]
        self._tokens: BinaryIO = bin_path(prefix).open("wb")

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()

    def add_sequence(self, tokens: npt.ArrayLike) -> None:
        """Append one sequence to the current document."""
        flat = np.asarray(tokens, dtype=self.dtype).ravel()
        self._tokens.write(flat.tobytes())
        self._lengths.append(flat.size)

    def end_document(self) -> None:
        """The sequences since the last call are one document."""
        self._bounds.append(len(self._lengths))

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append a document that consists of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def finalize(self) -> None:
        """Close the token file and write the index."""
        self._tokens.close()
        lengths = np.asarray(self._lengths, dtype=np.int32)
        pointers = _pointers(self._lengths, self.dtype.itemsize)
        with idx_path(self.prefix).open("wb") as f:
            f.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._bounds)))
            for column in (lengths, pointers, np.asarray(self._bounds, dtype=np.int64)):
                f.write(column.tobytes())


def _pointers(lengths: Iterable[int], itemsize: int) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence: the sum of all lengths before it."""
    ends = np.cumsum(np.asarray(list(lengths), dtype=np.int64)) * itemsize
    return np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends

"""A job's state in the memory of its node, outside of its workers, to be read in any layout: what re-planning moves.

Each rank that is left writes the shards of one version that it was asked to (its own shards, and copies that it keeps
of others') into a file of a directory in ``/dev/shm``; then the workers end. Those of the new layout map these files
and copy the boxes that they need, each from one of the files that have it. No disk is used, and no network, but for
what ranks on other nodes have written: of that, the tensors that are needed are brought here first
(:class:`Elsewhere`). The file of a rank is its tensors one after another; its index says of each to which boxes of
which logical tensors it belongs (:mod:`flashrecovery.plan.reshard.logical`), and has its digest.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.reshard.boxes import Box, NoHolderError, Space
from flashrecovery.plan.reshard.layouts import Share
from flashrecovery.plan.reshard.logical import DATA, PARAM, Description, LogicalPart, fitted, spaces
from flashrecovery.plan.reshard.plan import plan_reshard
from flashrecovery.plan.reshard.schedule import timetable
from flashrecovery.state import codec
from flashrecovery.state.digest import byte_view
from flashrecovery.state.exact import exact_contiguous, exact_copy
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import decode_spec, encode_spec

log = logging.getLogger("flashrecovery")
_FORMAT = 1
_ALIGN = 64
LIMIT = 64 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class StoredTensor:
    """A shard's tensor in a rank's file.

    Attributes:
        dtype: as torch names it.
        start, nbytes: its bytes in the file.
        digest: of these (xxh3-128).
        parts: with the full names of their logical tensors.
    """

    shard: str
    key: str
    dtype: str
    start: int
    nbytes: int
    digest: bytes
    parts: tuple[LogicalPart, ...]


@dataclass(frozen=True)
class Index:
    """What one rank has written.

    Attributes:
        rank: of the old layout.
        version: of the state.
        tensors: in the file's order.
        specs: of the shards, encoded, by name.
        common: the state that all ranks have alike; empty where this one does not have it at the version.
    """

    rank: int
    version: int
    tensors: tuple[StoredTensor, ...]
    specs: Mapping[str, bytes]
    common: bytes

    def encode(self) -> bytes:
        tensors = [
            (t.shard, t.key, t.dtype, t.start, t.nbytes, t.digest, [p.plain() for p in t.parts]) for t in self.tensors
        ]
        content = codec.dumps((self.rank, self.version, tensors, dict(self.specs), self.common))
        return codec.dumps((_FORMAT, xxhash.xxh3_128_digest(content), content))

    @staticmethod
    def decode(data: bytes) -> Index:
        """Raises ProtocolError if it is damaged."""
        read = codec.loads(data)
        if not isinstance(read, tuple) or len(read) != 3 or read[0] != _FORMAT:
            raise ProtocolError("not the index of a rank's state")
        _, digest, content = read
        if xxhash.xxh3_128_digest(content) != digest:
            raise ProtocolError("the index does not have the digest it was written with")
        rank, version, tensors, specs, common = codec.loads(content)
        found = tuple(_stored(*some) for some in tensors)
        return Index(rank, version, found, specs, common)


def _stored(
    shard: str, key: str, dtype: str, start: int, nbytes: int, digest: bytes, parts: Sequence[Sequence[Any]]
) -> StoredTensor:
    return StoredTensor(shard, key, dtype, start, nbytes, digest, tuple(LogicalPart.of(part) for part in parts))


@dataclass(frozen=True)
class Written:
    """``nbytes``: of tensors. ``numbers``: digests of the logical tensors without dimensions, each of which many shards
    have. ``shards``: digests of these, by name."""

    nbytes: int
    numbers: Mapping[str, str]
    shards: Mapping[str, str]


def write(
    directory: Path, rank: int, version: int, sources: Iterable[ShardSource], described: Description, common: bytes
) -> Written:
    """Write these shards of ``version``.

    Raises:
        RestoreError: what a shard is of is not known; or shards have different numbers where there is one for all.
        OSError: there is no room.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors: list[StoredTensor] = []
    specs: dict[str, bytes] = {}
    numbers: dict[str, str] = {}
    at = 0
    with (directory / f"rank{rank}.data").open("wb") as file:
        for source in sources:
            parts = described.get(source.name)
            if parts is None:
                raise RestoreError(
                    f"shard {source.name!r}: which part of the model it is in another layout is not known"
                )
            plain = source.spec.values.get("plain")
            if plain:
                raise RestoreError(f"shard {source.name!r} has optimizer state {sorted(plain)}: tensors are allowed")
            specs[source.name] = encode_spec(source.spec)
            shapes = {key: spec.shape for key, spec in source.spec.tensors.items()}
            like = shapes.get(PARAM, ())
            for key, tensor in zip(source.spec.tensors, source.tensors, strict=True):
                data = _bytes_of(tensor)
                at += file.write(bytes(-at % _ALIGN))
                file.write(data)
                named = tuple(parts.of(key, shapes[key], like))
                digest = xxhash.xxh3_128_digest(data)
                for part in named if key not in (PARAM, DATA) and shapes[key] != like else ():
                    if numbers.setdefault(part.name, digest.hex()) != digest.hex():
                        raise RestoreError(
                            f"shard {source.name!r} has another {key!r} than others, and in another layout there is "
                            "one for all parameters"
                        )
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors.append(StoredTensor(source.name, key, dtype, at, len(data), digest, named))
                at += len(data)
        file.flush()
    index = Index(rank, version, tuple(tensors), specs, common)
    partial = directory / f".rank{rank}.index"
    partial.write_bytes(index.encode())
    os.replace(partial, directory / f"rank{rank}.index")  # last: a reader finds whole files only
    of_shards: dict[str, xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)
    for stored in sorted(tensors, key=lambda stored: (stored.shard, stored.key)):
        of_shards[stored.shard].update(stored.key.encode() + b"\0" + stored.digest)
    shards = {name: found.hexdigest() for name, found in of_shards.items()}
    return Written(sum(stored.nbytes for stored in tensors), numbers, shards)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return byte_view(exact_contiguous(tensor).cpu()).numpy().data


@dataclass(frozen=True)
class Wanted:
    """What is to be filled: ``tensor`` (live, contiguous, on whatever device) consists of these parts."""

    tensor: torch.Tensor
    parts: tuple[LogicalPart, ...]


class Elsewhere(Protocol):
    """What ranks have written on other nodes. A protocol, as the worker above brings it
    (:mod:`flashrecovery.worker.reshard.remote_staging`)."""

    @property
    def ranks(self) -> Collection[int]:
        """These ranks."""

    @property
    def directory(self) -> Path:
        """Where parts of it are once they have been brought here, in files of the same names, at the same places."""

    def bring(self, wanted: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Have these (start, bytes) of tensors' files here, by rank; of a rank without any, the index. Raises
        RestoreError."""


@dataclass(frozen=True)
class _Piece:
    """``box`` of a logical tensor, of which ``rank`` has written the part ``held``, goes to ``target``, which is the
    part ``part`` of what is wanted."""

    target: torch.Tensor
    part: LogicalPart
    box: Box
    rank: int
    stored: StoredTensor
    held: LogicalPart

    @property
    def nbytes(self) -> int:
        return self.box.size * _itemsize(self.stored)


class StagedFiles:
    """What ranks of an old layout have written, to be read."""

    def __init__(self, directory: Path, ranks: Sequence[int], version: int, elsewhere: Elsewhere | None = None) -> None:
        """``ranks``: that have written; several may have written the same, and where one's index is missing, damaged or
        of another version, the others' stand in for it. Raises RestoreError if no index can be read; what is in none of
        them is missing when it is asked for."""
        self._directory = directory
        self._elsewhere = elsewhere
        if elsewhere is not None and elsewhere.ranks:
            elsewhere.bring(dict.fromkeys(elsewhere.ranks, ()))
        self.indexes: dict[int, Index] = {}
        self._unread: list[str] = []  # why indexes cannot be read
        for rank in ranks:
            try:
                self.indexes[rank] = self._index(rank, version)
            except RestoreError as e:
                self._unread.append(str(e))
                log.warning("%s; what other ranks have written is read instead", e)
        if not self.indexes:
            raise RestoreError("; ".join(self._unread) or f"{directory}: no rank has written anything")
        self._mapped: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._checked: dict[tuple[int, int], torch.Tensor] = {}
        self._of: dict[str, list[tuple[int, StoredTensor, LogicalPart]]] = defaultdict(list)
        self._copies: dict[tuple[str, str], list[tuple[int, StoredTensor]]] = defaultdict(list)
        taken: dict[str, int] = {}  # from which rank each shard is read, of several that have written it
        for rank in sorted(self.indexes, key=lambda rank: (self._is_elsewhere(rank), rank)):
            for tensor in self.indexes[rank].tensors:
                self._copies[tensor.shard, tensor.key].append((rank, tensor))
                if taken.setdefault(tensor.shard, rank) == rank:
                    for part in tensor.parts:
                        self._of[part.name].append((rank, tensor, part))

    def _index(self, rank: int, version: int) -> Index:
        """Raises RestoreError."""
        path = self._file(rank, "index")
        try:
            index = Index.decode(path.read_bytes())
        except (OSError, ProtocolError, ValueError) as e:
            raise RestoreError(f"{path} cannot be read: {type(e).__name__}: {e}") from e
        if (index.rank, index.version) != (rank, version):
            raise RestoreError(f"{path} is of rank {index.rank} and version {index.version}, not of {version}")
        return index

    @property
    def _lacking(self) -> str:
        """What a message of something missing ends with."""
        return "".join(f"; {why}" for why in self._unread)

    def _is_elsewhere(self, rank: int) -> bool:
        return self._elsewhere is not None and rank in self._elsewhere.ranks

    def _file(self, rank: int, kind: str) -> Path:
        found = self._elsewhere.directory if self._elsewhere is not None and self._is_elsewhere(rank) else None
        return (found or self._directory) / f"rank{rank}.{kind}"

    @property
    def common(self) -> bytes:
        """The state that is equal on all ranks. Raises RestoreError if no rank has written it."""
        found = next((index.common for index in self.indexes.values() if index.common), b"")
        if not found:
            raise RestoreError(f"{self._directory}: no rank has written the state that is no tensor{self._lacking}")
        return found

    def names(self) -> frozenset[str]:
        """The names of all logical tensors that are there."""
        return frozenset(self._of)

    def specs(self) -> Iterator[tuple[str, bytes]]:
        """(name, encoded spec) of all shards."""
        for index in self.indexes.values():
            yield from index.specs.items()

    def fill(self, wanted: Sequence[Wanted], limit: int = LIMIT) -> int:
        """Read what is wanted, at most ``limit`` bytes at a time. Returns how many bytes have been copied.

        Raises RestoreError if something is not there, is damaged, or is of another kind.
        """
        into: dict[str, list[tuple[LogicalPart, torch.Tensor]]] = defaultdict(list)
        for one in wanted:
            if any(part.padded for part in one.parts):
                one.tensor.zero_()
            for part in one.parts:
                there = self._of.get(part.name)
                if there is None:
                    raise RestoreError(f"no rank has written logical tensor {part.name!r}{self._lacking}")
                mine = fitted(part, there[0][2].whole)
                if mine is not None:
                    self._check_kind(mine.name, there[0][1].dtype, one.tensor)
                    into[part.name].append((part, one.tensor))
        pieces = [
            piece
            for name, places in into.items()
            for part, tensor in places
            for piece in self._cut(name, part, tensor, limit)
        ]
        self._bring(pieces)
        for piece in pieces:
            flat = self._tensor(piece.rank, piece.stored)[piece.held.begin : piece.held.begin + piece.held.box.size]
            source = flat.view(piece.held.box.shape)[piece.box.within(piece.held.box)]
            exact_copy(piece.target[piece.box.within(piece.part.box)], source)
        return sum(piece.nbytes for piece in pieces)

    def _bring(self, pieces: Sequence[_Piece]) -> None:
        """Have the tensors here that ranks have written elsewhere; as a whole, because that is what digests are of."""
        if self._elsewhere is None:
            return
        wanted = {(piece.rank, piece.stored.start, piece.stored.nbytes) for piece in pieces}
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for rank, start, nbytes in sorted(wanted):
            if self._is_elsewhere(rank) and nbytes:
                by_rank.setdefault(rank, []).append((start, nbytes))
        if by_rank:
            self._elsewhere.bring(by_rank)

    @staticmethod
    def _check_kind(name: str, dtype: str, tensor: torch.Tensor) -> None:
        if str(tensor.dtype).removeprefix("torch.") != dtype:
            raise RestoreError(f"logical tensor {name!r} is {dtype} in the state, and {tensor.dtype} here")

    def _cut(self, name: str, part: LogicalPart, tensor: torch.Tensor, limit: int) -> Iterator[_Piece]:
        """What ``part`` of ``tensor`` is put together from."""
        there = self._of[name]
        (space,) = spaces({name: [(p, _itemsize(t)) for _, t, p in there]})
        if not space.shape and len({stored.digest for _, stored, _ in there}) > 1:
            raise RestoreError(f"{name!r} differs between parameters, and another layout has one for all of them")
        needed = fitted(part, space.shape)
        if needed is None:
            raise RestoreError(f"logical tensor {name!r} of shape {space.shape} has nothing of {part.box}")
        target = tensor.detach().reshape(-1)[part.begin : part.begin + part.box.size].view(part.box.shape)
        if target.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            raise RestoreError(f"logical tensor {name!r}: the tensor to be filled is not contiguous")
        for box, number in _pieces(space, [p.box for _, _, p in there], needed.box, limit):
            yield _Piece(target, part, box, *there[number])

    def _tensor(self, rank: int, stored: StoredTensor) -> torch.Tensor:
        """All of a stored tensor, flat. Its digest is checked on first use; if it is wrong, another rank may have
        written the same tensor."""
        key = rank, stored.start
        if key not in self._checked:
            self._checked[key] = self._whole(rank, stored)
        return self._checked[key]

    def _whole(self, rank: int, stored: StoredTensor) -> torch.Tensor:
        found = self._as_written(rank, stored)
        if found is not None:
            return found
        text = f"{stored.key!r} of shard {stored.shard!r}, which rank {rank} has written, does not have the digest it "
        like = stored.digest, stored.nbytes, stored.dtype
        for other, same in self._copies[stored.shard, stored.key]:
            if other == rank or (same.digest, same.nbytes, same.dtype) != like:
                continue
            if self._elsewhere is not None and self._is_elsewhere(other):
                self._elsewhere.bring({other: [(same.start, same.nbytes)]})
            found = self._as_written(other, same)
            if found is not None:
                log.warning("%swas written with; what rank %d has written is read instead", text, other)
                return found
        raise RestoreError(f"{text}was written with")

    def _as_written(self, rank: int, stored: StoredTensor) -> torch.Tensor | None:
        """None: it has another digest."""
        if rank not in self._mapped or len(self._mapped[rank]) < stored.start + stored.nbytes:  # more has come
            path = self._file(rank, "data")
            try:
                self._mapped[rank] = np.memmap(path, np.uint8, "c")  # private: nothing that is done to it is seen
            except (OSError, ValueError) as e:
                raise RestoreError(f"{path} cannot be read: {type(e).__name__}: {e}") from e
        data = self._mapped[rank][stored.start : stored.start + stored.nbytes]
        if len(data) != stored.nbytes or xxhash.xxh3_128_digest(data.data) != stored.digest:
            return None
        return torch.from_numpy(np.asarray(data)).view(getattr(torch, stored.dtype))


def _pieces(space: Space, held: Sequence[Box], needed: Box, limit: int) -> Iterator[tuple[Box, int]]:
    """(box, number of the part that has it whole): what ``needed`` is put together from. Raises RestoreError."""
    if not space.shape:
        yield needed, 0
        return
    # Each part is a separate place, so that data that is read at once is in one tensor.
    old = tuple(Share(box, (number,)) for number, box in enumerate(held))
    try:
        plan = plan_reshard([space], {space.name: old}, {space.name: (Share(needed, (0,)),)}, becomes={})
    except NoHolderError as e:
        raise RestoreError(str(e)) from e
    for _, portion in timetable(plan, max(limit, space.itemsize)).messages(dest=0):
        yield portion.box, portion.source


def _itemsize(stored: StoredTensor) -> int:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype.itemsize


def forms(staging: StagedFiles) -> Mapping[str, tuple[str, str, bool]]:
    """The form of each kind of optimizer state (by the key of a shard's tensor): its dtype, its layout as
    :class:`~flashrecovery.adapter.ParamShard` says it, and whether it is one number.

    Raises RestoreError where shards differ in that, or have state that is no tensor and not alike.
    """
    found: dict[str, tuple[str, str, bool]] = {}
    for name, encoded in staging.specs():
        spec = decode_spec(encoded)
        like = spec.tensors[PARAM].shape if PARAM in spec.tensors else ()
        for key, tensor in spec.tensors.items():
            if key in (PARAM, DATA):
                continue
            form = (
                str(tensor.dtype).removeprefix("torch."),
                str(spec.values.get("layout", {}).get(key, "")),
                tensor.shape != like,
            )
            if found.setdefault(key, form) != form:
                raise RestoreError(f"optimizer state {key!r} of {name!r} is {form}, and {found[key]} elsewhere")
    return found

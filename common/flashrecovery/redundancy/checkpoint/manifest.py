"""What a rank says of its part of a checkpoint: its manifest, which the checkpoint holds as a tensor of bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from flashrecovery.errors import DamagedCheckpointError, ProtocolError, RestoreError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.placements import Rows, Whole
from flashrecovery.plan.reshard.rules import TensorRule, from_plain, to_plain
from flashrecovery.redundancy.checkpoint.dcp import CheckpointIndex, read_whole, unreadable
from flashrecovery.state import codec

FORMAT = 6
_REPLICAS = 7
"""With the replicas, where these have several ranks."""
_SHARED = 8
"""And with which of their ranks divide their state together, where that is not each place by itself."""
_ROWS = 5
"""With rules of rows alone."""
_BEFORE = 4
"""Without rules, and without digests of blocks and of the manifest itself."""
_INDEX, INDEX_DIGEST = ".metadata", "metadata.xxh3"
UNREADABLE = (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError)
"""What reading files that are damaged or missing can raise."""


@dataclass(frozen=True)
class ShardEntry:
    """A shard that a rank has written.

    Attributes:
        shared: other ranks hold it, too.
        spec: encoded.
        digest: of all of it.
        blocks: of shards that can be read in part, the digests of each tensor's blocks (:mod:`.blocks`), by key.
    """

    shared: bool
    spec: bytes
    digest: str
    blocks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What one rank has written.

    Attributes:
        version: of the state.
        ranks: how many have written the checkpoint.
        entries: the rank's shards, by name.
        local_state: the rank's own state; None in a checkpoint that has been converted from another number of ranks.
        common: the state that is the same on all ranks.
        form, layout: name of the framework's own format, and the layout in it; "" for the core's.
        rules: how the tensors that are sharded among the ranks are sharded in any number of them, and all else is the
            same on all ranks; None: that is not known, and only as many ranks can read it. Where replicas have several
            ranks: how what this rank's model rank has is sharded among the replicas, and all else is the same there.
        said: which ranks made up the replicas; None: each was one.
        model_ranks: of this rank and of those among which its state is sharded; none: its own alone.
    """

    version: int
    ranks: int
    entries: Mapping[str, ShardEntry]
    local_state: bytes | None
    common: bytes
    form: str = ""
    layout: str = ""
    rules: tuple[TensorRule, ...] | None = None
    said: ReplicaShape | None = None
    model_ranks: tuple[int, ...] = ()

    def sharing(self, model_rank: int) -> Sharing:
        """Among which ranks the state is sharded of the one that has written this, which has this model rank."""
        return Sharing(self.shape, self.model_ranks or (model_rank,))

    @property
    def shape(self) -> ReplicaShape:
        """Which of the ranks that have written it made up replicas."""
        return self.said or ReplicaShape(self.ranks)

    def encode(self) -> bytes:
        entries = {n: (e.shared, e.spec, e.digest, dict(e.blocks)) for n, e in self.entries.items()}
        rules = None if self.rules is None else to_plain(self.rules)
        fields = (self.version, self.ranks, entries, self.local_state, self.common, self.form, self.layout, rules)
        shape = self.shape
        more: tuple[Any, ...] = ()
        if shape.each > 1:
            more = ((shape.replicas, shape.inner, shape.outer), *([self.model_ranks] if self.model_ranks else []))
        number = (FORMAT, _REPLICAS, _SHARED)[len(more)]
        content = codec.dumps((*fields, *more))
        return codec.dumps((number, xxhash.xxh3_128_digest(content), content))

    @staticmethod
    def decode(data: bytes, path: Path) -> Manifest:
        """Raises ProtocolError if it is damaged, RestoreError if it is of another version of this program."""
        read = codec.loads(data)
        if not isinstance(read, tuple):
            raise ProtocolError("not a manifest")
        number, *fields = read
        if number in (_SHARED, _REPLICAS, FORMAT, _ROWS):
            digest, content = fields
            if xxhash.xxh3_128_digest(content) != digest:
                raise ProtocolError("the manifest does not have the digest it was written with")
            fields = codec.loads(content)
        elif number != _BEFORE:
            raise RestoreError(f"checkpoint {path} has format {number}, this version reads {_BEFORE} to {_SHARED}")
        version, ranks, entries, local_state, common, form, layout, *more = fields
        rules = more[0] if more else None
        return Manifest(
            version,
            ranks,
            {name: ShardEntry(*entry) for name, entry in entries.items()},
            local_state,
            common,
            form,
            layout,
            None if rules is None else from_plain(*rules) if number >= FORMAT else _rows(rules),
            ReplicaShape(*more[1]) if number in (_REPLICAS, _SHARED) else None,
            tuple(more[2]) if number == _SHARED else (),
        )


def _rows(rules: Sequence[Any]) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(name, shape, itemsize, Rows() if rows else Whole(), shard, key)
        for name, shape, itemsize, rows, shard, key in rules
    )


def index_digest(path: Path) -> bytes:
    """The digest of DCP's index of a checkpoint. Raises OSError."""
    return xxhash.xxh3_128_hexdigest((path / _INDEX).read_bytes()).encode()


def _check_index(path: Path) -> None:
    """Before it is read: it is a pickle, and a bit that has changed can make that take all memory. Raises OSError, and
    ValueError if it is not what was written. Checkpoints of earlier versions have no digest of it."""
    try:
        known = (path / INDEX_DIGEST).read_bytes()
    except FileNotFoundError:
        return
    if index_digest(path) != known:
        raise ValueError(f"{path / _INDEX} does not have the digest it was written with")


def manifest_key(rank: int) -> str:
    return f"manifest/{rank}"


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk. Its index is read and compared with its digest once, and each manifest once, when it is
    first asked for.

    Attributes:
        index: DCP's.
    """

    path: Path
    index: CheckpointIndex
    _read: dict[int, Manifest] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def open(path: Path) -> StoredCheckpoint:
        """Raises DamagedCheckpointError if the index cannot be read, or is not what was written."""
        try:
            _check_index(path)
            return StoredCheckpoint(path, CheckpointIndex.read(path))
        except UNREADABLE as e:
            raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {type(e).__name__}: {e}") from e

    def manifests(self, ranks: Iterable[int]) -> dict[int, Manifest]:
        """What these ranks have said of what they wrote. Raises DamagedCheckpointError if it cannot be read."""
        wanted = list(ranks)
        keys = {rank: manifest_key(rank) for rank in wanted if rank not in self._read}
        try:
            raw = read_whole([*keys.values()], self.index)
            for rank, key in keys.items():
                self._read[rank] = Manifest.decode(raw[key].numpy().tobytes(), self.path)
        except (*UNREADABLE, ProtocolError) as e:
            where = unreadable([*keys.values()], self.path, UNREADABLE)
            raise DamagedCheckpointError(
                f"checkpoint {self.path} cannot be read: {where}{type(e).__name__}: {e}"
            ) from e
        return {rank: self._read[rank] for rank in wanted}

    @property
    def first(self) -> Manifest:
        """The manifest of rank 0. Raises DamagedCheckpointError."""
        return self.manifests([0])[0]

    @property
    def own_shards(self) -> list[str]:
        """Which shards had turned out to be each rank's own, by the names that they had had before. Raises
        DamagedCheckpointError."""
        found: list[str] = codec.loads(self.first.common)["habits"].get("own_shards", [])
        return found


def manifests_of(path: Path, ranks: Iterable[int]) -> dict[int, Manifest]:
    """What these ranks have said of what they wrote. Raises DamagedCheckpointError if it cannot be read."""
    return StoredCheckpoint.open(path).manifests(ranks)

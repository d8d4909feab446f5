"""A checkpoint of one number of ranks becomes one of another number, without a job and without its model.

Rank by rank of the new size: its part is read as that rank itself would read it, checked, and written as it would write
it. So the most that is in memory is what one rank has, twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from flashrecovery.errors import ConfigError, RestoreError
from flashrecovery.plan.reshard.rules import shards_at
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.checkpoint.manifest import Manifest, StoredCheckpoint
from flashrecovery.redundancy.checkpoint.published import newest
from flashrecovery.redundancy.checkpoint.reader import load
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec

_ALL = 1 << 30
_CLOSE_S = 10.0


class LooseShard(Shard):
    """A shard that no framework has: whatever it is said to consist of, it makes."""

    def __init__(self, name: str, holders: tuple[int, ...]) -> None:
        self.name, self.holders = name, holders
        self._spec = ShardSpec({})
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def spec(self) -> ShardSpec:
        return self._spec

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        self._spec = spec
        self._tensors = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in spec.tensors.items()}
        return self.tensors()


def found_in(path: Path) -> Path:
    """A checkpoint's directory: this one, or the newest in it. Raises ConfigError if there is none."""
    if (path / ".metadata").exists():
        return path
    last = newest(path)
    if last is None:
        raise ConfigError(f"{path}: neither a checkpoint, nor a directory of checkpoints")
    return last[1]


def convert(source: Path, directory: Path, ranks: int) -> Path:
    """Write the checkpoint ``source`` into ``directory`` as one of ``ranks`` ranks. Returns its path.

    Raises:
        ConfigError: it has this number of ranks, or the directory is not empty.
        RestoreError: it is damaged, or how it is sharded in another size is not known, or its replicas have several
            ranks.
    """
    checkpoint = StoredCheckpoint.open(source)
    first = checkpoint.first
    manifests = checkpoint.manifests(range(first.ranks))
    if first.form or first.rules is None:
        why = f"it has the format {first.form!r}" if first.form else "no elastic job has written it"
        raise RestoreError(
            f"checkpoint {source} cannot be converted: {why}, so that it is not known how its state, and each rank's "
            "own random numbers and data position, are sharded in another size; those of elastic jobs can"
        )
    if first.shape.each > 1:
        raise RestoreError(
            f"checkpoint {source} cannot be converted: it is of {first.shape.text}; an elastic job with another number "
            "of such replicas reads it itself"
        )
    if ranks == first.ranks:
        raise ConfigError(f"checkpoint {source} is one of {ranks} ranks: another number is allowed")
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: a new directory is allowed")
    for rank in range(ranks):
        shards = list(_shards(first, manifests, rank, ranks))
        plain = load(checkpoint, shards, rank=rank, world=ranks, elastic=True)
        writing = CheckpointFallback(directory, rank=rank, world=ranks, keep=_ALL)
        writing.commit(
            first.version, shards, local_state=plain.local_state, common=plain.common, generation=0, rules=first.rules
        )
        writing.wait()
        writing.close(_CLOSE_S)
    published = newest(directory)
    if published is None:
        raise RestoreError(
            f"{directory}: no checkpoint is complete after all {ranks} parts were written; another process must have "
            "removed some of them"
        )
    return published[1]


def _shards(first: Manifest, manifests: dict[int, Manifest], rank: int, ranks: int) -> Iterator[LooseShard]:
    """What a rank of the new size writes: its parts of what is sharded, and its share of what all have."""
    rules = first.rules or ()
    everybody = tuple(range(ranks))
    for name, shared in shards_at(rules, rank, ranks).items():
        yield LooseShard(name, everybody if shared else (rank,))
    known = {name for place in range(first.ranks) for name in shards_at(rules, place, first.ranks)}
    for manifest in manifests.values():
        for name in manifest.entries.keys() - known:
            shard = LooseShard(name, everybody)
            if writer_of(shard) == rank:
                yield shard

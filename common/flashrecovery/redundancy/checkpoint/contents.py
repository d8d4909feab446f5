"""What a checkpoint holds, from its manifests: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.rules import shards_at
from flashrecovery.redundancy.checkpoint.manifest import Manifest, StoredCheckpoint
from flashrecovery.state.spec import decode_spec


@dataclass(frozen=True)
class TensorFacts:
    """One tensor.

    Attributes:
        name: of it; of one that is not known to be sharded, its shard's and its own.
        shape: without any sharding.
        dtype: as torch names it.
        boxes: by rank, what that rank has written of it; none of them is empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: Mapping[int, Sequence[Box]]


@dataclass(frozen=True)
class Contents:
    """A checkpoint.

    Attributes:
        path: its directory.
        version: of the state.
        ranks: how many have written it.
        form: the framework's own format; "" for the core's.
        any_size: whether another number of ranks can read it.
        own_state: whether each rank's random numbers and data position are there; not after a conversion.
        tensors: in order.
    """

    path: Path
    version: int
    ranks: int
    form: str
    any_size: bool
    own_state: bool
    tensors: tuple[TensorFacts, ...]


def contents(path: Path) -> Contents:
    """Raises RestoreError if the checkpoint cannot be read."""
    checkpoint = StoredCheckpoint.open(path)
    ranks = checkpoint.first.ranks
    manifests = checkpoint.manifests(range(ranks))
    first = manifests[0]
    return Contents(
        path,
        first.version,
        ranks,
        first.form,
        first.rules is not None,
        all(manifest.local_state is not None for manifest in manifests.values()),
        (*_sharded(manifests), *_others(manifests)),
    )


def _sharded(manifests: Mapping[int, Manifest]) -> Iterator[TensorFacts]:
    shape = manifests[0].shape
    for sharing in dict.fromkeys(manifests[rank].sharing(shape.model_rank(rank)) for rank in range(shape.world)):
        for rule in manifests[sharing.ranks[0]].rules or ():
            boxes: dict[int, Sequence[Box]] = {}
            dtype = ""
            for place, rank in enumerate(sharing.ranks):
                entry = manifests[rank].entries.get(rule.shard_at(place, sharing.size))
                if entry is not None:
                    dtype = str(decode_spec(entry.spec).tensors[rule.key].dtype)[6:]
                    some = [part.box for part in rule.parts(place, sharing.size)]
                    boxes |= {rank: some} if some else {}
            yield TensorFacts(f"{rule.name}#{rule.suffix}" if rule.suffix else rule.name, rule.shape, dtype, boxes)


def _others(manifests: Mapping[int, Manifest]) -> Iterator[TensorFacts]:
    known: set[str] = set()
    for rank, manifest in manifests.items():
        sharing = manifest.sharing(manifest.shape.model_rank(rank))
        known.update(shards_at(manifest.rules or (), sharing.place(rank), sharing.size))
    for rank, manifest in manifests.items():
        for name, entry in manifest.entries.items():
            if name not in known:
                for key, tensor in decode_spec(entry.spec).tensors.items():
                    boxes = {rank: [Box.whole(tensor.shape)]}
                    yield TensorFacts(f"{name}/{key}", tensor.shape, str(tensor.dtype)[6:], boxes)

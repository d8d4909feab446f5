"""What a checkpoint holds, from its manifests: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.plan.boxes import Box
from flashrecovery.redundancy.manifest import Manifest, manifests_of
from flashrecovery.state.spec import decode_spec


@dataclass(frozen=True)
class TensorFacts:
    """One tensor.

    Attributes:
        name: of it; of one that is not known to be divided, its shard's and its own.
        shape: without any division.
        dtype: as torch names it.
        boxes: by rank, what that rank has written of it; empty boxes are left out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: Mapping[int, Box]


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
    ranks = manifests_of(path, [0])[0].ranks
    manifests = manifests_of(path, range(ranks))
    first = manifests[0]
    return Contents(
        path,
        first.version,
        ranks,
        first.form,
        first.rules is not None,
        all(manifest.capsule is not None for manifest in manifests.values()),
        (*_divided(first), *_others(manifests)),
    )


def _divided(first: Manifest) -> Iterator[TensorFacts]:
    for rule in first.rules or ():
        spec = decode_spec(first.entries[rule.shard_at(0, first.ranks)].spec)
        boxes = {place: rule.box(place, first.ranks) for place in range(first.ranks)}
        some = {place: box for place, box in boxes.items() if box.size}
        yield TensorFacts(rule.name, rule.shape, str(spec.tensors[rule.key].dtype)[6:], some)


def _others(manifests: Mapping[int, Manifest]) -> Iterator[TensorFacts]:
    first = manifests[0]
    known = {rule.shard_at(place, first.ranks) for rule in first.rules or () for place in range(first.ranks)}
    for rank, manifest in manifests.items():
        for name, entry in manifest.entries.items():
            if name not in known:
                for key, tensor in decode_spec(entry.spec).tensors.items():
                    boxes = {rank: Box.whole(tensor.shape)}
                    yield TensorFacts(f"{name}/{key}", tensor.shape, str(tensor.dtype)[6:], boxes)

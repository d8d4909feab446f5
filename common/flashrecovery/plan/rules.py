"""How a tensor is divided among ranks, as a rule that holds for any number of them. Pure.

A rule needs no model and no framework, so it can be written into a checkpoint: who reads that one later, in whatever
size, knows from the rules which box of which tensor is in which rank's files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flashrecovery.plan.boxes import Box, Space
from flashrecovery.plan.layouts import Placement, chunked, replicated, sharded


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor.

    Attributes:
        name: the same in all sizes.
        shape: without any division.
        itemsize: bytes of an element.
        rows: its rows are divided as ``torch.chunk`` does it; False: every place has the whole of it.
        shard: what the names of the shards begin with in which the places have their parts; a place and the size
            follow, as ``1/4``.
        key: of the part among the tensors of these shards.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    rows: bool
    shard: str
    key: str

    @property
    def space(self) -> Space:
        return Space(self.name, self.shape, self.itemsize)

    def shard_at(self, place: int, size: int) -> str:
        return f"{self.shard}{place}/{size}"

    def box(self, place: int, size: int) -> Box:
        """What a place has of it; it may be empty."""
        whole = Box.whole(self.shape)
        return whole.narrowed(0, *chunked(self.shape[0], size)[place]) if self.rows else whole

    def placement(self, size: int) -> Placement:
        """On the places of a job of this size. Tensors that lie alike have one object."""
        return _placement(self.shape, self.rows, size)


@lru_cache(maxsize=4096)
def _placement(shape: tuple[int, ...], rows: bool, size: int) -> Placement:
    if rows:
        return sharded(shape, 0, chunked(shape[0], size), [(place,) for place in range(size)])
    return replicated(shape, range(size))


def by_shard(rules: Iterable[TensorRule]) -> Mapping[str, Sequence[TensorRule]]:
    """The tensors of each shard, by what its names begin with, in their order."""
    found: dict[str, list[TensorRule]] = defaultdict(list)
    for rule in rules:
        found[rule.shard].append(rule)
    return found

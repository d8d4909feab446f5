"""A shard: one named piece of a rank's state, and one to send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery.state.spec import ShardSpec, TensorSpec


@dataclass(frozen=True)
class Structure:
    """What a look at a shard has gone through. While these are the same objects in the same memory, it would find the
    same again.

    Attributes:
        attributes: (owner, name, what it is).
        states: dictionaries of dictionaries (``optimizer.state``), with the same entries in the same order.
        tensors: (tensor, None), and of a DTensor (DTensor, its local tensor).
    """

    attributes: Sequence[tuple[object, str, object]] = ()
    states: Sequence[dict[Any, Any]] = ()
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()


class Shard(ABC):
    """One named piece of this rank's state, living in tensors that the framework owns.

    Equal names on two ranks mean equal bits at equal versions.

    Attributes:
        name: unique within the rank; contains the coordinate when the piece is unique (``...#fsdp=1/4``).
        holders: all global ranks, this one included and ascending, that hold an equal piece.
    """

    name: str
    holders: tuple[int, ...]

    def rename(self, name: str) -> None:
        """It is another piece of the whole, or is told apart from others by a longer name."""
        self.name = name

    def hold_by(self, holders: tuple[int, ...]) -> None:
        """These ranks hold an equal piece now."""
        self.holders = holders

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by key, plain local tensors (no DTensor), in a fixed order; never a copy."""

    def watched(self) -> list[torch.Tensor]:
        """Tensors of which one's version counter moves when the script changes the shard. The same objects each
        time, as long as neither they nor their memory are exchanged."""
        return list(self.tensors().values())

    def values(self) -> dict[str, Any]:
        """Small plain values by key that belong to this shard (not to the rank-local state)."""
        return {}

    def tensors_and_values(self) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
        """:meth:`tensors` and :meth:`values`, in one look at the live state."""
        return self.tensors(), self.values()

    def structure(self) -> Structure | None:
        """What :meth:`tensors_and_values` has just gone through; None: it has to be asked in each step."""
        return None

    @abstractmethod
    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Give the live state the structure of ``spec`` (create missing tensors, drop surplus ones, set the
        values) and return the live tensors, whose content the caller overwrites."""

    def spec(self) -> ShardSpec:
        tensors, values = self.tensors_and_values()
        return ShardSpec({k: TensorSpec(tuple(t.shape), t.dtype) for k, t in tensors.items()}, values)


@dataclass(frozen=True)
class ShardSource:
    """A shard's content to send: the live shard, an undo copy or a neighbour's copy.

    ``tensors`` are in the order of ``spec.tensors`` and are not changed until the exchange is over.
    """

    name: str
    spec: ShardSpec
    tensors: Sequence[torch.Tensor]

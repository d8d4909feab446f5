"""How an adapter's state is sharded among the ranks of a job, so that it can be sharded among others.

State that no single rank has as a whole consists of *sharded tensors*: what a tensor is without any sharding, and which
boxes of it each place (0 .. size - 1, a rank's number in the process groups) holds, for any size. From that the core
plans which rank sends what to which (:mod:`flashrecovery.plan.reshard.plan`), and carries it out. An adapter only says
where its tensors lie and puts new ones in the place of the old ones; it does not communicate.

The order of things, on each rank: :meth:`ShardLayout.describe` (where there is state to describe),
:meth:`ShardLayout.prepare`, the core fills the tensors that were prepared, and later, once all ranks have theirs,
:meth:`Prepared.install`. Until then nothing of the old state may be touched: if a rank dies in between, training goes
on from the old state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.layouts import Placement
from flashrecovery.plan.reshard.rules import TensorRule


@dataclass(frozen=True)
class ShardedTensor:
    """One tensor of a sharding, in one size.

    Attributes:
        name: the same in all sizes.
        shape, dtype: without any sharding.
        placement: which boxes are at which places. Replicas are several places in one share; padding is in none.
        shards: by place, the name of the shard in which that place has its part; "" where it has none. A shard's name
            must say which sharding it is of, as ``...#shard=1/4``.
        key: of the part among the tensors of these shards.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    shards: Sequence[str]
    key: str

    def boxes(self, place: int) -> list[Box]:
        """What this place holds, in the order of the placement."""
        return [share.box for share in self.placement if place in share.ranks]


@dataclass(frozen=True)
class LocalBox:
    """A box of a tensor, and where it lies: ``data`` has the box's shape, and shares its memory."""

    box: Box
    data: torch.Tensor


@dataclass(frozen=True)
class ShardPlace:
    """A rank's number among the ranks that share the state, and how many these are. It stands for their process group
    where only number and size are asked for. In the group itself the rank may have another number, of more or fewer: a
    replacement takes on the sharding that the others have before all of them go over to another one."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


class Prepared(ABC):
    """Another shard_layout, made ready on one rank.

    Attributes:
        tensors: what this rank will hold, by the names of the sharded tensors: local tensors as shards show them. The
            core fills their parts; all else of them (padding) is as it has to be.
        values: the small plain values of the shards that they will be in, by the shards' names.
    """

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Mapping[str, Any]]

    @abstractmethod
    def install(self) -> None:
        """Have the framework behave as if it had been started in this size, with these tensors: parameters, optimizer
        state, shards with their new names and holders. Gradients are gone. Does not communicate, and must not fail: all
        that could has been done before."""


class ReadyTensors(Prepared):
    """Tensors and values as they are, and the function that puts them in place."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Mapping[str, Any]],
        install: Callable[[], None],
    ) -> None:
        self.tensors, self.values = tensors, values
        self._put = install

    def install(self) -> None:
        self._put()


class ShardLayout(ABC):
    """How the state of one adapter is sharded. All adapters here have rules for it (:class:`RuledShardLayout`); others
    may go without."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Among how many ranks the state is sharded now."""

    def sharers(self) -> Sequence[int] | None:
        """The ranks among which this rank's state is sharded, as the job was launched, in the order of their places:
        all that have one of some model ranks (:mod:`flashrecovery.plan.elastic.replicas`). None: those with its own."""
        return None

    def check(self) -> None:  # noqa: B027 - optional
        """Raises UnsupportedError if the state, as it is now, cannot be sharded otherwise."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the other methods need to know of the state as it is now (which optimizer state there is, in which
        dtypes): plain values, equal on all ranks at one version. A rank that has nothing yet gets it from one that
        has."""

    @abstractmethod
    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        """The part of a description that is the same in every process of the same script at any time:
        parameters with their shapes and dtypes, and no optimizer state. Plain values."""

    @abstractmethod
    def tensors(self, description: Mapping[str, Any], size: int) -> Sequence[ShardedTensor]:
        """All of them, in one order, for a job of that many ranks. Shards of the adapter that are in none of them must
        be on all ranks; the core leaves them alone. Tensors that lie alike should share one placement object:
        that makes planning cheap."""

    def rules(self, description: Mapping[str, Any]) -> Sequence[TensorRule] | None:
        """The same as rules that hold without this object: checkpoints then say how they are read in another size.
        None: there are no such rules, and only as many ranks can read them."""
        return None

    @abstractmethod
    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        """Memory for what the rank at ``place`` of ``size`` ranks holds. Changes nothing. Raises UnsupportedError if
        that size is not possible."""

    def parts(self, tensor: ShardedTensor, place: int, local: torch.Tensor) -> list[LocalBox]:
        """Where the boxes of a place lie in its local tensor. By default one after another from its beginning, row by
        row; what follows is padding."""
        flat, found, at = local.view(-1), [], 0
        for box in tensor.boxes(place):
            found.append(LocalBox(box, flat[at : at + box.size].view(box.shape)))
            at += box.size
        return found


@dataclass(frozen=True)
class RuledTensor(ShardedTensor):
    """A tensor that lies as a rule says."""

    rule: TensorRule


class RuledShardLayout(ShardLayout):
    """A sharding that rules describe wholly: which boxes are where, in which shards, and where in their tensors."""

    @abstractmethod
    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        """All tensors, in one order."""

    def rules(self, description: Mapping[str, Any]) -> Sequence[TensorRule]:
        return [rule for rule, _ in self.ruled(description)]

    def tensors(self, description: Mapping[str, Any], size: int) -> Sequence[ShardedTensor]:
        return [
            RuledTensor(
                rule.name,
                rule.shape,
                dtype,
                rule.placement(size),
                [rule.shard_at(place, size) for place in range(size)],
                rule.key,
                rule,
            )
            for rule, dtype in self.ruled(description)
        ]

    def parts(self, tensor: ShardedTensor, place: int, local: torch.Tensor) -> list[LocalBox]:
        assert isinstance(tensor, RuledTensor)
        flat = local.view(-1)
        return [
            LocalBox(part.box, flat[part.at : part.at + part.box.size].view(part.box.shape))
            for part in tensor.rule.parts(place, len(tensor.shards))
        ]

"""The state of one rank's distributed optimizers as one division: of the dense parameters, and of the experts.

Who divides the dense parameters are all data-parallel ranks (with context parallelism, these times the context-parallel
ones); with experts or context parallelism that is several ranks of each replica. Experts are divided among those of
them that have the same ones, every second one for two places of experts. So the places of this division are those of
the dense parameters, and experts of the n-th place in a replica lie on every ``each``-th of them, from the n-th one on.
The experts of all places are in the plan, and are laid out alike: so all who divide the dense parameters plan the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashrecovery.adapter import DividedTensor, Division, LocalBox, Prepared, ReadyTensors, layouts, rules
from fr_megatron.division import OptimizerDivision


@dataclass(frozen=True)
class SharedTensor(DividedTensor):
    """A tensor of experts: on every ``each``-th place, from the ``first`` one on, as its rule says."""

    rule: rules.TensorRule
    each: int
    first: int


class SharedDivision(Division):
    """Of the dense parameters, and perhaps of the experts.

    Args:
        dense, experts: the divisions of either; None: this rank has no experts.
        sharers: who divides the dense parameters, as the job was launched, in the order of their places.
        number: of this rank among them.
        groups: what names say of those who have the experts of each place in a replica, in order.
    """

    def __init__(
        self,
        dense: OptimizerDivision,
        experts: OptimizerDivision | None,
        sharers: Sequence[int],
        number: int,
        groups: Sequence[str],
    ) -> None:
        self._dense, self._experts = dense, experts
        self._sharers, self._groups = tuple(sharers), tuple(groups)
        self._each, self._first = len(groups), number % len(groups)
        self._placements: dict[tuple[int, int], tuple[layouts.Placement, layouts.Placement]] = {}

    @property
    def size(self) -> int:
        return self._dense.size

    def sharers(self) -> Sequence[int]:
        return self._sharers

    def check(self) -> None:
        for division in filter(None, (self._dense, self._experts)):
            division.check()

    def describe(self) -> dict[str, Any]:
        return {"dense": self._dense.describe(), "experts": {} if self._experts is None else self._experts.describe()}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        experts = [] if self._experts is None else self._experts.outline(description["experts"])
        return [self._dense.outline(description["dense"]), experts]

    def tensors(self, description: Mapping[str, Any], size: int) -> Sequence[DividedTensor]:
        return [*self._dense.tensors(description["dense"], size), *self._of_experts(description, size)]

    def _of_experts(self, description: Mapping[str, Any], size: int) -> Iterator[DividedTensor]:
        if self._experts is None:
            return
        each = self._each
        for first, group in enumerate(self._groups):
            for rule, dtype in self._experts.ruled(description["experts"]):
                mine = replace(rule, suffix=group)
                yield SharedTensor(
                    _name(first, rule.name),
                    rule.shape,
                    dtype,
                    self._placed(rule, first, size),
                    [mine.shard_at(at // each, size // each) if at % each == first else "" for at in range(size)],
                    rule.key,
                    mine,
                    each,
                    first,
                )

    def _placed(self, rule: rules.TensorRule, first: int, size: int) -> layouts.Placement:
        """Where its parts lie. Tensors that lie alike have one object."""
        own = rule.placement(size // self._each)
        key = (id(own), first)
        if key not in self._placements:
            placed = tuple(
                layouts.Share(share.box, tuple(place * self._each + first for place in share.ranks)) for share in own
            )
            self._placements[key] = own, placed  # the first one stays, and so does its id
        return self._placements[key][1]

    def parts(self, tensor: DividedTensor, place: int, local: torch.Tensor) -> list[LocalBox]:
        if not isinstance(tensor, SharedTensor):
            return self._dense.parts(tensor, place, local)
        if place % tensor.each != tensor.first:
            return []
        flat = local.view(-1)
        return [
            LocalBox(part.box, flat[part.at : part.at + part.box.size].view(part.box.shape))
            for part in tensor.rule.parts(place // tensor.each, len(tensor.shards) // tensor.each)
        ]

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        dense = self._dense.prepare(description["dense"], place, size)
        if self._experts is None:
            return dense
        experts = self._experts.prepare(description["experts"], place // self._each, size // self._each)

        def install() -> None:
            dense.install()
            experts.install()

        of_experts = {_name(self._first, name): tensor for name, tensor in experts.tensors.items()}
        return ReadyTensors({**dense.tensors, **of_experts}, {**dense.values, **experts.values}, install)


def _name(place: int, tensor: str) -> str:
    return f"experts {place}/{tensor}"

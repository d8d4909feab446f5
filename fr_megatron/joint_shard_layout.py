"""The state of one rank's distributed optimizers as one sharding: of the dense parameters, and of the experts.

The dense parameters are divided among all data-parallel ranks (with context parallelism, these times the
context-parallel ones); with experts or context parallelism that is several ranks of each replica. Experts are sharded
among those of them that have the same ones, every second one for two places of experts. So the places of this sharding
are those of the dense parameters, and experts of the n-th place in a replica lie on every ``each``-th of them, from the
n-th one on. The experts of all places are in the plan, and are laid out alike: so all that divide the dense parameters
plan the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashrecovery.adapter.elastic import EveryNth, Prepared, ReadyTensors, RuledShardLayout, TensorRule
from fr_megatron.shard_layout import OptimizerShardLayout


class JointShardLayout(RuledShardLayout):
    """The joint layout of the dense parameters, and perhaps of the experts.

    Args:
        dense, experts: the shardings of either; None: this rank has no experts.
        sharers: which ranks divide the dense parameters, as the job was launched, in the order of their places.
        number: of this rank among them.
        groups: what names say of those that have the experts of each place in a replica, in order.
    """

    def __init__(
        self,
        dense: OptimizerShardLayout,
        experts: OptimizerShardLayout | None,
        sharers: Sequence[int],
        number: int,
        groups: Sequence[str],
    ) -> None:
        self._dense, self._experts = dense, experts
        self._sharers, self._groups = tuple(sharers), tuple(groups)
        self._each, self._first = len(groups), number % len(groups)

    @property
    def size(self) -> int:
        return self._dense.size

    def sharers(self) -> Sequence[int]:
        return self._sharers

    def check(self) -> None:
        for shard_layout in filter(None, (self._dense, self._experts)):
            shard_layout.check()

    def describe(self) -> dict[str, Any]:
        return {"dense": self._dense.describe(), "experts": {} if self._experts is None else self._experts.describe()}

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        experts = [] if self._experts is None else self._experts.outline(description["experts"])
        return [self._dense.outline(description["dense"]), experts]

    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        found = [*self._dense.ruled(description["dense"])]
        if self._experts is not None:
            for rule, dtype in self._experts.ruled(description["experts"]):
                found += [(self._of_place(rule, first), dtype) for first in range(self._each)]
        return found

    def _of_place(self, rule: TensorRule, first: int) -> TensorRule:
        """The rule of this rank's experts, for a rank at another place in a replica."""
        lies = rule.pattern if self._each == 1 else EveryNth(rule.pattern, self._each, first)
        return replace(rule, name=experts_tensor(first, rule.name), pattern=lies, suffix=self._groups[first])

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        dense = self._dense.prepare(description["dense"], place, size)
        if self._experts is None:
            return dense
        experts = self._experts.prepare(description["experts"], place // self._each, size // self._each)

        def install() -> None:
            dense.install()
            experts.install()

        of_experts = {experts_tensor(self._first, name): tensor for name, tensor in experts.tensors.items()}
        return ReadyTensors({**dense.tensors, **of_experts}, {**dense.values, **experts.values}, install)


def experts_tensor(place: int, tensor: str) -> str:
    """The name of a sharded ``tensor`` of the experts at this place in a replica."""
    return f"experts {place}/{tensor}"

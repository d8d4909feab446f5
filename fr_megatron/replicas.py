"""Which of Megatron's ranks make up a replica of an elastic job, and which of them compute their own micro-batches.

A replica is what has the whole model, all experts included, and leaves and comes as a whole. With tensor, context and
pipeline parallelism that is one data-parallel coordinate. Experts are divided over ranks that are data-parallel (or
context-parallel) peers for everything else, so with expert parallelism a replica has several of these. TP 1, EP 2,
four ranks::

                  experts 0, 1     experts 2, 3       all have the dense parameters, reduced over 0, 1, 2, 3;
    replica 0        rank 0           rank 1          the experts are reduced over 0 and 2, and over 1 and 3;
    replica 1        rank 2           rank 3          each rank computes its own micro-batches

So the ranks at the same place in every replica are the data-parallel group or the expert-data-parallel one, whichever
is the smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from flashrecovery.adapter import of_group, world_size


def data_parallel_group() -> dist.ProcessGroup:
    """The group of the ranks among which the micro-batches are divided."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group


def replica_group() -> dist.ProcessGroup:
    """The group of the ranks that have the same model rank in every replica."""
    from megatron.core import parallel_state

    dense = data_parallel_group()
    experts: dist.ProcessGroup = parallel_state.get_expert_data_parallel_group()
    return experts if experts.size() < dense.size() else dense


def sharers(chunk: Any, *, expert: bool) -> list[int]:
    """Which ranks divide the distributed optimizer's state of the dense parameters, or of this rank's experts, in the
    order of their parts."""
    return list(dist.get_process_group_ranks(chunk.intra_expt_dp_group if expert else chunk.intra_dp_cp_group))


@dataclass(frozen=True)
class SharedPlaces:
    """The places of a rank among the ranks that divide the distributed optimizer's state, as the job was launched.

    Attributes:
        sharers: those that divide that of the dense parameters, in the order of their parts.
        number: of this rank among them.
        groups: what names say of those of them that have the experts of each place in a replica.
        one_each: they are one rank of each replica.
    """

    sharers: tuple[int, ...]
    number: int
    groups: tuple[str, ...]
    one_each: bool

    @staticmethod
    def of(chunk: Any) -> SharedPlaces:
        dense, experts = sharers(chunk, expert=False), sharers(chunk, expert=True)
        each = max(len(dense) // len(experts), 1)
        groups = tuple(of_group(dense[first::each], world_size()) for first in range(each))
        return SharedPlaces(tuple(dense), dense.index(dist.get_rank()), groups, len(dense) == replica_group().size())

    @property
    def each(self) -> int:
        """So many of them have all experts together."""
        return len(self.groups)

    @property
    def first(self) -> int:
        """Which of these this rank is."""
        return self.number % self.each


def computing() -> int:
    """How many ranks of a replica have their own micro-batches; the same in any size."""
    return int(data_parallel_group().size() // replica_group().size())


def experts_or_context() -> bool:
    """Whether there is expert or context parallelism."""
    from megatron.core import parallel_state as state

    experts: int = state.get_expert_model_parallel_world_size()
    context: int = state.get_context_parallel_world_size()
    return max(experts, context) > 1


def other_slices() -> Iterator[str]:
    """Experts that are cut over other ranks than the rest, by name."""
    from megatron.core import parallel_state as state

    tensor, of_experts = state.get_tensor_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    if of_experts != tensor:
        yield f"expert_tensor_parallel_size = {of_experts} (allowed: that of the rest, {tensor})"


def unknown_replicas() -> Iterator[str]:
    """What replicas are made up of ranks that are not known to follow, by name; a rank alone sees all of it."""
    from megatron.core import parallel_state as state

    from_experts, experts = state.get_expert_data_parallel_group().size(), state.get_expert_model_parallel_world_size()
    few, many = sorted((data_parallel_group().size(), from_experts))
    if other := list(other_slices()):
        yield from other
    elif many % few:  # sizes of the groups are to each other as those of context and expert parallelism
        context = state.get_context_parallel_world_size()
        yield (
            f"expert_model_parallel_size = {experts} and context_parallel_size = {context} (allowed: one that divides "
            "the other)"
        )

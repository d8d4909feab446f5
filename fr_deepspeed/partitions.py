"""What ZeRO stages 1 to 3 have in common: partitions that only one rank holds, and the state of the backward hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.errors import RestoreError
from flashrecovery.torch_native.placement import global_rank, local_tensor, world_size
from flashrecovery.torch_native.shards import ParamRecord, constant
from flashrecovery.worker.adapter import Shard, ShardSpec


class FixedShard(Shard):
    """One tensor that exists from the start and keeps its shape. ``holders``: global ranks."""

    def __init__(self, name: str, holders: Sequence[int], tensor: torch.Tensor) -> None:
        self.name = name
        self.holders = tuple(sorted(holders))
        self._tensor = tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"data": local_tensor(self._tensor)}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Raises RestoreError if the source's tensor has another shape or dtype."""
        mine = self.spec().tensors
        if dict(spec.tensors) != mine:
            raise RestoreError(f"{self.name}: this rank has {mine}, the source has {dict(spec.tensors)}")
        return self.tensors()


def partition_record(name: str, partition: torch.Tensor, group: Any) -> ParamRecord:
    """The record of this rank's partition of something that ``group`` shards: ``<name>#dp=1/4``, or
    ``<name>#dp=1/2,group=2`` for a group that is not the world (and whose lowest rank is 2)."""
    ranks = dist.get_process_group_ranks(group)
    place = f"{name}#dp={dist.get_rank(group)}/{len(ranks)}"
    if len(ranks) < world_size():
        place += f",group={min(ranks)}"
    return ParamRecord(name, place, (global_rank(),), constant(partition))  # type: ignore[arg-type]


def reset_backward_hooks(optimizer: Any) -> None:
    """An interrupted backward leaves its depth behind, and the next one would never run its epilogue."""
    state = optimizer._backward_hook_state
    state.backward_active_depth = 0
    state.remaining_grad_acc_hooks = 0
    state.reset_for_new_step()
    optimizer._is_gradient_accumulation_boundary = True
    optimizer._coalesce_grad_reduction = False
    optimizer.overflow = False

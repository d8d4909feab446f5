"""What ZeRO stages 1 to 3 have in common: partitions that only one rank holds, and the state of the backward hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import ParamRecord, constant, global_rank, world_size


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

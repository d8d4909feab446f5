"""Which ranks hold an equal piece of what: DeepSpeed's process groups as the shard holders of the recovery core.

A parameter is replicated (ZeRO-0) or partitioned (ZeRO-1 to 3) over its data-parallel group. An expert's is smaller:
each rank of an expert-parallel group holds other experts, under equal names, and an expert is replicated or partitioned
over its expert-data-parallel group only. A partition has one holder, so its name says whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import ParamRecord, constant, global_rank, world_size
from flashrecovery.adapter.elastic import ShardPlace


def ranks_of(engine: Any, parameter: torch.Tensor) -> Sequence[int]:
    """The global ranks over which DeepSpeed averages the gradient of ``parameter``: they hold it, or its partitions."""
    from deepspeed.moe.utils import is_moe_param

    group = engine.data_parallel_group
    if is_moe_param(parameter):
        group = engine.expert_data_parallel_group[parameter.group_name]  # type: ignore[attr-defined]
    return dist.get_process_group_ranks(group)


def partition_record(
    name: str, partition: torch.Tensor, group: Any, shard_layout: ShardPlace | None = None
) -> ParamRecord:
    """The record of this rank's partition of something that ``group`` shards: ``<name>#dp=1/4``, or
    ``<name>#dp=1/2,group=2`` for a group that is not the world (and whose lowest rank is 2). ``sharding``: the place of
    this rank in what its state has been sharded for, if that need not be as its groups."""
    if shard_layout is not None:
        own = f"{name}#dp={shard_layout.number}/{shard_layout.ranks}"
        return ParamRecord(name, own, (shard_layout.number,), constant(partition))  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(group)
    place = f"{name}#dp={dist.get_rank(group)}/{len(ranks)}"
    if len(ranks) < world_size():
        place += f",group={min(ranks)}"
    return ParamRecord(name, place, (global_rank(),), constant(partition))  # type: ignore[arg-type]

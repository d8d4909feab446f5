"""How much memory a change of the parallel layout will need, and how much there is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.plan.stash_room import StashRoom
from flashrecovery.runtime.environment import STASH_ENV
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.worker.copy_choice import all_optimizers, most, placement, ranks_of_node, state_to_come
from flashrecovery.worker.registry import Registry


def stash_room(registry: Registry) -> StashRoom:
    """Of the whole job, before its first step. A collective of all ranks (a replacement gets the recorded answer)."""
    shards = [(shard.spec().nbytes, shard.holders[0] == registry.rank) for shard in registry.tensor_shards()]
    own = sum(nbytes for nbytes, _ in shards)
    now = sum(nbytes for nbytes, first in shards if first)
    expected = now + state_to_come(all_optimizers(registry)) * now // max(own, 1)
    free = min(shutil.disk_usage(Path(os.environ[STASH_ENV])).free, available_memory())
    totals = torch.tensor([now, expected, free // ranks_of_node()])  # all ranks of a node count the same memory
    group = groups.control_group()
    if group is not None:
        dist.all_reduce(totals, group=group)
    (lacking,) = most([-free])
    return StashRoom(int(totals[0]), int(totals[1]), placement()[1], -lacking, int(totals[2]))

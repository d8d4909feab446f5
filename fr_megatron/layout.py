"""Which ranks hold an equal piece of what: Megatron's process groups as the shard holders of the recovery core.

TP 2 x PP 2 x DP 2, Megatron's order (tp fastest, then dp, then pp)::

                    stage 0                stage 1
               tp 0      tp 1         tp 0      tp 1
        dp 0   rank 0    rank 1       rank 4    rank 5
        dp 1   rank 2    rank 3       rank 6    rank 7

A column is a data-parallel group (with context parallelism: ``dp_cp``): its ranks hold equal parameters, so the columns
of the picture are the holders: {0, 2}, {1, 3}, {4, 6}, {5, 7}. Nothing else is equal: tensor-parallel peers hold other
slices, stages other layers. Two exceptions:

* an *expert's* replicas are the ranks of its expert-data-parallel group (``expt_dp``), which is smaller than ``dp_cp``;
* the *distributed optimizer* cuts what a column holds into one part a rank. A part exists once, or, with several
  optimizer instances, once in each (``inter_dist_opt``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter.elastic import ShardPlace


@dataclass(frozen=True)
class Holders:
    """Where a parameter's copies, and the parts of its optimizer state, live. All ranks are global.

    Attributes:
        replicas: ranks that hold the whole parameter.
        part, parts: which part of the optimizer state this rank holds, of how many; 0 of 1 without the distributed
            optimizer.
        owners: ranks that hold the same part.
        group: what names say of the replicas, as the job was launched; "" if they are all ranks. Replicas and owners
            are places in a sharding that need not be among as many as there are in the groups; None: they are ranks.
    """

    replicas: tuple[int, ...]
    part: int
    parts: int
    owners: tuple[int, ...]
    group: str | None = None


@dataclass(frozen=True)
class ShardedParameters:
    """The place of this rank in what the state of the dense or of the expert parameters has been sharded for, if that
    need not be as its groups.

    Attributes:
        place: among those that divide it.
        group: what names say of these.
        each, first: experts of one place in the replicas are sharded among every ``each``-th of those that divide the
            dense parameters, from the ``first`` one on.
    """

    place: ShardPlace
    group: str
    each: int = 1
    first: int = 0

    def of_all(self, place: int) -> int:
        """The same place, counted among those that divide the dense parameters."""
        return place * self.each + self.first


def is_expert(parameter: torch.Tensor) -> bool:
    """Megatron marks what is not synchronised over the whole data-parallel group."""
    return not getattr(parameter, "allreduce", True)


def holders(chunk: Any, *, expert: bool, sharded: ShardedParameters | None = None) -> Holders:
    """The holders of the dense or the expert parameters of ``chunk``, a model chunk in Megatron's
    DistributedDataParallel. ``sharded``: None if all is as its groups are."""
    if sharded is not None:
        number, ranks = sharded.place.number, sharded.place.ranks
        places = tuple(map(sharded.of_all, range(ranks)))
        return Holders(places, number, ranks, (places[number],), sharded.group)
    replicas = _ranks(chunk.expt_dp_group if expert else chunk.dp_cp_group)
    if not chunk.ddp_config.use_distributed_optimizer:
        return Holders(replicas, 0, 1, replicas)
    within = chunk.intra_expt_dp_group if expert else chunk.intra_dp_cp_group
    several = chunk.ddp_config.num_distributed_optimizer_instances > 1
    owners = _ranks(chunk.inter_dist_opt_group) if several else (dist.get_rank(),)
    return Holders(replicas, dist.get_rank(within), dist.get_world_size(within), owners)


def _ranks(group: Any) -> tuple[int, ...]:
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    return tuple(sorted(ranks))

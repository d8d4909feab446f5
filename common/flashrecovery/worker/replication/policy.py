"""Which copies a job can have, and which ``auto`` chooses: by the nodes, the sizes of shards and free memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.errors import ConfigError, UnsupportedError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.membership.placement import copied_by, ring_of
from flashrecovery.plan.parity.copies_or_parity import (
    CopyChoice,
    Sizes,
    choose,
    neighbour_memory,
    own_memory,
    parity_memory,
    refusal,
)
from flashrecovery.plan.parity.groups import Groups, groups_of_all, launch_domains
from flashrecovery.runtime.environment import DOMAINS_ENV, STRIDE_ENV, in_changed_layout
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.state.shard import Shard
from flashrecovery.worker.registry import Registry


def choice(registry: Registry, settings: Settings) -> tuple[CopyChoice, Groups]:
    """Whether parity is kept of what could be lost, or neighbour copies; and the groups, if it is parity. A collective.

    Raises UnsupportedError if parity is asked for and the nodes do not allow it, ConfigError if the copies need more
    host memory than there is even without what optimizers will make.
    """
    several = placement()[1] > 1
    found: Groups | str = ()
    auto = settings.redundancy == "auto" and several and settings.replan is None  # parity is of one layout
    if settings.redundancy == "parity" or auto:
        found = parity_groups(registry, settings)
    if settings.redundancy == "parity" and isinstance(found, str):
        raise UnsupportedError(f"redundancy 'parity': {found}; allowed here: auto, neighbor, none")
    now, expected = sizes_everywhere(registry, settings.parity)
    # On one node neighbour copies take no memory of their own.
    plain = CopyChoice(settings.redundancy == "parity", True, "")
    chosen = choose(expected, found, settings.parity) if auto else plain

    def need(sizes: Sizes) -> int:
        if chosen.parity and not isinstance(found, str):
            return parity_memory(sizes, found, settings.parity)
        return neighbour_memory(sizes) if several else own_memory(sizes)

    if why := refusal(now, need(now)):
        raise ConfigError(f"redundancy = {settings.redundancy!r}: {why}")
    if chosen.fits and (why := refusal(expected, need(expected))):
        chosen = CopyChoice(chosen.parity, False, f"with what optimizers are about to make, {why}")
    return chosen, () if isinstance(found, str) else found


def placement() -> tuple[int, int]:
    """(stride, nodes): rank r's copies go to rank r + stride; how many nodes (in a parallel layout that the job has
    changed to: failure domains) hold ranks, at the launch or that change. From the environment that the agent has made,
    and the same for a replacement wherever ranks have moved since, which GROUP_WORLD_SIZE is not."""
    stride = int(os.environ.get(STRIDE_ENV, "1"))
    if in_changed_layout():
        return stride, max(len({*_shared_domains()}), 1)
    return stride, int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def neighbour_of(rank: int, world: int) -> int:
    """The rank that keeps the copies of ``rank``."""
    return (rank + placement()[0]) % world


def ring_among(members: Sequence[int], shape: ReplicaShape | None = None) -> list[int]:
    """By the place of each of these ranks of an elastic job, the place of the one that keeps its copies. ``shape``: of
    a job whose ranks divide state with those alone that stand at the same place in their replicas."""
    # In a layout that the job has changed to, nodes need not have equally many ranks, and domains are those of ranks.
    ranks = 1 if in_changed_layout() else ranks_of_node()
    return (ring_of if shape is None else shape.ring)(members, placement()[0], ranks, _shared_domains())


def _shared_domains() -> list[int]:
    shared: list[int] = json.loads(os.environ.get(DOMAINS_ENV, "[]"))
    return shared


def domains_of_launch(world: int) -> list[str]:
    """The failure domain of each rank, as the job was launched, or has changed its parallel layout last. A replacement
    finds the same: it follows from what the agent has put into the environment."""
    shared = _shared_domains()
    if in_changed_layout() and placement()[1] > 1:  # nodes need not have equally many ranks there
        return [f"domain {number}" for number in shared]
    return launch_domains(world, placement()[1], shared)


def parity_groups(registry: Registry, settings: Settings) -> Groups | str:
    """The parity groups of all ranks, as the job was launched; why there are none, in words."""
    return groups_of_all(domains_of_launch(registry.world_size), settings.parity, settings.parity_group)


def copied_shards(registry: Registry, losses: int) -> list[Shard]:
    """The shards of tensors that this rank has copied, or that parity is kept of: all whose holders may be lost with
    ``losses`` failure domains. Of several holders one has that done."""
    world = registry.world_size
    domains = domains_of_launch(world)
    if len({*domains}) <= losses and not in_changed_layout():
        domains = launch_domains(world, placement()[1])  # all share what may fail, so that only nodes are told apart

    def copied(shard: Shard) -> bool:
        by = copied_by(shard.name, shard.holders, domains, losses, lambda rank: neighbour_of(rank, world))
        return by == registry.rank

    return [shard for shard in registry.tensor_shards() if copied(shard)]


def sizes_everywhere(registry: Registry, parity: int) -> tuple[Sizes, Sizes]:
    """The largest rank's shards and the least free memory of a node: as they are now, and with the state that
    optimizers have not made yet, counted as Adam's or momentum's. ``parity``: how many losses it would survive. A
    collective, on all ranks before any of them keeps anything (a replacement gets the recorded answer)."""
    kinds = registry.tensor_shards(), copied_shards(registry, 1), copied_shards(registry, parity)
    now = [sum(s.spec().nbytes for s in shards) for shards in kinds]
    to_come = state_to_come(all_optimizers(registry))
    then = [nbytes + to_come * nbytes // max(now[0], 1) for nbytes in now]
    own, copied, in_parity, own_then, copied_then, in_parity_then, least = most([*now, *then, -available_memory()])
    ranks = ranks_of_node()
    return Sizes(own, copied, in_parity, -least, ranks), Sizes(own_then, copied_then, in_parity_then, -least, ranks)


def ranks_of_node() -> int:
    """At the launch."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def all_optimizers(registry: Registry) -> list[torch.optim.Optimizer]:
    """Those that the script has registered, and those of its frameworks."""
    return [thing for thing in registry.known() if isinstance(thing, torch.optim.Optimizer)]


def state_to_come(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of state that these optimizers make in their first step, as far as their settings tell."""
    found: dict[torch.Tensor, int] = {}  # of each parameter; an optimizer may be wrapped by another one
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            moments = 2 if "betas" in group else int(bool(group.get("momentum")))
            for p in group["params"]:
                steps = p.requires_grad or not isinstance(p, torch.nn.Parameter)  # a framework's copy in fp32
                if steps and not optimizer.state.get(p):
                    local = p.to_local() if isinstance(p, DTensor) else p
                    found[p] = moments * local.nbytes
    return sum(found.values())


def anywhere(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank; a collective (a replacement gets the recorded answer)."""
    return bool(most([int(flag)])[0])


def most(numbers: Sequence[int]) -> list[int]:
    """The greatest of all ranks, number by number; a collective."""
    found = torch.tensor(numbers, dtype=torch.int64)
    group = groups.control_group()
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found]

"""Which copies a job has: by its settings, its nodes, the sizes of shards and free memory.

:func:`decide` gathers the facts, some of them from all ranks. :func:`choose_policy` and the refusals are pure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.contract import roles
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
from flashrecovery.runtime.environment import DOMAINS_ENV, GPUS_ENV, STRIDE_ENV, in_changed_layout
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.state.shard import Shard
from flashrecovery.worker.registry import Registry

NO_CHOICE = CopyChoice(parity=False, fits=True, reason="")
"""No rank has anything to be copied."""


class PeerProtection(Enum):
    """How other ranks protect what a rank has alone."""

    NOTHING = "nothing"
    LOCAL_STATE = "the neighbour keeps rank-local state"
    NEIGHBOUR = "the neighbour keeps shards and rank-local state"
    RING_OF_EACH_SIZE = "as before, in a new ring for each size of the job"
    PARITY = "a group keeps parity of the shards, and rank-local state"


@dataclass(frozen=True)
class CopyFacts:
    """What decides about copies, as this rank knows it by itself.

    Attributes:
        rank, world: of the launch.
        redundancy: the setting.
        elastic: the job can change its size.
        parallelism: it can change its parallelism.
        changed_layout: it has done so before this process began.
        sharded: adapters shard state among replicas, and shard it again in each size.
        shape: the replicas. most_replicas: how many the job may have; None: as many as at the launch.
        nodes: that hold ranks.
        unique: shards of this rank that no other rank holds.
        keepers: by rank, the rank that keeps its copies; asked for only where replicas must not share a node.
        domains: by rank, its node; asked for together with ``keepers``.
    """

    rank: int
    world: int
    redundancy: str
    elastic: bool
    parallelism: bool
    changed_layout: bool
    sharded: bool
    shape: ReplicaShape
    most_replicas: int | None
    nodes: int
    unique: tuple[str, ...]
    keepers: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()

    @property
    def across(self) -> bool:
        """Another layout answers the loss of a rank of the last replica, so that the others of it keep copies."""
        return self.elastic and self.parallelism and self.shape.each > 1

    @property
    def ring_of_each_size(self) -> bool:
        """There is a new ring for each size."""
        return self.sharded or self.across

    @property
    def may_grow(self) -> bool:
        """Beyond the launch, ranks may be on nodes that it did not have."""
        return self.most_replicas is not None and self.most_replicas > self.shape.replicas


@dataclass(frozen=True)
class CopyPolicy:
    """Which copies this job has.

    Attributes:
        protection: what other ranks keep.
        needs_ring: whether there is a process group for a ring. Ranks connect in it when they first need to; it may
            serve what turns out later to be each rank's own.
        sharded, across: see :class:`CopyFacts`.
        parity_groups: the groups of all ranks, with parity.
        reason: why neighbour copies, or parity, were chosen; for the user.
        risks: what is protected worse than asked for; for the user.
    """

    protection: PeerProtection
    needs_ring: bool
    sharded: bool
    across: bool
    parity_groups: Groups
    reason: str
    risks: tuple[str, ...]

    @property
    def ring_of_each_size(self) -> bool:
        """There is a new ring for each size."""
        return self.sharded or self.across


def facts_of(registry: Registry, settings: Settings) -> CopyFacts:
    """The facts of this rank."""
    nodes, shape, world = placement()[1], registry.shape, registry.world_size
    elastic, changed = settings.elastic is not None, in_changed_layout()
    sharded = elastic and bool(roles.shard_layouts(registry.adapters))
    keepers: Sequence[int] = ()
    domains: Sequence[str] = ()
    several = world > 1 and nodes > 1 and settings.redundancy != "none"
    if sharded and several and not changed and shape.each > 1 and shape.replicas > 1:
        keepers, domains = ring_among(range(world), shape), launch_domains(world, nodes)
    return CopyFacts(
        rank=registry.rank,
        world=world,
        redundancy=settings.redundancy,
        elastic=elastic,
        parallelism=settings.parallelism is not None,
        changed_layout=changed,
        sharded=sharded,
        shape=shape,
        most_replicas=None if registry.batches is None else registry.batches.most,
        nodes=nodes,
        unique=tuple(shard.name for shard in registry.unique_shards()),
        keepers=tuple(keepers),
        domains=tuple(domains),
    )


def refuse_settings(facts: CopyFacts) -> None:
    """Raises UnsupportedError if what is asked for does not fit the job's ranks or shards."""
    if facts.world == 1 and facts.redundancy in ("replica", "neighbor", "parity"):
        raise UnsupportedError(
            f"redundancy = {facts.redundancy!r}: a world of one rank has no peer to hold a copy; "
            "allowed here: auto, none"
        )
    if facts.unique and facts.redundancy == "replica":
        raise UnsupportedError(
            f"redundancy 'replica': {len(facts.unique)} shards of rank {facts.rank} exist on no other rank, "
            f"the first is {facts.unique[0]!r}; allowed here: auto, neighbor, parity, none"
        )


def one_node_risk(facts: CopyFacts, copied_somewhere: bool) -> str:
    """What is lost with one node that has all there is of some state; empty: nothing is. Raises UnsupportedError at
    the launch; a layout that the job has changed to goes on so."""
    alone = facts.across and facts.shape.replicas == 1
    if not (copied_somewhere and facts.elastic and facts.shape.each > 1 and not facts.sharded and not alone):
        return ""
    text = f"an elastic job of {facts.shape.text} in which one node has all that there is of some state: copies "
    if not facts.changed_layout:
        raise UnsupportedError(
            f"{text}of it are not kept in such a job; put each replica on separate nodes, as a mesh of "
            "(replicate, shard) has it"
        )
    return f"{text}of it are not kept as long as it has several replicas, and that node must not be lost"


def refuse_copies_on_one_node(facts: CopyFacts) -> None:
    """Raises UnsupportedError if replicas have several ranks, and a node that is lost would take what a rank has alone
    and the copies of it: as copies stay at the same place, that depends on where the replicas are."""
    for rank, keeper in enumerate(facts.keepers):
        if facts.domains[rank] == facts.domains[keeper]:
            raise UnsupportedError(
                f"an elastic job of {facts.shape.text} on {facts.nodes} nodes in which rank {keeper} keeps the copies "
                f"of what rank {rank} has alone, on the same node: a lost node would take both; have the ranks at one "
                "place of all replicas on different nodes (each replica on separate nodes, and equally many on each)"
            )


def choose_policy(
    facts: CopyFacts, copied_somewhere: bool = False, chosen: CopyChoice = NO_CHOICE, groups_of_parity: Groups = ()
) -> CopyPolicy:
    """The copies of a job. ``copied_somewhere``: some rank has shards that one failure may take with all holders.

    Among the ranks of one node whose shards all have replicas nothing is to be done: the agent keeps rank-local state.
    """
    several = facts.world > 1
    if not several or facts.redundancy == "none":
        protection = PeerProtection.NOTHING
    elif chosen.parity and not facts.ring_of_each_size:
        protection = PeerProtection.PARITY
    elif not copied_somewhere and facts.nodes == 1 and not facts.across and not facts.may_grow:
        protection = PeerProtection.NOTHING
    elif facts.ring_of_each_size:
        protection = PeerProtection.RING_OF_EACH_SIZE
    else:
        protection = PeerProtection.NEIGHBOUR if copied_somewhere else PeerProtection.LOCAL_STATE
    fixed = several and not facts.elastic and not facts.parallelism
    later = protection is PeerProtection.NOTHING and fixed and facts.redundancy in ("auto", "neighbor")
    risks = [one_node_risk(facts, copied_somewhere)] if several and facts.redundancy != "none" else []
    if not chosen.fits:
        risks.append(f"the copies may not fit into the nodes' memory: {chosen.reason}")
    return CopyPolicy(
        protection=protection,
        needs_ring=later or protection not in (PeerProtection.NOTHING, PeerProtection.PARITY),
        sharded=facts.sharded,
        across=facts.across,
        parity_groups=groups_of_parity,
        reason=chosen.reason if chosen.fits else "",
        risks=tuple(risk for risk in risks if risk),
    )


def decide(facts: CopyFacts, registry: Registry, settings: Settings) -> CopyPolicy:
    """A collective. Raises what the refusals and :func:`choice` raise."""
    if facts.world == 1 or facts.redundancy == "none":
        return choose_policy(facts)
    losses = settings.parity if facts.redundancy == "parity" else 1
    copied_somewhere = anywhere(bool(copied_shards(registry, losses)))
    one_node_risk(facts, copied_somewhere)
    refuse_copies_on_one_node(facts)
    chosen, parity_groups = choice(registry, settings) if copied_somewhere else (NO_CHOICE, ())
    return choose_policy(facts, copied_somewhere, chosen, parity_groups)


def choice(registry: Registry, settings: Settings) -> tuple[CopyChoice, Groups]:
    """Whether parity is kept of what could be lost, or neighbour copies; and the groups, if it is parity. A collective.

    Raises UnsupportedError if parity is asked for and the nodes do not allow it, ConfigError if the copies need more
    host memory than there is even without what optimizers will make.
    """
    several = placement()[1] > 1
    found: Groups | str = ()
    auto = settings.redundancy == "auto" and several and settings.parallelism is None  # parity is of one layout
    if settings.redundancy == "parity" or auto:
        found = parity_groups(registry, settings)
    if settings.redundancy == "parity" and isinstance(found, str):
        raise UnsupportedError(f"redundancy 'parity': {found}; allowed here: auto, neighbor, none")
    now, expected = sizes_everywhere(registry, settings.parity)
    # On one node neighbour copies take no extra memory.
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
        return stride, max(len({*shared_domains_of_nodes()}), 1)
    return stride, int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def neighbour_of(rank: int, world: int) -> int:
    """The rank that keeps the copies of ``rank``."""
    return (rank + placement()[0]) % world


def ring_among(members: Sequence[int], shape: ReplicaShape | None = None) -> list[int]:
    """By the place of each of these ranks of an elastic job, the place of the one that keeps its copies. ``shape``: of
    a job in which state is sharded only among ranks of the same model rank."""
    # In a layout that the job has changed to, nodes need not have equally many ranks, and domains are those of ranks.
    ranks = 1 if in_changed_layout() else ranks_of_node()
    make = ring_of if shape is None else shape.ring
    return make(members, placement()[0], ranks, shared_domains_of_nodes(), gpus_of_node())


def shared_domains_of_nodes() -> list[int]:
    """A number for the failure domain of each node, as the job was launched; empty: no two share one."""
    shared: list[int] = json.loads(os.environ.get(DOMAINS_ENV, "[]"))
    return shared


def gpus_of_node() -> list[int]:
    """By local rank, a number for the GPUs that are lost together, as ``gpu_domain`` says; empty: it says nothing."""
    gpus: list[int] = json.loads(os.environ.get(GPUS_ENV, "[]"))
    return gpus


def domains_of_launch(world: int) -> list[str]:
    """The failure domain of each rank, as the job was launched, or has changed its parallel layout last. A replacement
    finds the same: it follows from what the agent has put into the environment."""
    shared = shared_domains_of_nodes()
    if in_changed_layout() and placement()[1] > 1:  # nodes need not have equally many ranks there
        return [f"domain {number}" for number in shared]
    gpus = gpus_of_node()
    return launch_domains(world, placement()[1], shared, [gpus[rank % len(gpus)] for rank in range(world) if gpus])


def parity_groups(registry: Registry, settings: Settings) -> Groups | str:
    """The parity groups of all ranks, as the job was launched; why there are none. Where the GPUs of the only node
    cannot be told apart so, its processes are."""
    world = registry.world_size
    found = groups_of_all(domains_of_launch(world), settings.parity, settings.parity_group)
    if isinstance(found, str) and placement()[1] == 1 and gpus_of_node():
        return groups_of_all(launch_domains(world, 1), settings.parity, settings.parity_group)
    return found


def copied_shards(registry: Registry, losses: int) -> list[Shard]:
    """The shards of tensors that this rank has copied, or that parity is kept of: all whose holders may be lost with
    ``losses`` failure domains. Of several holders one has that done."""
    by = copier(registry, losses)
    return [shard for shard in registry.tensor_shards() if by(shard) == registry.rank]


def copier(registry: Registry, losses: int) -> Callable[[Shard], int | None]:
    """Gives the rank that has a shard copied; None: none has."""
    world = registry.world_size
    domains = domains_of_launch(world)
    if len({*domains}) <= losses and not in_changed_layout():
        domains = launch_domains(world, placement()[1])  # all are in one failure domain, so that only nodes count
    return lambda shard: copied_by(shard.name, shard.holders, domains, losses, lambda rank: neighbour_of(rank, world))


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

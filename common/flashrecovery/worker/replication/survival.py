"""What a job survives, as it is said at its start: of which event something is left of every shard.

Asked only where GPUs may be lost together, or where failure domains are named: in jobs with NCCL, or with labels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.health import nvlink
from flashrecovery.plan.membership.failure_domains import (
    Kept,
    LossEvent,
    locations,
    may_be_lost_together,
    survival_text,
    survives,
)
from flashrecovery.runtime.environment import in_changed_layout
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.policy import (
    CopyPolicy,
    PeerProtection,
    anywhere,
    copier,
    gpus_of_node,
    most,
    neighbour_of,
    placement,
    ranks_of_node,
    shared_domains_of_nodes,
)


def gpus_take_replicas(registry: Registry, settings: Settings) -> bool:
    """Whether some shard has its replicas on GPUs only that one process may take along, as the settings say. A
    collective where they say something."""
    gpus = gpus_of_node()
    if not gpus or settings.elastic is not None or settings.parallelism is not None:
        return False
    where = locations(registry.world_size, ranks_of_node(), gpus)
    held = [shard.holders for shard in registry.tensor_shards() if len(shard.holders) > 1]
    return anywhere(
        any(all(may_be_lost_together(where[h[0]], where[other], LossEvent.GPUS) for other in h) for h in held)
    )


def say(registry: Registry, settings: Settings, policy: CopyPolicy, *, own: bool, outlives: bool) -> str:
    """A text that says what the job survives; "" if that was not requested. Otherwise this is a collective.

    Args:
        own: each rank keeps copies of its own shards in host memory.
        outlives: these are there although its process is not.
    """
    nccl = any(group.request.kind == "nccl" and group.size > 1 for group in groups.groups())
    shared, per_node = shared_domains_of_nodes(), ranks_of_node()
    gpus: Sequence[int] = gpus_of_node()
    labels = bool(gpus or shared)
    if not (nccl or labels) or registry.world_size == 1 or in_changed_layout() or policy.ring_of_each_size:
        return ""
    if not gpus and nccl:
        gpus = nvlink.look(os.environ, per_node).domains
    where = locations(registry.world_size, per_node, gpus, shared)
    losses = settings.parity if policy.protection is PeerProtection.PARITY else 1
    copied_at, kept = copier(registry, losses), []
    for shard in registry.tensor_shards():
        by = copied_at(shard)
        copies = set(shard.holders) if own else set()
        group: tuple[int, ...] = ()
        if by is not None and policy.protection is PeerProtection.NEIGHBOUR:
            copies.add(neighbour_of(by, registry.world_size))
        if by is not None and policy.protection is PeerProtection.PARITY:
            group = next((ranks for ranks in policy.parity_groups if by in ranks), ())
        kept.append(Kept(tuple(shard.holders), tuple(sorted(copies)), outlives, group, losses if group else 0))
    answers = [int(not all(survives(one, where, event) for one in kept)) * (registry.rank + 1) for event in LossEvent]
    any_gpus, *found = most([int(any(number >= 0 for number in gpus)), *answers])
    lost = {event: rank - 1 for event, rank in zip(LossEvent, found, strict=True)}
    if not any_gpus:
        del lost[LossEvent.GPUS]
    if not shared or placement()[1] == 1:
        del lost[LossEvent.RACK]
    text = survival_text(lost)
    if lost.get(LossEvent.GPUS, -1) < 0:
        return text
    if placement()[1] == 1 and len({*gpus}) == 1:
        text += "; all ranks are in one NVLink domain, so that no copy can lie outside of it"
    elif not labels:
        text += "; with --gpu-domain copies lie outside of a rank's own"
    return f"{text}; --snapshots always keeps copies that outlive the GPUs"

"""Which nodes protect each other's state in memory, and so must not be lost together.

A :class:`Guard` is a set of nodes and the number of them that may be lost at once. All protection in memory is a list
of guards: pairs of neighbours in a ring (one of two), groups with parity (one or two of n), replicas (all but one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from flashrecovery.plan.membership.placement import neighbour_stride


class Protection(Enum):
    """What is kept in memory of the state that no other rank holds."""

    CHECKPOINT = "checkpoint"
    """Nothing: every failure goes back to the newest checkpoint."""
    REPLICA = "replica"
    """Nothing either, but every shard is live on several ranks (data parallelism without sharding)."""
    NEIGHBOUR = "neighbour"
    """A whole copy on the next node of a ring."""
    PARITY_1 = "parity-1"
    """RAIM5: parity over a group, of which one node may be lost (REFT, section 4)."""
    PARITY_2 = "parity-2"
    """An XOR code of EVENODD's kind: two nodes of a group may be lost."""

    @property
    def parity(self) -> int:
        """Nodes of a group that may be lost; 0: it is no parity."""
        return {Protection.PARITY_1: 1, Protection.PARITY_2: 2}.get(self, 0)


@dataclass(frozen=True, slots=True)
class Guard:
    """``nodes`` by number, at most ``losses`` of which may be lost together."""

    nodes: tuple[int, ...]
    losses: int


def domains(nodes: int, domain_nodes: int) -> tuple[int, ...]:
    """The failure domain of each node: ``domain_nodes`` nodes after each other share one; 0: each is alone."""
    return tuple(i // domain_nodes if domain_nodes > 0 else i for i in range(nodes))


def neighbour_ring(domain_of: Sequence[int]) -> tuple[Guard, ...]:
    """Node i and the keeper of its copies, for each i; as far as possible in different domains
    (:func:`~flashrecovery.plan.membership.placement.neighbour_stride`). None for a single node."""
    nodes = len(domain_of)
    if nodes < 2:
        return ()
    alone = len(set(domain_of)) in (1, nodes)
    stride = 1 if alone else neighbour_stride([str(d) for d in domain_of], 1)
    return tuple(Guard((i, (i + stride) % nodes), 1) for i in range(nodes))


def parity_groups(domain_of: Sequence[int], span: int, size: int, losses: int) -> tuple[Guard, ...]:
    """The nodes in groups of at most ``size`` and of nearly equal sizes, whose members are in different domains if
    there are enough. ``span``: number of consecutive nodes that hold shards of one kind, such as those of one pipeline
    stage; no group reaches beyond them.

    Raises ValueError if a group would be smaller than ``losses`` + 1 nodes.
    """
    nodes = len(domain_of)
    found: list[Guard] = []
    for start in range(0, nodes, span):
        block = range(start, min(start + span, nodes))
        place: dict[int, int] = {}
        order = []
        for node in block:  # the first node of each domain, then the second of each ...
            order.append((place.setdefault(domain_of[node], 0), node))
            place[domain_of[node]] += 1
        members = [node for _, node in sorted(order)]
        count = -(-len(members) // size)
        if len(members) // count <= losses:
            raise ValueError(
                f"parity {losses} over groups of {len(members) // count} nodes: at least {losses + 1} nodes that hold "
                f"shards of one kind are allowed"
            )
        ends = [len(members) * i // count for i in range(count + 1)]
        groups = [members[a:b] for a, b in pairwise(ends)]
        found += [Guard(tuple(sorted(group)), losses) for group in groups]
    return tuple(found)


def replica_sets(nodes: int, span: int) -> tuple[Guard, ...]:
    """Each ``span`` nodes after each other hold the same: all but one may be lost."""
    blocks = [tuple(range(start, min(start + span, nodes))) for start in range(0, nodes, span)]
    return tuple(Guard(block, len(block) - 1) for block in blocks)

"""Which nodes that a device plugin has warned of are replaced together with what has just failed. Pure.

The job is being interrupted anyway, so this is the cheapest moment. But a warning is no failure: such a node is given
up only if a healthy spare node takes all of its ranks, and if the newest version that the others can go back to stays
the same without anything that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flashrecovery.plan.membership.placement import Room
from flashrecovery.plan.restore.consistent_cut import newest_cut
from flashrecovery.plan.restore.types import Cut, Holding, Need


@dataclass(frozen=True, slots=True)
class Warned:
    """A living node of which a device plugin has warned, and the ranks that it holds."""

    name: str
    domain: str
    ranks: tuple[int, ...]


def proactive_replacements(
    warned: Sequence[Warned], rooms: Sequence[Room], needs: Collection[Need], holdings: Collection[Holding]
) -> dict[str, str]:
    """The nodes to give up, each with the spare node that takes its ranks. Deterministic."""
    spares = [r for r in rooms if r.spare and not r.suspect]
    if not spares or not warned:
        return {}
    kept, before = list(holdings), newest_cut(needs, holdings)
    found: dict[str, str] = {}
    for node in sorted(warned, key=lambda w: w.name):
        fitting = [s for s in spares if s.free >= len(node.ranks)]
        if not node.ranks or not fitting or not isinstance(before, Cut):
            continue
        without = [h for h in kept if h.rank not in node.ranks]
        after = newest_cut(needs, without)
        if isinstance(after, Cut) and after.version == before.version:
            spare = min(fitting, key=lambda s: (s.domain == node.domain, s.free, s.name))
            spares.remove(spare)
            found[node.name], kept = spare.name, without
    return found

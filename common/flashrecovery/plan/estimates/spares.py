"""How often a job waits because no node is left: the job, its spare nodes, and the repair of failed ones.

Failed nodes are repaired independently. While more nodes are in repair than there are spares, the job waits, and
nothing fails. With single failures this is Erlang's loss formula for ``spares + 1`` servers, which holds for any
distribution of the repair time. Failure domains take several nodes at once; then the stationary distribution is
computed, with exponential repair times. Spare nodes that fail while they are idle are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """Attributes:
    blocked: part of all time in which the job waits for a node.
    unlucky: part of the events that find too few spare nodes.
    wait_days: until a node is repaired, then; 0 if no event ever does.
    """

    blocked: float
    unlucky: float
    wait_days: float


def waiting(
    spares: int, repair_days: float, node_events: float, domain_events: float = 0.0, domain_nodes: int = 0
) -> Waiting:
    """``node_events``, ``domain_events``: failures of one node, and of ``domain_nodes`` at once, a day of running.

    Raises ValueError for values that cannot be.
    """
    if spares < 0 or repair_days < 0 or node_events < 0 or domain_events < 0:
        raise ValueError(
            f"spares = {spares}, repair = {repair_days:g} days, node events = {node_events:g}, "
            f"domain events = {domain_events:g}: 0 or more is allowed"
        )
    batch = domain_nodes if domain_events > 0 else 0
    events = node_events + (domain_events if batch else 0.0)
    if repair_days == 0 or events == 0:
        return Waiting(0.0, 0.0, 0.0)
    busy = _stationary(spares, repair_days, node_events, domain_events if batch else 0.0, batch)
    running, blocked = busy[: spares + 1], math.fsum(busy[spares + 1 :])
    # Each stay begins with an event, so its mean length is the time blocked divided by how often one begins.
    begins = node_events * running[spares]
    if batch:
        begins += domain_events * math.fsum(running[max(0, spares - batch + 1) :])
    if begins == 0:
        return Waiting(blocked, 0.0, 0.0)
    return Waiting(blocked, begins / (events * math.fsum(running)), blocked / begins)


def _stationary(spares: int, repair_days: float, single: float, batched: float, batch: int) -> list[float]:
    """Part of all time in which 0, 1, 2, ... nodes are being repaired.

    Repair goes one node at a time, so what comes down from n to n - 1 is all that goes up past there: a sum of positive
    terms, which is exact for the smallest parts, too.
    """
    parts = [1.0]
    for n in range(1, spares + 1 + max(1, batch)):
        up = single * parts[n - 1] if n - 1 <= spares else 0.0
        up += batched * math.fsum(parts[max(0, n - batch) : min(n - 1, spares) + 1])
        parts.append(up * repair_days / n)
    whole = math.fsum(parts)
    return [part / whole for part in parts]

"""The few nodes that elect the next controller when the present one is lost with its node. Pure.

An embedded controller dies with its node, and no other service is needed to find the next one: some nodes are its
*electors*. A candidate with the votes of more than half of them is the next controller, and a controller that less than
a majority hears decides nothing. So at most one controller decides, however the network is partitioned. A few electors
suffice, and the messages to all of them do not grow with the job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST = 5
_VERSIONS = 1 << 32
"""The number of versions of electors in one term."""
FEWEST = 3
"""With two nodes, none could tell a dead controller's node from a cut between them."""


@dataclass(frozen=True)
class Elector:
    """A node's agent in its present life (``incarnation``). ``peer``: HOST:PORT of its Peer service."""

    node: str
    peer: str
    incarnation: str


@dataclass(frozen=True)
class Eligible:
    """An elector and the failure domain of its node."""

    elector: Elector
    domain: str


def choose(nodes: Sequence[Eligible], leader: str, present: Sequence[Elector] = ()) -> tuple[Elector, ...]:
    """The electors out of the living ``nodes``: the controller's own node ``leader`` first, and an odd number.

    One that is an elector already stays one; the others are taken from as many failure domains as there are. None if
    there are fewer than three nodes, or ``leader`` is not among them (a controller outside the nodes is started again
    by whatever has started it).
    """
    by_name = {e.elector.node: e for e in nodes}
    if len(nodes) < FEWEST or leader not in by_name:
        return ()
    size = min(MOST, len(nodes) if len(nodes) % 2 else len(nodes) - 1)
    chosen = [by_name[leader]]
    rest = [e for e in nodes if e.elector.node != leader]
    while len(chosen) < size:
        used = [c.domain for c in chosen]
        best = min(rest, key=lambda e: (e.elector not in present, used.count(e.domain), e.elector.node))
        chosen.append(best)
        rest.remove(best)
    return tuple(e.elector for e in chosen)


def majority(of: int) -> int:
    """How many of ``of`` electors decide."""
    return of // 2 + 1


def decide(electors: Sequence[Elector], some: Collection[Elector]) -> bool:
    """Whether ``some`` are more than half of the ``electors``, if there are any."""
    return not electors or sum(e in some for e in electors) >= majority(len(electors))


def first_version(term: int) -> int:
    """The first version of the electors of a controller that is elected for ``term``: above all of the terms before."""
    return term * _VERSIONS

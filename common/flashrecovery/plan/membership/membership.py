"""Whether this node still belongs to the job, as far as it can tell. Pure; times are seconds.

When the controller declares a node dead, other nodes get its ranks. The node's own processes must have stopped before
that, or a rank would live twice. So when no heartbeat of the last ``lease_s`` has been answered, the agent tries the
controller's port, and asks other nodes to tell the controller that this node is alive:

* A node has told it, and the controller has answered: this counts as a heartbeat answered. Continue.
* The port accepts: the controller is there, but busy, and the next connection will tell. Continue for a moment, and for
  longer if others are reached. (Not if this agent was suspended so long that its ranks may have been reassigned: then
  the workers wait for an answer.)
* The port refuses the connection: the controller is dead, or a firewall rejects it. If others are reached, or there are
  no others, the controller is declared dead, and training continues without it. (Not if this agent was suspended and
  others have heard of a newer generation: the controller may have reassigned the ranks before it died.)
* Otherwise this side of a partition is the one without the controller. The workers are halted until it answers again,
  or another controller that knows the whole job does. One that still gathers may not know that they were reassigned.

*Others are reached* means more than half of the electors, if there are any, because then no other controller can have
been elected; otherwise one node. One case cannot be told from the death of an external controller: a firewall that
refuses connections to it for several nodes which reach each other.

A node that is cut off halts before its ranks are reassigned: :mod:`.leases` has the bounds, and the configuration is
checked for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from flashrecovery.plan.membership.electors import Elector, majority
from flashrecovery.plan.membership.leases import Limits

FRESH = 0.7
"""Part of the lease. A node that has not heard the controller for that long itself passes nothing on: it may have been
cut off at the same time, and a controller that is late would be even later."""
MUTE = 4.0
"""Times ``node_silence_s``. A controller whose port accepts but that says nothing is busy; if it is so for that long,
its process stands still, and it is its host's kernel that takes the connections."""


@dataclass(frozen=True)
class Seen:
    """A peer's answer. ``vouched``: the controller has learned from it that the asking node lives. ``controller``
    (HOST:PORT), of this ``term``: the one that it follows. ``generation``: the newest one of which it has heard."""

    peer: str
    reachable: bool
    evidence: str = ""
    vouched: bool = False
    term: int = 0
    controller: str = ""
    generation: int = 0


class Port(Enum):
    """What comes of a connection to the controller's port."""

    ACCEPTS = "accepts"
    REFUSES = "refused"
    SILENT = "silent"


class NodeStatus(Enum):
    """The verdict."""

    MEMBER = "member"
    ORPHANED = "the controller is dead"
    CUT_OFF = "cut off"


@dataclass(frozen=True)
class Reach:
    """Which have answered. ``enough``: others are reached as far as it takes to do without the controller. ``vouched``:
    the controller has been informed that this node lives."""

    enough: bool
    vouched: bool


def reach(seen: Sequence[Seen], electors: Collection[Elector], node: str) -> Reach:
    """The result of asking the others. ``node``: this one, which counts if it is an elector."""
    reached = {s.peer for s in seen if s.reachable}
    if electors:
        enough = sum(e.node == node or e.peer in reached for e in electors) >= majority(len(electors))
    else:
        enough = bool(reached) or not seen
    return Reach(enough, any(s.vouched for s in seen))


def node_status(port: Port, found: Reach, silent_s: float, limits: Limits) -> NodeStatus:
    """What follows from the answers. ``silent_s``: since the sending of the last heartbeat that was answered."""
    if found.vouched:
        return NodeStatus.MEMBER
    if port is Port.ACCEPTS and (found.enough or silent_s < limits.node_silence_s):
        return NodeStatus.MEMBER
    if port is Port.REFUSES and found.enough:
        return NodeStatus.ORPHANED
    return NodeStatus.CUT_OFF


def lost(found: NodeStatus, port: Port, silent_s: float, limits: Limits) -> bool:
    """Whether another controller may be elected. (An elector that hears this one still refuses.)"""
    if port is Port.REFUSES:
        return True
    if port is Port.ACCEPTS and silent_s >= MUTE * limits.node_silence_s:
        return True
    return found is not NodeStatus.MEMBER and silent_s >= limits.node_silence_s + limits.node_probe_s

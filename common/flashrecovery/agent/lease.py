"""Whether this node still belongs to the job, as far as it can tell. Pure; times are seconds.

A node that the controller takes for lost has its ranks given away; its own processes must have stopped before that,
or a rank would live twice. So when the controller has not been heard for ``lease_s``, the agent knocks at the
controller's door and asks its neighbours:

* the door opens, and the next connection will tell. Go on.
* a neighbour hears the controller: only the way from there to here is disturbed. The controller asks the same
  neighbours, and they vouch for this node. Go on.
* the controller's host refuses the connection: the controller is dead, and gives nothing away. Training goes on.
* otherwise this side of a partition is the one without the controller: the workers are halted until it answers again.

With the default time-outs a node that is cut off halts 0.63 s after the cut at the latest, and its ranks are given
away after 0.7 s at the earliest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum

from flashrecovery.agent.peers import Seen
from flashrecovery.config import Timeouts

FRESH = 0.7
"""Part of the lease. A neighbour whose own word from the controller is older vouches for nobody: it may have been cut
off at the same time."""
MUTE = 4.0
"""Times ``node_silence_s``. A controller whose door opens but who says nothing is busy; if it is so for that long, its
process stands still, and it is its host's kernel that takes the connections."""
LEASE_PROBE = 0.6
"""Part of ``node_probe_s`` for the questions: sooner over than the controller's, so that this node halts first."""


class Door(Enum):
    """What comes of a connection to the controller's port."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"


class Standing(Enum):
    """The verdict."""

    MEMBER = "member"
    ORPHANED = "the controller is dead"
    CUT_OFF = "cut off"


def standing(door: Door, neighbours: Sequence[Seen], lease_s: float) -> Standing:
    """What follows from the answers."""
    if door is Door.REFUSED:
        return Standing.ORPHANED
    if door is Door.OPEN or any(s.reachable and s.controller_age_s < FRESH * lease_s for s in neighbours):
        return Standing.MEMBER
    return Standing.CUT_OFF


def lost(found: Standing, door: Door, silent_s: float, limits: Timeouts) -> bool:
    """Whether another controller may be elected. (An elector that hears this one still refuses.)"""
    if door is Door.REFUSED:
        return True
    if door is Door.OPEN and silent_s >= MUTE * limits.node_silence_s:
        return True
    return found is not Standing.MEMBER and silent_s >= limits.node_silence_s + limits.node_probe_s


async def knock(host: str, port: int, timeout_s: float) -> Door:
    """Try to connect."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except ConnectionRefusedError:
        return Door.REFUSED
    except (asyncio.TimeoutError, OSError):
        return Door.SILENT
    writer.close()
    return Door.OPEN

"""The sums behind which process may believe what for how long: of nodes that belong to the job, and of the controller.
Pure.

Each process keeps its belief as an interval on its own clock, which begins when it *sends* a message
that the other side has answered or echoed. So it is never newer than what the other side knows, whatever was delayed on
the way, and however long one of them stood still, or its host was suspended (:mod:`flashrecovery.util.clock`).

* A node steps on after its last answered heartbeat for :func:`halts_after_s` at the most. The controller, which has got
  that heartbeat later than it was sent, gives the node's ranks away after ``node_silence_s`` at the earliest. The agent
  halts its workers; and because it may stand still itself, each worker begins to change its state only within
  :func:`works_for_s`, which its agent writes into its page. What is lent while there is no controller is longer, and is
  cut to that before the node registers with the next one: from there on that one counts its silence.
* A controller decides for :func:`decides_for_s` after the sending of the newest answer whose arrival its electors have
  confirmed. Each of them votes for another one ``lease_s`` after that arrival at the earliest.
"""

from __future__ import annotations

from typing import Protocol


class Limits(Protocol):
    """What :class:`flashrecovery.config.Timeouts` says, in seconds. A protocol, as that lies above."""

    @property
    def node_silence_s(self) -> float: ...

    @property
    def node_probe_s(self) -> float: ...

    @property
    def node_wait_s(self) -> float: ...


LOOK_S = 0.05
"""Pace of an agent's look at the clock while it does not hear its controller."""
NODE_PROBE = 0.8
"""Part of ``node_probe_s`` that an observer has to reach a silent node's agent; the rest is for its answer."""
LEASE_PROBE = 0.6
"""Part of ``node_probe_s`` that an agent has to ask others about its controller."""
_MARGIN = 0.9
"""Part of a time that may be used up by planning: timers come late."""
_DECIDES = 0.5
"""Part of ``node_silence_s``: a controller that is cut off together with a silent node decides nothing about it."""


def halts_after_s(lease_s: float, node_probe_s: float) -> float:
    """Seconds after which a node that is cut off has halted: its lease, a look at the clock, a round of questions."""
    return lease_s + LOOK_S + LEASE_PROBE * node_probe_s


def works_for_s(node_silence_s: float) -> float:
    """Seconds for which a worker may begin to change its state after the last answered heartbeat of its agent."""
    return _MARGIN * node_silence_s


def decides_for_s(node_silence_s: float) -> float:
    """Seconds for which a controller may decide without hearing from more than half of its electors."""
    return _DECIDES * node_silence_s


def complaint(lease_s: float, node_probe_s: float, node_silence_s: float) -> str:
    """What is wrong with these time-outs; empty: nothing."""
    given = f"lease_s = {lease_s:g}, node_probe_s = {node_probe_s:g}, node_silence_s = {node_silence_s:g}"
    halts_s, most_s = halts_after_s(lease_s, node_probe_s), _MARGIN * node_silence_s
    if halts_s > most_s:
        return (
            f"{given}: a node that is cut off would halt after {halts_s:.3g} s, and its ranks are given away after "
            f"node_silence_s; allowed: lease_s + {LOOK_S:g} + {LEASE_PROBE:g} * node_probe_s of at most {_MARGIN:g} * "
            f"node_silence_s = {most_s:.3g}"
        )
    decides_s = decides_for_s(node_silence_s)
    if decides_s > lease_s:
        return (
            f"{given}: an elector would vote for another controller after lease_s, while this one decides for "
            f"{decides_s:.3g} s; allowed: lease_s of at least {_DECIDES:g} * node_silence_s = {decides_s:.3g}"
        )
    return ""

"""How often an agent that does not hear its controller asks others about it, tries to connect, and sends heartbeats.
Seconds.

At first twenty times a second: a node that is cut off has to halt in time
(:mod:`flashrecovery.plan.membership.leases`), and an election takes two seconds. So it goes on for as long as the
answers let this node's workers step: what let them may be gone the next moment. A node that has halted, or whose
controller is dead, has nothing to lose by looking less often, after ``EAGER_S``, for as long as that lasts; an elector
then looks at the beginning of each of its turns, so none is missed.

``IDLE_S`` is less than the time for which a new controller waits for further agents (:mod:`..controller.takeover`).
"""

from __future__ import annotations

from flashrecovery.config import Timeouts
from flashrecovery.plan.membership.membership import NodeStatus

AGAIN_S = 0.1
"""Seconds from the end of a connection to the next attempt."""
EAGER_S = 5.0
"""Silence of the controller from which on less is enough."""
IDLE_S = 1.0
_SILENCE_S = 0.3
_SELDOM_S = 2.0


def next_question_s(node_status: NodeStatus, silent_s: float, turn_in_s: float, limits: Timeouts) -> float:
    """Seconds from one round of questions to the next. ``turn_in_s``: until this elector's next turn begins (inf: it
    has none)."""
    if node_status is NodeStatus.MEMBER or silent_s < EAGER_S:
        return 0.0
    return min(_idle_s(limits), turn_in_s)


def next_attempt_s(silent_s: float, limits: Timeouts, *, answered: bool) -> float:
    """Seconds from the end of a connection to the next attempt. ``answered``: the controller has said something in
    it."""
    return AGAIN_S if answered or silent_s < EAGER_S else _idle_s(limits)


def _idle_s(limits: Timeouts) -> float:
    return min(IDLE_S, limits.node_silence_s)


class Backoff:
    """How often heartbeats go on the stream while nothing comes back: the longer the silence, the seldomer.

    A controller that is late because it has too much to do would have even more with thousands of agents' heartbeats on
    their streams, and never catch up. One that only gets no datagrams answers on the stream, and there is no silence.
    """

    def __init__(self) -> None:
        self._next_at = 0.0

    def due(self, now: float, silent_s: float) -> bool:
        """Whether to send one now. ``silent_s``: since the controller was last heard, in any way."""
        if silent_s < _SILENCE_S:
            return True
        if now < self._next_at:
            return False
        self._next_at = now + min(silent_s, _SELDOM_S)
        return True

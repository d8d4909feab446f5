"""The controller's own heartbeats: each agent hears every ``heartbeat_s`` that it is there, and may decide or not.

An agent counts the controller's silence, as the controller counts the agent's. Most agents hear by datagram
(:mod:`flashrecovery.heartbeat.receiver`); the other agents send theirs on their streams, to this module. A stream costs
a few tenths of a millisecond a message, so each tick sends a limited number: however many agents there are, the
controller can still do its other work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from flashrecovery.controller.service.connections import Connections
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.proto import flashrecovery_pb2 as pb

_PER_TICK = 100


class ControllerHeartbeats:
    """All times: seconds of :func:`flashrecovery.util.clock.lease_clock`.

    ``heard_by_datagram(node, now)`` says whether ``node`` needs nothing on its stream; ``tick_s`` is the time from one
    :meth:`tick` to the next, and the shortest between two heartbeats to one agent.
    """

    def __init__(
        self,
        connections: Connections,
        job: JobState,
        heard_by_datagram: Callable[[str, float], bool],
        period_s: float,
        tick_s: float,
    ) -> None:
        self._connections = connections
        self._job = job
        self._heard_by_datagram = heard_by_datagram
        self._period_s = period_s
        self._tick_s = tick_s
        self._suspended = False
        self._told_at: dict[str, float] = {}
        self._left = _PER_TICK
        self._round_at = 0.0
        self._to_tell: dict[str, None] = {}

    @property
    def suspended(self) -> bool:
        """Whether the agents are informed that this controller must not decide anything."""
        return self._suspended

    def suspend(self, suspended: bool) -> bool:
        """Tell it to all agents with the next :meth:`tick`, whether they hear by datagram or not. False: no change."""
        if suspended is self._suspended:
            return False
        self._suspended, self._round_at, self._to_tell = suspended, 0.0, {}
        return True

    def message(self, gathering: bool) -> pb.Command:
        """The answer to an agent. ``gathering``: this controller waits for agents of a job that runs already."""
        heartbeat = pb.ControllerHeartbeat(suspended=self._suspended, gathering=gathering)
        return pb.Command(generation=self._job.generation, heartbeat=heartbeat)

    def answer(self, node: str, now: float, gathering: bool) -> None:
        """A heartbeat has come on a stream: answered at once, since the agent counts from it; if many come, later."""
        if self._left > 0 and now - self._told_at.get(node, float("-inf")) >= self._tick_s:
            self._left -= 1
            self._tell(node, now, gathering)
        else:
            self._to_tell[node] = None

    def tick(self, now: float, gathering: bool) -> None:
        """Inform the next agents that have to be informed."""
        connected = self._connections.connected()
        if not self._to_tell and now - self._round_at >= self._period_s:
            self._round_at = now
            self._to_tell = dict.fromkeys(n for n in connected if self._suspended or self._needs_one(n, now))
        told = list(itertools.islice(self._to_tell, _PER_TICK))
        self._left = _PER_TICK - len(told)
        for name in told:
            del self._to_tell[name]
            if self._connections.is_connected(name) and self._job.nodes[name].alive:
                self._tell(name, now, gathering)

    def _tell(self, node: str, now: float, gathering: bool) -> None:
        self._told_at[node] = now
        self._connections.links[node].send_now_or_never(self.message(gathering))

    def _needs_one(self, node: str, now: float) -> bool:
        """Whether this agent has heard nothing by datagram lately, nor in answer to its heartbeats on the stream."""
        told_at = self._told_at.get(node, float("-inf"))
        return not self._heard_by_datagram(node, now) and now - told_at >= self._period_s

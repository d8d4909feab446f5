"""Which agents connect to the controller directly, and which through another agent. Pure.

A recovery is five commands to every agent and their answers. One stream an agent makes that thousands of messages, each
with the cost of a network call; so with more than ``direct`` agents the others are asked to connect through one of
these, which carries all of its clients in one stream (:mod:`.sessions`, :mod:`flashrecovery.agent.peers.relay`). What
the controller decides is the same, and so is what a link guarantees. Signs of life go past the relays, as datagrams.

An agent whose relay is lost comes straight here at once, and is given another one when it is quiet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from flashrecovery.controller.service.connections import AgentConnection
from flashrecovery.controller.state.nodes import NodeRecord

_AGAIN_S = 60.0
"""Seconds for which an agent that could not reach a relay, or has lost it, is not assigned one again."""
_MOVING_S = 2.0
"""Seconds that a moving agent has from being told to its new connection; meanwhile the end of the old one means
nothing."""
_AT_ONCE = 50
"""The most agents that are redirected at the same time."""
_LOOK_AGAIN_S = 0.5
"""Seconds to the next check when no agent has to be redirected now."""


class Relays:
    """The relays of one job. ``direct``: how many agents may speak to the controller themselves, ``own``: the node of
    this process, if it has an agent. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, direct: int, own: str = "") -> None:
        self._direct = direct
        self._own = own
        self._told: dict[str, tuple[str, float]] = {}
        self._look_at = float("-inf")

    def is_moving(self, connection: AgentConnection, now: float) -> bool:
        """Whether ``connection`` ends because its agent was redirected."""
        relay, at = self._told.get(connection.node, ("", float("-inf")))
        return now - at < _MOVING_S and connection.via != relay

    def moves(
        self, connections: Collection[AgentConnection], nodes: Mapping[str, NodeRecord], now: float
    ) -> list[tuple[str, str]]:
        """(agent, its relay from now on): those that are to be told now. ``connections``: the newest of each node that
        has one."""
        if now < self._look_at:
            return []
        found = self._moves(connections, nodes, now)
        if not found:
            self._look_at = now + _LOOK_AGAIN_S
        return found

    def _moves(
        self, connections: Collection[AgentConnection], nodes: Mapping[str, NodeRecord], now: float
    ) -> list[tuple[str, str]]:
        straight = [c.node for c in connections if not c.via and nodes[c.node].alive]
        if len(straight) <= self._direct:
            return []
        carried = Counter(c.via for c in connections if c.via)
        stay = set(self._stay(straight, carried, nodes))
        relays = [n for n in stay if n != self._own and not nodes[n].doubt]
        found: list[tuple[str, str]] = []
        for node in straight:
            last, at = self._told.get(node, ("", float("-inf")))
            if node in stay or now - at < _AGAIN_S or len(found) == _AT_ONCE or not relays:
                continue
            domain = nodes[node].domain
            relay = min(relays, key=lambda n: (n == last, nodes[n].domain != domain, carried[n], n))
            carried[relay] += 1
            self._told[node] = (relay, now)
            found.append((node, relay))
        return found

    def _stay(self, straight: Iterable[str], carried: Mapping[str, int], nodes: Mapping[str, NodeRecord]) -> list[str]:
        """The agents that go on speaking for themselves: this process's own, those that carry others, and then, so that
        every agent has a relay nearby, the first of each failure domain, the second of each, and so on."""
        of_domain: Counter[str] = Counter()
        places: list[tuple[bool, bool, int, int, str]] = []
        for node in straight:
            domain = nodes[node].domain
            places.append((node != self._own, not carried.get(node), of_domain[domain], len(places), node))
            of_domain[domain] += 1
        return [node for *_, node in sorted(places)[: self._direct]]

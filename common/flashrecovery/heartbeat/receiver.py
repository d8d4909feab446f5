"""The controller's side: one socket for all agents, read in batches on the event loop.

A heartbeat says everything each time; what is made of it depends on what is going on. That the agent lives is noted at
once. The ranks' health goes to the machine as often as it is wanted (:meth:`Hearer.wanted_every_s`; that of rank 0, by
which checkpoints are announced, at once), because the machine's books are the most expensive part. In jobs of thousands
of nodes "at once" means as often as the controller can keep up with.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from dataclasses import dataclass, field
from typing import Protocol

from flashrecovery.heartbeat.wire import (
    ANSWER,
    ANSWERED,
    BEAT,
    ECHO,
    GONE,
    LIMIT,
    MAGIC,
    DatagramSeal,
    Header,
    Stream,
    ticket_of,
    unpack_ranks,
)
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.util.clock import lease_clock

_BATCH = 256
"""Datagrams that are read before the event loop gets its turn again."""
_BUFFER_BYTES = 8 << 20
"""Wished for the socket: while the loop is busy for a moment, heartbeats wait there. The kernel may give less."""
_FEED_S = 0.2e-3
"""What the books cost for one heartbeat, at the most: even where every one is wanted, all of them together may
not take more than one core."""
_FEW = 100
_COMPLAIN_S = 60.0
_ON_ITS_WAY_S = 2.0
"""A heartbeat of a connection that has ended is not worth a word for so long."""
_GRACE = 1.6
"""In heartbeat periods: an agent counts as heard by datagram if one came within this time."""

log = logging.getLogger("flashrecovery")


class Hearer(Protocol):
    """What the receiver tells of the heartbeats to. A protocol, as the controller lies above."""

    def hears(self, node: str, now: float, echo: float) -> bool:
        """A sign of life, which brings back the time of an answer, ``echo`` (0.0: of none); False if the node belongs
        to the job no more, and gets no answer."""

    def wanted_every_s(self) -> float:
        """How often the ranks' health is wanted now, seconds; 0: with every heartbeat."""

    def health(self, node: str, heartbeat: pb.Heartbeat) -> None:
        """The health of its ranks."""

    def connected(self, node: str) -> bool:
        """Whether ``node`` has a stream, so that messages can be sent to it."""

    def after_beats(self) -> None:
        """Called when health of a batch of heartbeats has been delivered."""


@dataclass(slots=True)
class _Agent:
    """One agent's connection."""

    node: str
    ticket: int
    seal: DatagramSeal
    stream: Stream
    counter: int = 0
    heard_at: float = float("-inf")
    fed_at: float = float("-inf")
    answered: bool = False
    watched: bool = True


@dataclass
class HeartbeatReceiver:
    """Begins with :meth:`open`. Without it, or if the port is taken, no agent is invited."""

    token: str
    hearer: Hearer
    period_s: float
    refused: int = 0
    """Datagrams of strangers."""
    _socket: socket.socket | None = None
    _port: int = 0
    _agents: dict[int, _Agent] = field(default_factory=dict)
    _by_node: dict[str, _Agent] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)  # ticket -> when, the oldest first
    _complained_at: float = float("-inf")

    def open(self, host: str, port: int) -> None:
        """Listen on the UDP port with the number of the TCP port, so that one rule of a firewall names both."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(found[0], socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            self._socket.bind(found[4])
        except OSError as e:
            self.close()
            log.warning("heartbeats go on the agents' streams: UDP %s:%d: %s", host, port, e.strerror)
            return
        self._port = port
        asyncio.get_running_loop().add_reader(self._socket, self.look)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._socket, self._port = None, 0

    def invite(self, node: str, stream: Stream) -> pb.ControllerHeartbeat:
        """The first word on a new connection: where to send heartbeats, and under which name and key."""
        self.forget(node)
        if self._socket is None:
            return pb.ControllerHeartbeat()
        ticket, salt = secrets.randbits(64), secrets.token_bytes(16)
        agent = _Agent(node, ticket, DatagramSeal(self.token, salt), stream)
        self._agents[ticket] = self._by_node[node] = agent
        return pb.ControllerHeartbeat(port=self._port, ticket=ticket, salt=salt)

    def forget(self, node: str) -> None:
        """The node's connection has ended, and with it the invitation."""
        agent = self._by_node.pop(node, None)
        if agent is None:
            return
        del self._agents[agent.ticket]
        now = lease_clock()
        while self._ended and now - next(iter(self._ended.values())) > _ON_ITS_WAY_S:
            del self._ended[next(iter(self._ended))]
        self._ended[agent.ticket] = now

    def gets_through(self, node: str, now: float) -> bool:
        """Whether ``node`` is heard and answered by datagram; if not, it needs a beat on its stream."""
        agent = self._by_node.get(node)
        return agent is not None and agent.answered and now - agent.heard_at < _GRACE * self.period_s

    def look(self) -> None:
        """Take what has arrived. Called when there is something, and in between by code that keeps the loop busy."""
        if self._socket is None:
            return
        listening = self._socket
        receive = listening.recvfrom
        wanted_every_s, fed = self.hearer.wanted_every_s(), False
        for _ in range(_BATCH):
            try:
                datagram, address = receive(LIMIT + 1)
            except BlockingIOError:
                break
            except OSError as e:
                log.debug("heartbeats: %s", e)  # what the network says about an answer that did not arrive
                continue
            # after the reading: what is noted as heard at this time was not sent later
            fed |= self._take(listening, datagram, address, wanted_every_s, lease_clock())
        if fed:
            self.hearer.after_beats()

    def _take(
        self, by: socket.socket, datagram: bytes, address: tuple[object, ...], wanted_every_s: float, now: float
    ) -> bool:
        """One datagram; whether it has fed the machine."""
        ticket = ticket_of(datagram)
        agent = self._agents.get(ticket) if ticket is not None else None
        header = agent.seal.open(datagram, BEAT) if agent is not None else None
        if agent is None or header is None:
            if now - self._ended.get(ticket or 0, float("-inf")) > _ON_ITS_WAY_S:
                self._refuse(address, now)
            return False
        if header.counter <= agent.counter:
            return False  # comes late, or again
        agent.counter = header.counter
        if not self.hearer.hears(agent.node, now, header.stamp):
            return False
        agent.heard_at, agent.answered = now, bool(header.flags & ANSWERED)
        agent.stream.acknowledge(header.received)
        if header.flags & ECHO:
            return False
        self._answer(by, agent, header, address, now)
        at_once_s = len(self._agents) * _FEED_S if len(self._agents) > _FEW else 0.0
        every_s = at_once_s if agent.watched else max(at_once_s, wanted_every_s)
        if not header.ranks or now - agent.fed_at < every_s:
            return False
        heartbeat = pb.Heartbeat(
            generation=header.generation, ranks=unpack_ranks(datagram), tokens_per_step=header.tokens
        )
        agent.fed_at, agent.watched = now, _is_watched(heartbeat)
        self.hearer.health(agent.node, heartbeat)
        return True

    def _answer(
        self, by: socket.socket, agent: _Agent, header: Header, address: tuple[object, ...], now: float
    ) -> None:
        stream = agent.stream
        flags = 0 if self.hearer.connected(agent.node) else GONE
        answer = Header(MAGIC, ANSWER, flags, 0, agent.ticket, header.counter, stream.received, stream.sent, 0, now)
        try:
            by.sendto(agent.seal.close(answer), address)
        except OSError as e:  # the agent asks again
            log.debug("heartbeats: no answer to %s: %s", agent.node, e)

    def _refuse(self, address: tuple[object, ...], now: float) -> None:
        """A datagram that is none of ours, or of a connection that has long ended: no answer, nothing changes."""
        self.refused += 1
        if now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            log.warning(
                "a datagram from %s with a wrong ticket or digest was refused (%d so far)", address, self.refused
            )


def _is_watched(heartbeat: pb.Heartbeat) -> bool:
    """Whether the next heartbeat of this agent counts at once."""
    return any(r.rank == 0 for r in heartbeat.ranks)

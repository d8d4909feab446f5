"""The heartbeats of all simulated agents of one process, for :mod:`simulated_agents`.

The datagrams are what real agents send, at their pace, but from one socket and with the ranks packed once for a while:
these processes share the machine with the controller that is measured, and are not what is measured.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flashrecovery.agent.controller_link.backoff import Backoff
from flashrecovery.heartbeat.wire import (
    ANSWERED,
    BEAT,
    LIMIT,
    MAGIC,
    DatagramSeal,
    Header,
    Stream,
    pack_ranks,
    ticket_of,
)
from flashrecovery.proto import flashrecovery_pb2 as pb

PERIOD_S = 0.25
_RECEIVED = struct.Struct("<24xQ")
_SLOTS = 25
"""Real agents do not beat in step, either."""
_PACKED_S = 0.5
_THROUGH_S = 5.0
"""Longer than for real agents: with thousands of them in one process it is they that are late."""


def received_of(datagram: bytes) -> int:
    """The newest message that the controller has got, by its answer."""
    number: int = _RECEIVED.unpack_from(datagram)[0]
    return number


@dataclass
class Beating:
    """One agent: how its ranks are, and what to do if no answer has come."""

    stream: Stream
    look: Callable[[], pb.Heartbeat]
    unanswered: Callable[[pb.Heartbeat], None]
    ticket: int = 0
    seal: DatagramSeal | None = None
    counter: int = 0
    answered_at: float = float("-inf")
    heard_at: float = float("-inf")
    backoff: Backoff = field(default_factory=Backoff)
    _packed: tuple[pb.Heartbeat, int, bytes] | None = None
    _packed_at: float = 0.0

    def changed(self) -> None:
        """Its ranks have been told something."""
        self._packed = None

    def packed(self, now: float) -> tuple[pb.Heartbeat, int, bytes]:
        if self._packed is None or now - self._packed_at >= _PACKED_S:
            heartbeat = self.look()
            ((number, ranks),) = pack_ranks(heartbeat.ranks)
            self._packed, self._packed_at = (heartbeat, number, ranks), now
        return self._packed


@dataclass
class Beats:
    """Of one process."""

    agents: Sequence[Beating] = ()
    sent: int = 0
    _socket: socket.socket | None = None
    _by_ticket: dict[int, Beating] = field(default_factory=dict)

    def invited(self, agent: Beating, host: str, beat: pb.ControllerHeartbeat) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            self._socket.connect((host, beat.port))
            asyncio.get_running_loop().add_reader(self._socket, self._read)
        agent.ticket, agent.seal, agent.counter = beat.ticket, DatagramSeal("", beat.salt), 0
        self._by_ticket[beat.ticket] = agent

    async def run(self) -> None:
        slot = 0
        due = time.monotonic()
        while True:
            now = time.monotonic()
            for agent in self.agents[slot::_SLOTS]:
                self._beat(agent, now)
            slot = (slot + 1) % _SLOTS
            due = max(due + PERIOD_S / _SLOTS, now)
            await asyncio.sleep(due - time.monotonic())

    def _beat(self, agent: Beating, now: float) -> None:
        heartbeat, number, ranks = agent.packed(now)
        through = now - agent.answered_at < _THROUGH_S
        if not through and agent.backoff.due(now, now - max(agent.answered_at, agent.heard_at)):
            agent.unanswered(heartbeat)
        if self._socket is None or agent.seal is None:
            return
        agent.counter += 1
        flags, stream = (ANSWERED if through else 0), agent.stream
        header = Header(
            MAGIC,
            BEAT,
            flags,
            number,
            agent.ticket,
            agent.counter,
            stream.received,
            stream.sent,
            heartbeat.generation,
        )
        try:
            self._socket.send(agent.seal.close(header, ranks))
            self.sent += 1
        except OSError as e:
            print(f"# heartbeat not sent: {e}", flush=True)

    def _read(self) -> None:
        assert self._socket is not None
        now = time.monotonic()
        while True:
            try:
                datagram = self._socket.recv(LIMIT)
            except BlockingIOError:
                return
            except OSError as e:
                print(f"# answers: {e}", flush=True)
                return
            agent = self._by_ticket.get(ticket_of(datagram) or 0)
            if agent is not None:  # real agents check the digest, too
                agent.answered_at = now
                agent.stream.acknowledge(received_of(datagram))

"""The agent's side: sends heartbeats, and counts the controller as heard at the time of the heartbeat that it answers.

Not at the time of the answer: an answer that lay in a buffer while this process was stopped says nothing about now. So
what the agent believes is never newer than what the controller knows of it, and a node that is cut off halts before its
ranks are given away, whatever the delay.

An answer carries the controller's own time, and every heartbeat brings the newest such back: by it the controller knows
how long it has been heard for certain. Its electors bring it back at once.

One lost datagram is none: without an answer the heartbeat is sent again, twice within a period. What stays unanswered
goes on the stream, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from flashrecovery.heartbeat.wire import (
    ANSWER,
    ANSWERED,
    BEAT,
    ECHO,
    GONE,
    MAGIC,
    DatagramSeal,
    Header,
    Stream,
    pack_ranks,
)
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.util.clock import lease_clock

_AGAIN_S = 0.08
_TRIES = 3
_THROUGH_S = 0.2
"""A heartbeat unanswered for this long: datagrams do not get through (any more)."""
_STUCK_S = 5.0
"""Datagrams get through, but the stream does not move: it is dead without a word, and a new one is needed."""
_STUCK_CARRIED_S = 1.0
"""The same for a stream that another agent carries: there a direct one is the better way."""
_BUSY_S = 0.5
"""Between two answers, of which no more than this counts: the controller itself has been busy."""
_REMEMBERED = 64

log = logging.getLogger("flashrecovery")


class HeartbeatSender(asyncio.DatagramProtocol):
    """Sends one agent's heartbeats. ``heard``: called with the time (:func:`.lease_clock`) at which the controller
    lived for certain; ``stuck``: called when the stream has to be replaced by a new one."""

    def __init__(self, token: str, heard: Callable[[float], None], stuck: Callable[[], None]) -> None:
        self._token = token
        self._heard = heard
        self._stuck = stuck
        self._transport: asyncio.DatagramTransport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._seal: DatagramSeal | None = None
        self._ticket = 0
        self._counter = 0
        self._proven = False
        self._waiting: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._again: asyncio.TimerHandle | None = None
        self._stuck_after_s = _STUCK_S
        self._moved_to = (-1, -1)
        self._still_s, self._looked_at = 0.0, 0.0
        self._stamp = 0.0
        self._echoes = False

    def ask_for_echoes(self, *, wanted: bool) -> None:
        """Whether the controller's time is to be brought back at once: it counts on this agent (an elector)."""
        self._echoes = wanted

    # -- with the connection ----------------------------------------------------------------------

    def invited(self, host: str, beat: pb.ControllerHeartbeat, stream: Stream, *, carried: bool = False) -> None:
        """The controller would take datagrams of this connection; without a port it would not. ``carried``: another
        agent carries its stream."""
        self.forget()
        self._stuck_after_s = _STUCK_CARRIED_S if carried else _STUCK_S
        if beat.port:
            self._ticket, self._seal, self._stream = beat.ticket, DatagramSeal(self._token, beat.salt), stream
            self._opening = asyncio.create_task(self._open(host, beat.port))

    async def _open(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=(host, port))
        except OSError as e:
            log.info("heartbeats go on the stream: no datagrams to %s:%d: %s", host, port, e)
            return
        self._transport = transport

    def forget(self) -> None:
        """The connection has ended, and with it the invitation."""
        if self._opening is not None:
            self._opening.cancel()
        if self._again is not None:
            self._again.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._opening = self._again = self._transport = self._stream = self._seal = None
        self._counter, self._proven = 0, False
        self._moved_to = (-1, -1)
        self._still_s, self._looked_at = 0.0, 0.0
        self._stamp = 0.0
        self._waiting.clear()

    # -- heartbeats -------------------------------------------------------------------------------

    def carry(self, heartbeat: pb.Heartbeat) -> bool:
        """Send it; False if it had better go on the stream, too."""
        if self._transport is None:
            return False
        through = self._through(lease_clock())
        self._send(heartbeat, _TRIES if through else 1)
        return through

    def _through(self, now: float) -> bool:
        return self._proven and (not self._waiting or now - self._waiting[0][1] < _THROUGH_S)

    def _send(self, heartbeat: pb.Heartbeat, tries: int) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._transport is None:
            return
        now = lease_clock()
        for number, ranks in pack_ranks(heartbeat.ranks):
            self._put(0, number, ranks, heartbeat.generation, now, heartbeat.tokens_per_step)
            self._waiting.append((self._counter, now))
        if tries > 1:
            self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self._send, heartbeat, tries - 1)

    def _put(self, flags: int, number: int, ranks: bytes, generation: int, now: float, tokens: int = 0) -> None:
        """One datagram."""
        if self._transport is None or self._seal is None or self._stream is None:
            return
        self._counter += 1
        flags |= ANSWERED if self._through(now) else 0
        received, sent = self._stream.received, self._stream.sent
        header = Header(
            MAGIC, BEAT, flags, number, self._ticket, self._counter, received, sent, generation, self._stamp, tokens
        )
        self._transport.sendto(self._seal.close(header, ranks))

    # -- asyncio.DatagramProtocol -----------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: object) -> None:
        """An answer, if it is one. The socket takes datagrams of the controller's address only."""
        header = self._seal.open(data, ANSWER) if self._seal is not None else None
        if header is None or self._stream is None or header.ticket != self._ticket:
            return
        sent_at = None
        while self._waiting and self._waiting[0][0] <= header.counter:
            counter, at = self._waiting.popleft()
            sent_at = at if counter == header.counter else sent_at
        if sent_at is None:
            return  # answered already
        self._proven, self._stamp = True, max(self._stamp, header.stamp)
        if not self._waiting and self._again is not None:
            self._again.cancel()
            self._again = None
        self._heard(sent_at)
        if self._echoes:
            self._put(ECHO, 0, b"", 0, lease_clock())
        if header.flags & GONE:
            self._stuck()
        elif self._stream is not None:
            self._stream.acknowledge(header.received)
            self._look_at_stream(self._stream, header, time.monotonic())

    def error_received(self, exc: Exception) -> None:
        """The way there, or the port, is closed; heartbeats go on the stream, too, until answers come."""
        log.debug("heartbeats: %s", exc)

    def _look_at_stream(self, stream: Stream, header: Header, now: float) -> None:
        here, there = stream.received, header.received
        since_s, self._looked_at = min(now - self._looked_at, _BUSY_S), now
        if (here, there) != self._moved_to or (here >= header.sent and there >= stream.sent):
            self._moved_to, self._still_s = (here, there), 0.0
            return
        self._still_s += since_s
        if self._still_s >= self._stuck_after_s:
            log.warning("heartbeats reach the controller, but the stream has not moved for %.1f s", self._still_s)
            self._still_s = 0.0
            self._stuck()

"""One side of the stream between controller and agent: nothing is lost and nothing comes twice when it breaks.

Messages are numbered and kept until the other side has acknowledged them; after a break what is left is sent again, and
what has arrived already is dropped. Acknowledgements ride on the heartbeats that both sides send anyway, on the stream
or as datagrams (:mod:`flashrecovery.heartbeat`).

Every message says when it went out, and which sending time of the other side has been the newest to arrive; so each
side knows for certain up to when it has been heard (:attr:`Link.echoed_at`, see
:mod:`flashrecovery.plan.membership.leases`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar

from flashrecovery.util.clock import lease_clock


class Numbered(Protocol):
    """A message that a link carries (``AgentMessage``, ``Command``)."""

    sequence: int
    acknowledged: int
    sent_at: float
    echo: float


Out = TypeVar("Out", bound=Numbered)
In = TypeVar("In", bound=Numbered)


class Link(Generic[Out, In]):
    """Used on one event loop."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0
        self._unacknowledged: deque[Out] = deque()
        self._theirs = 0.0
        self.echoed_at = 0.0
        """The newest sending time of this side, by :func:`.lease_clock`, that has come back; 0.0: none."""
        self._put: Callable[[Out | None], None] = _nowhere

    def send(self, message: Out) -> None:
        """Send ``message`` so that it arrives for certain, in order."""
        self._sent += 1
        message.sequence = self._sent
        self._unacknowledged.append(message)
        self._put(message)

    def send_now_or_never(self, message: Out) -> None:
        """A heartbeat: the next one makes up for it."""
        self._put(message)

    def attach(self, put: Callable[[Out | None], None]) -> None:
        """There is a new connection: ``put`` gets its messages, and None at its end, which the one before it gets now.
        Before a message goes out, :meth:`stamp` it."""
        self._put(None)
        self._put = put
        for message in self._unacknowledged:
            put(message)

    def stamp(self, message: Out) -> Out:
        """Have ``message``, which goes out now, say what has arrived here."""
        message.acknowledged = self._received
        message.sent_at, message.echo = lease_clock(), self._theirs
        return message

    async def outgoing(self) -> AsyncGenerator[Out, None]:
        """The messages of one connection, which end when there is a newer one."""
        queue: asyncio.Queue[Out | None] = asyncio.Queue()
        self.attach(queue.put_nowait)
        while (taken := await queue.get()) is not None:
            yield self.stamp(taken)

    @property
    def sent(self) -> int:
        """Number of the newest message that is to arrive for certain."""
        return self._sent

    @property
    def received(self) -> int:
        """Number of the newest message from the other side."""
        return self._received

    def acknowledge(self, number: int) -> None:
        """The other side has got every message up to this one."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= number:
            self._unacknowledged.popleft()

    def accept(self, message: In) -> bool:
        """Whether ``message`` is new."""
        self.acknowledge(message.acknowledged)
        self._theirs = max(self._theirs, message.sent_at)
        self.echoed_at = max(self.echoed_at, message.echo)
        if message.sequence == 0:
            return True
        if message.sequence <= self._received:
            return False
        self._received = message.sequence
        return True

    def close(self) -> None:
        """The present connection ends when what is queued has been handed over."""
        self._put(None)

    def settled(self) -> bool:
        """Everything has been acknowledged."""
        return not self._unacknowledged


def _nowhere(message: object) -> None:
    """Takes messages while there has been no connection yet; those that are to arrive for certain wait in the link."""

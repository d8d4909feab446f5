"""The answers of one node's ranks to one batch of commands, in one message.

What an agent says stays in order: anything else that it has to say first sends the answers that are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from flashrecovery.proto import flashrecovery_pb2 as pb

_ANSWERED = ("hold", "stop", "regroup", "restore", "resume")
"""Commands that a worker answers with a Reply."""


class Gather:
    """Between the agent and ``send``."""

    def __init__(self, send: Callable[[pb.AgentMessage], None]) -> None:
        self._send = send
        self._expected: set[int] = set()
        self._held: list[pb.Reply] = []
        self._within_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, commands: Iterable[pb.Command], within_s: float) -> None:
        """Answers to these may wait for each other for ``within_s`` seconds from the first one on."""
        self.flush()
        answered = (c.serial for c in commands if c.WhichOneof("body") in _ANSWERED)
        self._expected = set(answered) if within_s > 0 else set()
        self._within_s = within_s

    def send(self, message: pb.AgentMessage) -> None:
        """Now, or with the other answers."""
        if message.WhichOneof("body") != "reply" or message.reply.serial not in self._expected:
            self.flush()
            self._send(message)
            return
        self._expected.discard(message.reply.serial)
        self._held.append(message.reply)
        if not self._expected or message.reply.error_type:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self.flush)

    def flush(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if len(held) == 1:
            self._send(pb.AgentMessage(reply=held[0]))
        elif held:
            self._send(pb.AgentMessage(replies=pb.Replies(replies=held)))

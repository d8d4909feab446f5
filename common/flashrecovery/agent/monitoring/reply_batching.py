"""The answers of one node's ranks to one batch of commands, in one message; equal answers are said once.

What an agent says stays in order: anything else that it has to say first sends the answers that are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from flashrecovery.proto import flashrecovery_pb2 as pb

_ANSWERED = ("hold", "stop", "regroup", "restore", "resume")
"""Commands that a worker answers with a Reply."""


def singly(command: pb.Command) -> Iterator[pb.Command]:
    """One command for each of its ranks."""
    for rank in command.ranks:
        one = pb.Command()
        one.CopyFrom(command)
        del one.ranks[:]
        one.rank = rank
        yield one


def alike(replies: Iterable[pb.Reply]) -> list[pb.Reply]:
    """The same answers in fewer messages: those that differ in the rank, and in what it holds and needs, become one."""
    together: dict[bytes, list[pb.Reply]] = {}
    for reply in replies:
        bare = pb.Reply()
        bare.CopyFrom(reply)
        for name in ("rank", "held", "needs"):
            bare.ClearField(name)
        together.setdefault(bare.SerializeToString(deterministic=True), []).append(reply)
    return [_one(same) for same in together.values()]


def _one(same: Sequence[pb.Reply]) -> pb.Reply:
    first = same[0]
    own = [pb.OwnState(rank=reply.rank, held=reply.held, needs=reply.needs) for reply in same]
    if any(one.held != own[0].held or one.needs != own[0].needs for one in own):
        first.ClearField("held")
        first.ClearField("needs")
        first.own.extend(own)
    first.also.extend(reply.rank for reply in same[1:])
    return first


class Gather:
    """Stands between the agent and ``send``: holds answers for a moment, so that they can go out together."""

    def __init__(self, send: Callable[[pb.AgentMessage], None]) -> None:
        self._send = send
        self._expected: set[tuple[int, int]] = set()
        self._held: list[pb.Reply] = []
        self._within_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, commands: Iterable[pb.Command], within_s: float) -> None:
        """Answers to these may wait for each other for ``within_s`` seconds from the first one on."""
        self.flush()
        asked = [c for c in commands if c.WhichOneof("body") in _ANSWERED]
        answers = ((c.serial, rank) for c in asked for rank in (c.ranks or [c.rank]))
        self._expected = set(answers) if within_s > 0 else set()
        self._within_s = within_s

    def send(self, message: pb.AgentMessage) -> None:
        """Send ``message`` now, or together with the other answers."""
        key = (message.reply.serial, message.reply.rank)
        if message.WhichOneof("body") != "reply" or key not in self._expected:
            self.flush()
            self._send(message)
            return
        self._expected.discard(key)
        self._held.append(message.reply)
        if not self._expected or message.reply.error_type:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self.flush)

    def flush(self) -> None:
        """Send what is held, without waiting any longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = alike(self._held), []
        if len(held) == 1:
            self._send(pb.AgentMessage(reply=held[0]))
        elif held:
            self._send(pb.AgentMessage(replies=pb.Replies(replies=held)))

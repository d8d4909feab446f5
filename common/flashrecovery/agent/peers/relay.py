"""This agent as a relay: it carries other agents' sessions to the controller, all of them in one stream.

It looks into none of the messages and keeps none: whatever is on its way when it ends, or when its stream breaks, is
sent again on the next connection of the agent that it concerns (:mod:`flashrecovery.runtime.link`). Then every session
that it has carried ends, and its agent connects to the controller itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from flashrecovery.errors import AuthenticationError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.rpc.message_auth import SealedCall

_CONNECT_S = 5.0
_GATHER_S = 1e-3
"""What several agents say within this time goes up as one message."""

log = logging.getLogger("flashrecovery")


class Relay:
    """The relay of the agent on ``node``: it carries other agents' sessions to the controller, once it follows one."""

    def __init__(self, node: str, access: Access) -> None:
        self._node = node
        self._access = access
        self._controller = ("", "")
        self._stream: _Stream | None = None

    def follow(self, address: str, incarnation: str) -> None:
        """From now on the controller at ``address`` (HOST:PORT) is this agent's. Sessions with another one end."""
        if self._controller != (address, incarnation):
            self.close()
            self._controller = (address, incarnation)

    def carries_to(self, incarnation: str) -> bool:
        """Whether it follows this controller, so that an agent that follows it, too, may go through here."""
        return bool(incarnation) and self._controller[1] == incarnation

    async def converse(self, messages: AsyncIterator[pb.AgentMessage]) -> AsyncGenerator[pb.DownFrame, None]:
        """One agent's session, until either side ends it; a refusal comes in the last frame."""
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._node, self._controller[0], self._access)
        stream = self._stream
        line, heard = stream.begin()
        speaking = asyncio.create_task(_speak(messages, stream, line))
        try:
            while (frame := await heard.get()) is not None:
                yield frame
                if frame.ended:
                    return
        finally:
            speaking.cancel()
            stream.end(line)

    def close(self) -> None:
        """Carry no sessions any more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


async def _speak(messages: AsyncIterator[pb.AgentMessage], stream: _Stream, line: int) -> None:
    async for message in messages:
        stream.put(pb.UpFrame(line=line, message=message))
    stream.end(line)


class _Stream:
    """One stream to the controller at ``address``, and the lines in it."""

    def __init__(self, node: str, address: str, access: Access) -> None:
        self._node = node
        self._lines: dict[int, asyncio.Queue[pb.DownFrame | None]] = {}
        self._numbers = itertools.count(1)
        self._frames: list[pb.UpFrame] = []
        self._wake = asyncio.Event()
        self.over = False
        self._task = asyncio.create_task(self._run(address, access))

    def begin(self) -> tuple[int, asyncio.Queue[pb.DownFrame | None]]:
        """A new line: its number, and what the controller says on it (None: the stream has ended)."""
        line = next(self._numbers)
        queue: asyncio.Queue[pb.DownFrame | None] = asyncio.Queue()
        self._lines[line] = queue
        if self.over:
            queue.put_nowait(None)
        return line, queue

    def put(self, frame: pb.UpFrame) -> None:
        """Send ``frame`` to the controller with the next message."""
        self._frames.append(frame)
        self._wake.set()

    def end(self, line: int) -> None:
        """The agent has left."""
        if self._lines.pop(line, None) is not None:
            self.put(pb.UpFrame(line=line, ended=True))

    def close(self) -> None:
        """End it."""
        self._task.cancel()
        self._finish()

    def _finish(self) -> None:
        self.over = True
        for queue in self._lines.values():
            queue.put_nowait(None)

    async def _run(self, address: str, access: Access) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            async with access.dial(address, CONTROLLER, _CONNECT_S) as channel:
                call = rpc.ControllerStub(channel).Trunk()
                downward: pb.Downward
                writer = asyncio.create_task(self._write(call))
                async for downward in call:
                    for frame in downward.frames:
                        queue = self._lines.get(frame.line)
                        if queue is not None:
                            queue.put_nowait(frame)
        except grpc.aio.AioRpcError as e:
            log.info("the stream that carries other agents to %s has ended: %s", address, e.code().name)
        except AuthenticationError as e:
            log.warning("the stream that carries other agents has ended: %s", e)
        finally:
            self._finish()
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await writer

    async def _write(self, call: SealedCall) -> None:
        name = self._node  # in the first one only
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S if len(self._lines) > 1 else 0)
            self._wake.clear()
            frames, self._frames = self._frames, []
            await call.write(pb.Upward(relay=name, frames=frames))
            name = ""

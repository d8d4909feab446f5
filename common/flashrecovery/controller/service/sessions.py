"""The agents' sessions, direct or through a relay: from the first message, a Register, to the connection's end.

All sessions are alike: a direct one has its own stream; a relay carries many of the others in one
(:class:`Trunk`), where each is a *line* with a number. If a relay's stream ends, that says nothing about the agents on
its lines: they stay alive by their heartbeats, which go past it, and connect again another way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from flashrecovery.controller.machine import Machine
from flashrecovery.controller.membership.admission import Refusal, refusal
from flashrecovery.controller.service.connections import AgentConnection, Connections
from flashrecovery.controller.service.relays import Relays
from flashrecovery.heartbeat.receiver import HeartbeatReceiver
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.util.clock import lease_clock

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_REGISTER_S = 10.0
"""A connection that has not said whose it is by then is closed."""
_FRAMES = 200
"""The most frames in one message of a relay's stream, so that none becomes too large."""


class SessionEvents(Protocol):
    """What the sessions tell the controller's service. A protocol, as it lies above, and makes them."""

    def greet(self, connection: AgentConnection) -> pb.Command:
        """The first word on a new connection of a node that belongs to the job."""

    def deliver(self, message: pb.AgentMessage, node: str) -> None:
        """A message for the machine."""

    def echoed(self, node: str, sent_at: float) -> None:
        """The agent has received what was sent at this time (0.0: nothing yet)."""

    def act(self) -> None:
        """Carry out what the machine wants now."""

    def deciding(self) -> AbstractContextManager[None]:
        """Around what the machine makes of a message: an error in that ends the job, and not only this connection."""


class Sessions:
    """The sessions of all agents. ``settings``: the controller's own, by key, which every agent must have alike."""

    def __init__(
        self,
        listener: SessionEvents,
        machine: Machine,
        agents: Connections,
        liveness: Liveness,
        beats: HeartbeatReceiver,
        relays: Relays,
        settings: Mapping[str, str],
    ) -> None:
        self._listener = listener
        self._machine = machine
        self._agents = agents
        self._liveness = liveness
        self._heartbeats = beats
        self._relays = relays
        self._settings = settings
        self._trunks: dict[str, Trunk] = {}

    # -- a stream each ----------------------------------------------------------------------------

    async def straight(
        self, messages: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncGenerator[pb.Command, None]:
        """One connection of an agent. A newer one of the same node takes its place."""
        try:
            first = await asyncio.wait_for(anext(messages), _REGISTER_S)
        except (asyncio.TimeoutError, StopAsyncIteration):
            return
        connection = self.open(first)
        if isinstance(connection, Refusal):
            yield connection.command()
            return
        reader = asyncio.create_task(self._read(messages, connection))
        try:
            welcome = self.welcome(connection)
            if welcome is not None:
                yield connection.link.stamp(welcome)
            async for command in connection.link.outgoing():
                if not self._agents.is_newest(connection):
                    return
                yield command
        finally:
            reader.cancel()
            self.close(connection)

    async def _read(self, messages: AsyncIterator[pb.AgentMessage], connection: AgentConnection) -> None:
        async for message in messages:
            with self._listener.deciding():
                self.take(connection, message)
                self._listener.act()

    # -- many in one ------------------------------------------------------------------------------

    async def carried(self, messages: AsyncIterator[pb.Upward], context: Context) -> AsyncGenerator[pb.Downward, None]:
        """One connection of a relay. A newer one of the same relay takes its place."""
        try:
            first = await asyncio.wait_for(anext(messages), _REGISTER_S)
        except (asyncio.TimeoutError, StopAsyncIteration):
            return
        record = self._machine.job.nodes.get(first.relay)
        if record is None or not record.alive:
            text = f"a relay must be a node of this job, and {first.relay!r} is none"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        self.cut(first.relay)
        trunk = self._trunks[first.relay] = Trunk(self, first.relay)
        with self._listener.deciding():
            trunk.take(first)
            self._listener.act()
        reader = asyncio.create_task(self._read_trunk(messages, trunk))
        try:
            async for downward in trunk.outgoing():
                yield downward
        finally:
            reader.cancel()
            trunk.end()
            if self._trunks.get(first.relay) is trunk:
                del self._trunks[first.relay]

    async def _read_trunk(self, messages: AsyncIterator[pb.Upward], trunk: Trunk) -> None:
        try:
            async for upward in messages:
                with self._listener.deciding():
                    trunk.take(upward)
                    self._listener.act()
        finally:
            trunk.end()

    def cut(self, relay: str) -> None:
        """The node is lost, or has another stream: those that it has carried are not connected any more."""
        trunk = self._trunks.pop(relay, None)
        if trunk is not None:
            trunk.end()

    # -- one connection, whichever way it comes ---------------------------------------------------

    def open(self, first: pb.AgentMessage, via: str = "") -> AgentConnection | Refusal:
        """An agent has said its first word. ``via``: the relay's node."""
        if first.WhichOneof("body") != "register" or not first.register.node:
            return Refusal(grpc.StatusCode.INVALID_ARGUMENT, "the first message of an agent must be Register")
        node, now = first.register.node, lease_clock()
        known = self._machine.job.nodes.get(node)
        there = self._agents.is_connected(node) and not self._liveness.silent(node, now)
        given_up = self._machine.job.given_up.get(node, "")
        only = self._only_node()
        refused = refusal(first.register, self._settings, known, there=there, only=only, given_up=given_up)
        if refused is not None:
            return refused
        connection = AgentConnection(
            node, self._agents.link_of(first.register, lost=known is not None and not known.alive), via
        )
        self._agents.open(connection)
        connection.link.accept(first)
        self._liveness.heard(node, now)
        with self._listener.deciding():
            self._machine.on_register(first.register, time.monotonic())
            self._listener.echoed(node, connection.link.echoed_at)
            self._listener.act()
        if node not in self._machine.job.nodes:  # by an error, which has ended the job
            self._agents.ended(connection)
            return Refusal(grpc.StatusCode.INTERNAL, self._machine.job.failure_reason)
        return connection

    def _only_node(self) -> str:
        """The node of a job that has no other one, as far as it is not lost; "": there may be others."""
        if self._machine.job.config.several_nodes:
            return ""
        return next((n.name for n in self._machine.job.nodes.values() if n.alive), "")

    def welcome(self, connection: AgentConnection) -> pb.Command | None:
        """The first word back; None for a node that is to be fenced first."""
        alive = self._machine.job.nodes[connection.node].alive
        return self._listener.greet(connection) if alive else None

    def take(self, connection: AgentConnection, message: pb.AgentMessage) -> None:
        """A message has come."""
        node = connection.node
        if not connection.link.accept(message):
            return
        record = self._machine.job.nodes.get(node)
        if record is None or not record.alive:
            return  # declared dead: its ranks belong to others now
        self._liveness.heard(node, lease_clock())
        if self._agents.is_newest(connection):
            self._listener.echoed(node, connection.link.echoed_at)
        self._listener.deliver(message, node)

    def close(self, connection: AgentConnection, *, blameless: bool = False) -> None:
        """``connection`` has ended; ``blameless``: not because of its agent, which comes another way."""
        node = connection.node
        ended = self._agents.ended(connection, blameless=blameless)
        if ended and not blameless and not self._relays.is_moving(connection, time.monotonic()):
            if not connection.via:  # a carried one may not know it: if it lives, its next heartbeat tells both sides
                self._heartbeats.forget(node)
            self._liveness.disconnected(node)


class Trunk:
    """One relay's stream."""

    def __init__(self, sessions: Sessions, relay: str) -> None:
        self._sessions = sessions
        self._relay = relay
        self._lines: dict[int, AgentConnection] = {}
        self._waiting: list[tuple[int, AgentConnection | None, pb.Command | Refusal | None]] = []
        self._wake = asyncio.Event()
        self._over = False

    def take(self, upward: pb.Upward) -> None:
        """What the agents on its lines have said."""
        for frame in upward.frames:
            connection = self._lines.get(frame.line)
            if frame.ended:
                if connection is not None:
                    del self._lines[frame.line]
                    self._sessions.close(connection)
            elif connection is not None:
                self._sessions.take(connection, frame.message)
            elif not self._over:
                self._begin(frame.line, frame.message)

    def _begin(self, line: int, first: pb.AgentMessage) -> None:
        found = self._sessions.open(first, self._relay)
        if isinstance(found, Refusal):
            self._put(line, None, found)
            return
        self._lines[line] = found
        welcome = self._sessions.welcome(found)
        if welcome is not None:
            self._put(line, found, welcome)
        found.link.attach(lambda command: self._put(line, found, command))

    def _put(self, line: int, connection: AgentConnection | None, what: pb.Command | Refusal | None) -> None:
        """Queue ``what`` for the connection on a line; None ends the line."""
        if self._over or (connection is not None and self._lines.get(line) is not connection):
            return  # the link keeps what has to arrive
        self._waiting.append((line, connection, what))
        self._wake.set()

    async def outgoing(self) -> AsyncGenerator[pb.Downward, None]:
        """The messages to them, until :meth:`end`."""
        while not self._over:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            for i in range(0, len(waiting), _FRAMES):
                downward = pb.Downward()
                for line, connection, what in waiting[i : i + _FRAMES]:
                    self._fill(downward.frames.add(line=line), connection, what)
                yield downward

    def _fill(self, frame: pb.DownFrame, connection: AgentConnection | None, what: pb.Command | Refusal | None) -> None:
        if isinstance(what, pb.Command) and connection is not None:
            frame.command.CopyFrom(connection.link.stamp(what))
            return
        frame.ended = True
        if isinstance(what, Refusal):
            frame.command.CopyFrom(what.command())
        elif self._lines.pop(frame.line, None) is connection and connection is not None:
            self._sessions.close(connection)

    def end(self) -> None:
        """No session is carried any more; the agents that it has carried connect in another way."""
        self._over = True
        self._wake.set()
        lines, self._lines = self._lines, {}
        for connection in lines.values():
            self._sessions.close(connection, blameless=True)

"""What this agent does for other agents: says that it lives, passes on that they do, votes, relays their sessions,
keeps set-up logs for them (:mod:`.client`), and gives them what is in its node's memory while the layout changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from flashrecovery.agent.peers.client import CONTROLLER_KEY, Asking, log_parts
from flashrecovery.agent.peers.election import Election
from flashrecovery.agent.peers.relay import Relay
from flashrecovery.agent.peers.staging_transfer import served
from flashrecovery.errors import ConfigError, ProtocolError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import Access, Server

Context = grpc.aio.ServicerContext[Any, Any]

Vouch = Callable[[Asking, float], Awaitable[bool]]
"""Tells the controller that a node is alive, and waits this many seconds for the answer. Returns whether it came."""


@dataclass(frozen=True)
class PeerDuties:
    """What one agent can do for others.

    Attributes:
        election: its vote, and the controller that it follows.
        relay: carries other agents' sessions.
        vouch: tells the controller that another node lives.
        generation: the newest one that it has heard of.
        keep_log: keeps a rank's set-up log, for a start (attempt) of the job; one of an older start is not taken.
        log_of: the set-up log of a rank, for this start; also that of a rank that lives here. None: there is none.
        staging: the directory in the node's memory for state while the parallel layout changes; None: it does not.
    """

    election: Election
    relay: Relay
    vouch: Vouch
    generation: Callable[[], int]
    keep_log: Callable[[int, bytes, int], None]
    log_of: Callable[[int, int], bytes | None]
    staging: Path | None = None


class PeerService(rpc.PeerServicer):  # type: ignore[misc]
    """Serves other agents. ``port``: where, once it has started."""

    def __init__(self, access: Access, duties: PeerDuties) -> None:
        self._access = access
        self._duties = duties
        self._server: Server | None = None
        self.port = 0

    async def start(self, host: str) -> None:
        """Listen on any free port of ``host``. Raises ConfigError."""
        self._server = self._access.server()
        rpc.add_PeerServicer_to_server(self, self._server.grpc)
        try:
            self.port = await self._server.start(host, 0)
        except ConfigError as e:
            raise ConfigError(f"node address {e}") from e

    async def stop(self) -> None:
        self._duties.relay.close()
        if self._server is not None:
            await self._server.stop(0.1)

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeReply:
        """Answers that this agent lives; and if it hears the controller, tells it that the asking node lives, too."""
        reply = pb.ProbeReply()
        if request.node:
            reply.vouched = await self._duties.vouch(Asking(request.node, request.incarnation), request.wait_s)
        reply.term, reply.controller = self._duties.election.term, self._duties.election.controller
        reply.generation = self._duties.generation()
        return reply

    async def Vote(self, request: pb.VoteRequest, context: Context) -> pb.VoteReply:
        """Elect another controller."""
        return self._duties.election.vote(request)

    async def Relay(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncIterator[pb.Command]:
        """Carry another agent's session, if both follow the same controller."""
        controller = dict(context.invocation_metadata() or ()).get(CONTROLLER_KEY, "")
        relay = self._duties.relay
        if not relay.carries_to(str(controller)):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this agent follows another controller")
        async with aclosing(relay.converse(request_iterator)) as frames:
            async for frame in frames:
                if frame.HasField("command"):
                    yield frame.command

    async def Keep(self, request_iterator: AsyncIterator[pb.SetupLogPart], context: Context) -> pb.KeepReply:
        """Keep a rank's set-up log for as long as the job runs."""
        parts = [part async for part in request_iterator]
        whole = bool(parts) and parts[-1].last
        if whole:
            self._duties.keep_log(parts[-1].rank, b"".join([part.data for part in parts]), parts[-1].attempt)
        return pb.KeepReply(kept=whole)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.SetupLogPart]:
        """Give it back, if it is of the same start of the job."""
        data = self._duties.log_of(request.rank, request.attempt)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no set-up log of rank {request.rank} here")
            return
        for part in log_parts(request.rank, data):
            yield part

    async def ReadStaging(self, request: pb.StagingRead, context: Context) -> AsyncIterator[pb.StagingPart]:
        """What a rank of this node has written for another layout."""
        if self._duties.staging is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the layout of this job does not change")
        try:
            for part in served(self._duties.staging, request):
                yield part
        except ProtocolError as e:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(e))

"""What this agent does for other agents: says that it lives, passes on that they do, votes, relays their sessions,
keeps set-up logs for them (:mod:`.client`), and gives them what is in its node's memory while the layout changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from flashrecovery.agent.peers.client import CONTROLLER_KEY, Asking, KeptLog, log_parts
from flashrecovery.agent.peers.election import Election
from flashrecovery.agent.peers.relay import Relay
from flashrecovery.agent.peers.stash_transfer import served
from flashrecovery.errors import ConfigError, ProtocolError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import Access, Server

Context = grpc.aio.ServicerContext[Any, Any]

Vouch = Callable[[Asking, float], Awaitable[bool]]
"""Tell the controller that this node lives, and wait so many seconds for its word; whether it has come."""


class PeerService(rpc.PeerServicer):  # type: ignore[misc]
    """What this agent does for others. ``logs``: the set-up logs that it keeps, by rank; ``own_log`` gives those of the
    ranks that live here, too. ``stash``: the directory in
    the node's memory for state while the layout changes; None: it does not."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.logs: dict[int, KeptLog] = {}
        self.own_log: Callable[[int, int], bytes | None] = lambda rank, attempt: None
        self._server: Server | None = None
        self.vouch: Vouch | None = None
        self.generation: Callable[[], int] = lambda: 0
        self.election: Election | None = None
        self.relay: Relay | None = None
        self.stash: Path | None = None
        self.port = 0

    def forget_logs(self, but: int) -> None:
        """Of all starts but this attempt. A node without a rank of a new layout may keep that one's already."""
        for rank in [rank for rank, log in self.logs.items() if log.attempt != but]:
            del self.logs[rank]

    async def start(self, host: str) -> None:
        """Listen on any free port of ``host``. Raises ConfigError."""
        self._server = self._access.server()
        rpc.add_PeerServicer_to_server(self, self._server.grpc)
        try:
            self.port = await self._server.start(host, 0)
        except ConfigError as e:
            raise ConfigError(f"node address {e}") from e

    async def stop(self) -> None:
        if self.relay is not None:
            self.relay.close()
        if self._server is not None:
            await self._server.stop(0.1)

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeReply:
        """Answers that this agent lives; and if it hears the controller, tells it that the asking node lives, too."""
        reply = pb.ProbeReply()
        if request.node and self.vouch is not None:
            reply.vouched = await self.vouch(Asking(request.node, request.incarnation), request.wait_s)
        if self.election is not None:
            reply.term, reply.controller = self.election.term, self.election.controller
        reply.generation = self.generation()
        return reply

    async def Vote(self, request: pb.VoteRequest, context: Context) -> pb.VoteReply:
        """Elect another controller."""
        if self.election is None:
            return pb.VoteReply(granted=False, reason="it has not come to the job yet")
        return self.election.vote(request)

    async def Relay(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncIterator[pb.Command]:
        """Carry another agent's session, if both follow the same controller."""
        controller = dict(context.invocation_metadata() or ()).get(CONTROLLER_KEY, "")
        if self.relay is None or not self.relay.carries_to(str(controller)):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this agent follows another controller")
        async with aclosing(self.relay.converse(request_iterator)) as frames:
            async for frame in frames:
                if frame.HasField("command"):
                    yield frame.command

    async def Keep(self, request_iterator: AsyncIterator[pb.SetupLogPart], context: Context) -> pb.KeepReply:
        """Keep a rank's set-up log for as long as the job runs."""
        parts = [part async for part in request_iterator]
        whole = bool(parts) and parts[-1].last
        if whole:
            rank, attempt = parts[-1].rank, parts[-1].attempt
            if rank not in self.logs or attempt >= self.logs[rank].attempt:
                self.logs[rank] = KeptLog(attempt, b"".join([part.data for part in parts]))
        return pb.KeepReply(kept=whole)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.SetupLogPart]:
        """Give it back, if it is of the same start of the job."""
        kept = self.logs.get(request.rank)
        data = self.own_log(request.rank, request.attempt)
        if data is None and kept is not None and kept.attempt == request.attempt:
            data = kept.data
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no set-up log of rank {request.rank} here")
            return
        for part in log_parts(request.rank, data):
            yield part

    async def ReadStash(self, request: pb.StashRead, context: Context) -> AsyncIterator[pb.StashPart]:
        """What a rank of this node has written for another layout."""
        if self.stash is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the layout of this job does not change")
        try:
            for part in served(self.stash, request):
                yield part
        except ProtocolError as e:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(e))

"""The agents among themselves: a second opinion on who is silent, and set-up logs kept for another node.

What a rank's set-up collectives had returned (:mod:`flashrecovery.groups.setup_log`) lies in its page, in the memory of
its agent. If the whole node is lost, a replacement elsewhere needs it all the same; so each rank's log is also kept by
the agent of the rank that holds its neighbour copies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from flashrecovery.access import Access, Server, agent_at
from flashrecovery.errors import AuthenticationError, ConfigError, ProtocolError
from flashrecovery.plan.ring import OBSERVERS, following
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc

if TYPE_CHECKING:
    from flashrecovery.agent.relay import Relay
    from flashrecovery.agent.succession import Succession

    Context = grpc.aio.ServicerContext[Any, Any]

_PART_BYTES = 1 << 20
_KEEP_S = 30.0
_FETCH_S = 30.0
_VOUCH = 0.6
"""Part of the time for an answer in which the controller has to answer; then it comes in time also if it has not."""
CONTROLLER_KEY = "flashrecovery-controller"
"""Of the metadata with which an agent comes to a relay: the incarnation of the controller that it follows."""
UNREACHED = (grpc.aio.AioRpcError, AuthenticationError)
"""What is raised where the agent that is called does not answer, or somebody else does, or changes what it says."""
NOT_HANDED_OVER = (*UNREACHED, ProtocolError)
"""What is raised where a set-up log does not come over to the other side, or not whole."""


@dataclass(frozen=True)
class Seen:
    """A peer's answer. ``vouched``: the controller has learned from it that who asks lives. ``controller`` (HOST:PORT),
    of this ``term``: whom it follows."""

    peer: str
    reachable: bool
    evidence: str = ""
    vouched: bool = False
    term: int = 0
    controller: str = ""


@dataclass(frozen=True)
class Asking:
    """The node that asks others for its controller."""

    node: str
    incarnation: str


Vouch = Callable[[Asking, float], Awaitable[bool]]
"""Tell the controller that this node lives, and wait so many seconds for its word; whether it has come."""


class PeerService(rpc.PeerServicer):  # type: ignore[misc]
    """What this agent does for others."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._logs: dict[int, bytes] = {}
        self._server: Server | None = None
        self.vouch: Vouch | None = None
        self.succession: Succession | None = None
        self.relay: Relay | None = None
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
        if self.relay is not None:
            self.relay.close()
        if self._server is not None:
            await self._server.stop(0.1)

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeReply:
        """This agent lives; and if it hears the controller, it passes on that who asks does, too."""
        reply = pb.ProbeReply()
        if request.node and self.vouch is not None:
            reply.vouched = await self.vouch(Asking(request.node, request.incarnation), request.wait_s)
        if self.succession is not None:
            reply.term, reply.controller = self.succession.term, self.succession.controller
        return reply

    async def Vote(self, request: pb.VoteRequest, context: Context) -> pb.VoteReply:
        """Elect another controller."""
        if self.succession is None:
            return pb.VoteReply(granted=False, reason="it has not come to the job yet")
        return self.succession.vote(request)

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
            self._logs[parts[-1].rank] = b"".join([part.data for part in parts])
        return pb.KeepReply(kept=whole)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.SetupLogPart]:
        """Give it back."""
        if request.rank not in self._logs:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no set-up log of rank {request.rank} here")
        for part in _parts(request.rank, self._logs[request.rank]):
            yield part


def neighbours(table: pb.RankTable, here: str) -> list[str]:
    """Peer services of the next agents in the ring of nodes that hold ranks, as far as ``table`` names them; where no
    other node does, of some that hold none."""
    found = {e.node: e.peer for e in table.ranks if e.peer and e.node != here}
    return [found[n] for n in itertools.islice(following(here, sorted(found)), OBSERVERS)] or list(table.others)


async def probe(peer: str, access: Access, timeout_s: float, asking: Asking | None = None) -> Seen:
    """Does the agent at ``peer`` (host:port) live? On a new connection, so that nothing old can say so. ``asking``:
    whom it is to vouch for, if it can."""
    began = time.monotonic()
    request = pb.ProbeRequest()
    if asking is not None:
        request = pb.ProbeRequest(node=asking.node, incarnation=asking.incarnation, wait_s=_VOUCH * timeout_s)
    try:
        async with access.dial(peer, agent_at(peer), timeout_s) as channel:
            left_s = max(began + timeout_s - time.monotonic(), 0.0)
            reply = await rpc.PeerStub(channel).Probe(request, timeout=left_s)
    except grpc.aio.AioRpcError as e:
        return Seen(peer, False, f"{e.code().name.lower()} after {time.monotonic() - began:.2f} s")
    except AuthenticationError as e:
        return Seen(peer, False, str(e))
    return Seen(peer, True, "", reply.vouched, reply.term, reply.controller)


async def probe_all(peers: Sequence[str], access: Access, timeout_s: float, asking: Asking | None = None) -> list[Seen]:
    """All at once."""
    return list(await asyncio.gather(*(probe(p, access, timeout_s, asking) for p in peers)))


async def keep_there(peer: str, access: Access, rank: int, log: bytes) -> None:
    """Have ``peer`` keep the set-up log of ``rank``. Raises one of NOT_HANDED_OVER."""

    async def parts() -> AsyncIterator[pb.SetupLogPart]:
        for part in _parts(rank, log):
            yield part

    async with access.dial(peer, agent_at(peer), _KEEP_S) as channel:
        reply: pb.KeepReply = await rpc.PeerStub(channel).Keep(parts(), timeout=_KEEP_S)
    if not reply.kept:
        raise ProtocolError(f"the set-up log of rank {rank} did not come whole to the agent at {peer}")


async def fetch_from(peer: str, access: Access, rank: int) -> bytes:
    """The set-up log of ``rank`` that ``peer`` keeps. Raises one of NOT_HANDED_OVER."""
    async with access.dial(peer, agent_at(peer), _FETCH_S) as channel:
        call = rpc.PeerStub(channel).Fetch(pb.FetchRequest(rank=rank), timeout=_FETCH_S)
        parts = [part async for part in call]
    if not parts or not parts[-1].last:
        raise ProtocolError(f"the set-up log of rank {rank} that the agent at {peer} keeps did not come whole")
    return b"".join([part.data for part in parts])


def said_by(error: BaseException) -> str:
    """In a few words."""
    return error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else str(error)


def _parts(rank: int, data: bytes) -> list[pb.SetupLogPart]:
    """The last one says that it is: that a stream has ended proves nothing."""
    starts = range(0, max(len(data), 1), _PART_BYTES)
    return [pb.SetupLogPart(rank=rank, data=data[i : i + _PART_BYTES], last=i == starts[-1]) for i in starts]

"""What agents ask of each other: whether a silent node lives, and to keep set-up logs for another node.

What a rank's set-up collectives had returned (:mod:`flashrecovery.groups.setup_log`) lies in its page, in the memory of
its agent. If the whole node is lost, a replacement elsewhere needs it all the same; so each rank's log is also kept by
the agent of the rank that holds its neighbour copies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from flashrecovery.errors import AuthenticationError, ProtocolError
from flashrecovery.plan.membership.membership import Port, Seen
from flashrecovery.plan.membership.ring import OBSERVERS, following
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import Access, agent_at

_PART_BYTES = 1 << 20
_KEEP_S = 30.0
_FETCH_S = 30.0
_VOUCH = 0.6
"""Part of the time for an answer in which the controller has to answer; then it comes in time also if it has not."""
CONTROLLER_KEY = "flashrecovery-controller"
"""The metadata key by which an agent tells a relay the incarnation of the controller that it follows."""
UNREACHED = (grpc.aio.AioRpcError, AuthenticationError)
"""Raised when the called agent does not answer, or when another process answers or tampers with the answer."""
NOT_HANDED_OVER = (*UNREACHED, ProtocolError)
"""What is raised where a set-up log does not come over to the other side, or not whole."""


@dataclass(frozen=True)
class KeptLog:
    """A rank's set-up log. ``attempt``: of the start from the script's first line whose it is."""

    attempt: int
    data: bytes


@dataclass(frozen=True)
class Asking:
    """The node that asks others for its controller."""

    node: str
    incarnation: str


def neighbours(table: pb.RankTable, here: str) -> list[str]:
    """Peer services of the next agents in the ring of nodes that hold ranks, as far as ``table`` names them; where no
    other node does, of some that hold none."""
    found = {e.node: e.peer for e in table.ranks if e.peer and e.node != here}
    return [found[n] for n in itertools.islice(following(here, sorted(found)), OBSERVERS)] or list(table.others)


async def probe(peer: str, access: Access, timeout_s: float, asking: Asking | None = None) -> Seen:
    """Is the agent at ``peer`` (host:port) alive? Asked on a new connection, so that no old answer counts. ``asking``:
    the node that it is to vouch for, if it can."""
    began = time.monotonic()
    request = pb.ProbeRequest()
    if asking is not None:
        request = pb.ProbeRequest(node=asking.node, incarnation=asking.incarnation, wait_s=_VOUCH * timeout_s)
    try:
        async with access.dial(peer, agent_at(peer), timeout_s) as channel:
            left_s = max(began + timeout_s - time.monotonic(), 0.0)
            reply: pb.ProbeReply = await rpc.PeerStub(channel).Probe(request, timeout=left_s)
    except grpc.aio.AioRpcError as e:
        return Seen(peer, False, f"{e.code().name.lower()} after {time.monotonic() - began:.2f} s")
    except AuthenticationError as e:
        return Seen(peer, False, str(e))
    return Seen(peer, True, "", reply.vouched, reply.term, reply.controller, reply.generation)


async def probe_all(peers: Sequence[str], access: Access, timeout_s: float, asking: Asking | None = None) -> list[Seen]:
    """All at once."""
    return list(await asyncio.gather(*(probe(p, access, timeout_s, asking) for p in peers)))


async def keep_there(peer: str, access: Access, rank: int, log: bytes, attempt: int = 0) -> None:
    """Have ``peer`` keep the set-up log of ``rank``. Raises one of NOT_HANDED_OVER."""

    async def parts() -> AsyncIterator[pb.SetupLogPart]:
        for part in log_parts(rank, log):
            part.attempt = attempt
            yield part

    async with access.dial(peer, agent_at(peer), _KEEP_S) as channel:
        reply: pb.KeepReply = await rpc.PeerStub(channel).Keep(parts(), timeout=_KEEP_S)
    if not reply.kept:
        raise ProtocolError(f"the set-up log of rank {rank} did not come whole to the agent at {peer}")


async def fetch_from(peer: str, access: Access, rank: int, attempt: int = 0) -> bytes:
    """The set-up log of ``rank`` that ``peer`` keeps. Raises one of NOT_HANDED_OVER."""
    async with access.dial(peer, agent_at(peer), _FETCH_S) as channel:
        call = rpc.PeerStub(channel).Fetch(pb.FetchRequest(rank=rank, attempt=attempt), timeout=_FETCH_S)
        parts = [part async for part in call]
    if not parts or not parts[-1].last:
        raise ProtocolError(f"the set-up log of rank {rank} that the agent at {peer} keeps did not come whole")
    return b"".join([part.data for part in parts])


def said_by(error: BaseException) -> str:
    """An error of gRPC in a few words."""
    return error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else str(error)


def log_parts(rank: int, data: bytes) -> list[pb.SetupLogPart]:
    """The last one says that it is: that a stream has ended proves nothing."""
    starts = range(0, max(len(data), 1), _PART_BYTES)
    return [pb.SetupLogPart(rank=rank, data=data[i : i + _PART_BYTES], last=i == starts[-1]) for i in starts]


async def probe_port(host: str, port: int, timeout_s: float) -> Port:
    """Try to connect to the controller's port."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except ConnectionRefusedError:
        return Port.REFUSES
    except (asyncio.TimeoutError, OSError):
        return Port.SILENT
    writer.close()
    return Port.ACCEPTS

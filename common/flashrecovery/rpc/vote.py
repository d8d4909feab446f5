"""A question to one elector, over the network: from a candidate, or from a controller that needs a newer term."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from flashrecovery.errors import AuthenticationError
from flashrecovery.plan.membership.electors import Elector
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import Access, agent_at

VOTE_S = 0.3
"""Seconds that the electors have to answer."""

AskElector = Callable[[Elector, pb.VoteRequest], Awaitable[pb.VoteReply]]


async def ask_elector(elector: Elector, request: pb.VoteRequest, access: Access) -> pb.VoteReply:
    """Over the network; no answer is a refusal."""
    try:
        async with access.dial(elector.peer, agent_at(elector.peer), VOTE_S) as channel:
            reply: pb.VoteReply = await rpc.PeerStub(channel).Vote(request, timeout=VOTE_S)
            return reply
    except grpc.aio.AioRpcError as e:
        return pb.VoteReply(granted=False, reason=e.code().name.lower())
    except AuthenticationError as e:
        return pb.VoteReply(granted=False, reason=str(e))

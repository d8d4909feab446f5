"""How the parts of a job reach each other: the one place where connections are made and listened for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from flashrecovery.errors import ConfigError
from flashrecovery.proto import CHANNEL_OPTIONS, SERVER_OPTIONS
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc import grpc_compat
from flashrecovery.rpc.handshake import Caller, Listener, job_key
from flashrecovery.rpc.log_throttle import Seldom
from flashrecovery.rpc.message_auth import AuthInterceptor, SealedChannel, greet
from flashrecovery.rpc.tls import Tls, stranger

CONTROLLER = "controller"
"""The name under which a controller proves itself."""
logging.getLogger("grpc._cython.cygrpc").addFilter(Seldom())  # it says something of each call that it cannot read
# Without the second one, gRPC shares connections, and their back-off, between channels.
_CHANNEL = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


def agent_at(address: str) -> str:
    """The name under which the agent whose service is at ``address`` (HOST:PORT) proves itself."""
    return f"agent {address}"


@dataclass(frozen=True)
class Access:
    """What it takes to belong to the job: its token, and certificates if it uses TLS."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @asynccontextmanager
    async def dial(self, address: str, name: str, timeout_s: float) -> AsyncIterator[SealedChannel]:
        """A new connection to ``name`` at ``address``, so that nothing old can answer for it.

        Raises:
            StrangerError: another process listens there.
            grpc.aio.AioRpcError: no answer within ``timeout_s``.
        """
        async with self._channel(address) as channel:
            try:
                sealed = await greet(channel, address, Caller(job_key(self.token), name), timeout_s)
            except grpc.aio.AioRpcError as e:
                if self.tls is None or e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                # A handshake of TLS that fails is a connection that fails, as far as gRPC says.
                found = await stranger(self.tls, address, timeout_s)
                if found is None:
                    raise
                raise found from e
            yield sealed

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL)
        credentials, named = self.tls.dialling()
        return grpc.aio.secure_channel(address, credentials, options=(*_CHANNEL, *named))

    def server(self) -> Server:
        """One that listens nowhere yet."""
        return Server(self)


class Server:
    """A gRPC server that answers only callers that know the token. Add services to :attr:`grpc` before it starts."""

    def __init__(self, access: Access) -> None:
        self._tls = access.tls
        self._listener = Listener(job_key(access.token), "")
        self.grpc = grpc_compat.server(SERVER_OPTIONS, [AuthInterceptor(self._listener)])
        rpc.add_EntranceServicer_to_server(rpc.EntranceServicer(), self.grpc)  # the doorkeeper answers in its place

    async def start(self, host: str, port: int, name: str | None = None) -> int:
        """Listen (port 0: any free one), under this ``name``, or as the agent there. Returns the port.

        Raises:
            ConfigError: it cannot listen there.
        """
        try:
            if self._tls is None:
                bound = int(self.grpc.add_insecure_port(f"{host}:{port}"))
            else:
                bound = int(self.grpc.add_secure_port(f"{host}:{port}", self._tls.listening()))
        except RuntimeError as e:
            raise ConfigError(f"{host}:{port}: the address cannot be bound: {e}") from e
        self._listener.listen_as(agent_at(f"{host}:{bound}") if name is None else name)
        await self.grpc.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """End every call after ``grace_s``."""
        await self.grpc.stop(grace=grace_s)

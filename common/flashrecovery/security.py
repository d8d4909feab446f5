"""Who may speak to controller and agents: whoever knows the job's token.

Every call carries the token; a call without it is refused before its handler runs, and logged. A job on one node makes
its own; nodes of one job must be given the same one, by the environment variable or a file, as schedulers pass secrets.
What this does not protect (PyTorch's own TCPStore and gloo, and reading along on the network) is in docs/security.md.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from flashrecovery.errors import ConfigError

TOKEN_ENV = "FLASHRECOVERY_TOKEN"
TOKEN_KEY = "flashrecovery-token"
SHORTEST_TOKEN = 16

log = logging.getLogger("flashrecovery")


def new_token() -> str:
    return secrets.token_hex(16)


def job_token(file: Path | None, *, host: str) -> str:
    """The token that the nodes of a job share. ``host``: where its controller listens.

    Raises:
        ConfigError: none is given although others could reach ``host``, or it is too short.
    """
    if file is not None:
        try:
            token = file.read_text().strip()
        except OSError as e:
            raise ConfigError(f"--token-file {file}: {e.strerror}") from e
        where = f"--token-file {file}"
    else:
        token, where = os.environ.get(TOKEN_ENV, "").strip(), TOKEN_ENV
    if not token and is_loopback(host):
        return ""
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{where}: a token of at least {SHORTEST_TOKEN} characters is needed where others can reach the controller "
            f"({host}), the same on every node, but this one has {len(token)}. One way to make it: "
            f"export {TOKEN_ENV}=$(python -c 'import secrets; print(secrets.token_hex(16))')"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host`` (a name or an address)."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    return ((TOKEN_KEY, token),)


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token, whatever they ask for."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = next((v for k, v in details.invocation_metadata or () if k == TOKEN_KEY), "")
        raw = given if isinstance(given, bytes) else given.encode()
        handler = await continuation(details)
        if handler is None or hmac.compare_digest(raw, self._token):
            return handler
        log.warning("a call of %s with a wrong or missing job token was refused", details.method)
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that reads nothing and refuses."""
    words = "wrong or missing job token"

    async def refuse(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)
        yield  # makes this a generator, as a streaming handler has to be

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)

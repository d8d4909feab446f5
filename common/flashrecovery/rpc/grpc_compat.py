"""The private parts of grpcio that are used here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_private: Any = cygrpc


class _KnownCalls(_private.AioServer):  # type: ignore[misc]
    """Serves the methods that are registered with it, as those of generated code are, and drops calls of others.

    grpcio (1.85) decodes the name of an unregistered method in the one loop that takes every call. A name that is no
    text, which anybody can send, ends that loop, so the server; on the way memory is freed that the core still writes
    to. Registered names are compared as bytes, by the core.
    """

    async def _request_call(self) -> Any:
        """The next call of a method that is not registered, for the loop: there is none."""
        while True:
            await super()._request_call()


def server(options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
    """As ``grpc.aio.server``; every service has to register its methods."""
    usual, _private.AioServer = _private.AioServer, _KnownCalls
    try:
        return grpc.aio.server(options=options, interceptors=interceptors)
    finally:
        _private.AioServer = usual

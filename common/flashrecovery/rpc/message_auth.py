"""gRPC between processes that know the job's token: :mod:`.handshake` on every connection, a seal on every message.

:class:`SealedChannel` is what the generated stubs take for a channel; :class:`AuthInterceptor` stands before the
handlers of a server. Between them go ordinary gRPC calls whose messages have 16 bytes more. Only what is sealed is
believed: the *status* of a call is not, so nothing that matters for good is said by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from flashrecovery.errors import AuthenticationError, StrangerError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.handshake import Answer, Caller, Listener, Seals, joined
from flashrecovery.rpc.log_throttle import Complaints

CHALLENGE_KEY = "flashrecovery-challenge-bin"
"""The key in a Hello's metadata under which the caller's random number stands."""
TICKET_KEY = "flashrecovery-ticket-bin"
OWN_KEYS = "flashrecovery-"
"""Metadata whose keys begin so is ours, and part of what a ticket proves."""
HELLO = "/flashrecovery.v1.Entrance/Hello"
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""These say nothing about the listener; any other status in answer to a Hello comes from a stranger."""
_NAME_CHARS = 100
"""Characters of a name that a stranger gives itself, in an error's text."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

log = logging.getLogger("flashrecovery")
Metadata = Sequence[tuple[str, Any]]
Bytes = Callable[[Any], bytes]
Parse = Callable[[bytes], Any]


def _what(method: str, metadata: Metadata) -> bytes:
    """What a ticket proves of a call: its method and our own metadata."""
    own = [(k, v) for k, v in metadata if k.startswith(OWN_KEYS) and k != TICKET_KEY]
    words = [word for pair in sorted(own) for word in pair]
    return joined(method.encode(), *(w if isinstance(w, bytes) else w.encode() for w in words))


# -- the caller -----------------------------------------------------------------------------------


async def greet(channel: grpc.aio.Channel, address: str, caller: Caller, timeout_s: float) -> SealedChannel:
    """Have the listener at the other end of ``channel`` prove itself.

    Raises:
        StrangerError: it cannot; the message says what is known of it.
        grpc.aio.AioRpcError: no answer.
    """
    anything: Any = channel  # whose messages are bytes: what gRPC cannot parse it would log, and give as None
    hello = anything.unary_unary(HELLO)(b"", metadata=((CHALLENGE_KEY, caller.nonce),), timeout=timeout_s)
    try:
        said = await hello
    except grpc.aio.AioRpcError as e:
        if e.code() in _NO_ANSWER:
            raise
        raise StrangerError(f"{_none_of_ours(address)} (it answers {e.code().name})") from e
    try:
        answer = pb.Answer.FromString(said or b"")  # None: a status that is OK, and no message
    except DecodeError as e:
        raise StrangerError(f"{_none_of_ours(address)} (its answer cannot be read)") from e
    try:
        caller.accept(Answer(answer.nonce, answer.name, answer.proof))
    except StrangerError as e:
        name = answer.name[:_NAME_CHARS]
        raise StrangerError(f"what listens at {address} says that it is a FlashRecovery {name!r}, but {e}") from e
    return SealedChannel(channel, caller)


def _none_of_ours(address: str) -> str:
    return (
        f"what listens at {address} is no part of this job: some other gRPC or HTTP server, or another version of "
        "FlashRecovery"
    )


class SealedChannel:
    """Takes the place of a ``grpc.aio.Channel`` for the generated stubs. Made by :func:`greet`. Its calls are to begin
    soon (see :mod:`.handshake`). A message with a wrong seal raises AuthenticationError."""

    def __init__(self, channel: grpc.aio.Channel, caller: Caller) -> None:
        self._channel: Any = channel  # whose messages are bytes
        self._caller = caller

    def _begin(self, method: str, metadata: Metadata) -> tuple[Seals, Metadata]:
        ticket, seals = self._caller.call(_what(method, metadata))
        return seals, (*metadata, (TICKET_KEY, ticket))

    def unary_unary(self, method: str, request_serializer: Bytes, response_deserializer: Parse, **_: Any) -> Any:
        async def call(request: Any, *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            seals, known = self._begin(method, metadata)
            calls = self._channel.unary_unary(method)
            raw = await calls(seals.outgoing.close(request_serializer(request)), metadata=known, timeout=timeout)
            return response_deserializer(_only(raw, seals))

        return call

    def stream_unary(self, method: str, request_serializer: Bytes, response_deserializer: Parse, **_: Any) -> Any:
        async def call(requests: AsyncIterator[Any], *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            seals, known = self._begin(method, metadata)
            calls = self._channel.stream_unary(method)
            raw = await calls(_closed(requests, seals, request_serializer), metadata=known, timeout=timeout)
            return response_deserializer(_only(raw, seals))

        return call

    def unary_stream(self, method: str, request_serializer: Bytes, response_deserializer: Parse, **_: Any) -> Any:
        def call(request: Any, *, timeout: float | None = None, metadata: Metadata = ()) -> SealedCall:
            seals, known = self._begin(method, metadata)
            calls = self._channel.unary_stream(method)
            return SealedCall(
                calls(seals.outgoing.close(request_serializer(request)), metadata=known, timeout=timeout),
                seals,
                request_serializer,
                response_deserializer,
            )

        return call

    def stream_stream(self, method: str, request_serializer: Bytes, response_deserializer: Parse, **_: Any) -> Any:
        def call(
            requests: AsyncIterator[Any] | None = None, *, timeout: float | None = None, metadata: Metadata = ()
        ) -> SealedCall:
            seals, known = self._begin(method, metadata)
            calls = self._channel.stream_stream(method)
            closed = _closed(requests, seals, request_serializer) if requests is not None else None
            return SealedCall(
                calls(closed, metadata=known, timeout=timeout), seals, request_serializer, response_deserializer
            )

        return call


class SealedCall:
    """A call whose answers are a stream."""

    def __init__(self, call: Any, seals: Seals, close: Bytes, parse: Parse) -> None:
        self._call = call
        self._seals = seals
        self._close = close
        self._parse = parse

    async def write(self, message: Any) -> None:
        await self._call.write(self._seals.outgoing.close(self._close(message)))

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``."""
        raw = await self._call.read()
        return raw if raw is _EOF else self._parse(self._seals.incoming.open(raw))

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for raw in self._call:
            yield self._parse(self._seals.incoming.open(raw))

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    async def done_writing(self) -> None:
        await self._call.done_writing()


async def _closed(messages: AsyncIterator[Any], seals: Seals, close: Bytes) -> AsyncIterator[bytes]:
    async for message in messages:
        yield seals.outgoing.close(close(message))


def _only(raw: bytes | None, seals: Seals) -> bytes:
    """The content of a call's one answer. None: it has ended well and said nothing, which anybody can make it do."""
    if raw is None:
        raise AuthenticationError("the answer was left out on its way")
    return seals.incoming.open(raw)


# -- the listener ---------------------------------------------------------------------------------


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers callers, and lets those in that prove themselves. An interceptor, for one server.

    From a caller that has not proven itself no message is received, only the head of a call, which gRPC limits to 16
    KiB.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._complaints = Complaints(log)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        metadata: Any = details.invocation_metadata or ()
        if details.method == HELLO:
            return self._hello(_found(metadata, CHALLENGE_KEY))
        handler = await continuation(details)
        if handler is None:
            return handler
        seals = self._listener.admit(_found(metadata, TICKET_KEY), _what(details.method, metadata), time.monotonic())
        if seals is not None:
            return _sealed(handler, seals, self._refused)
        self._refused(details.method)
        return _unheard(_refuse)

    def _hello(self, nonce: bytes) -> Handler:
        """Proves that this is the service that it says it is."""

        async def answer(_: Any, context: Any) -> AsyncIterator[bytes]:
            try:
                answer = self._listener.answer(nonce, time.monotonic())
            except AuthenticationError as e:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
            yield pb.Answer(nonce=answer.nonce, name=answer.name, proof=answer.proof).SerializeToString()

        return _unheard(answer)

    def _refused(self, method: str) -> None:
        self._complaints.add("a call of %s without the job's token was refused", method)


def _found(metadata: Metadata, key: str) -> bytes:
    """The first value of this key, which ends in -bin."""
    return next((v for k, v in metadata if k == key), b"")


_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, "no proof that the caller knows the job's token")


def _sealed(handler: Handler, seals: Seals, refused: Callable[[str], None]) -> Handler:
    """A handler of the same kind whose messages are sealed."""
    anything: Any = handler
    parse: Parse = anything.request_deserializer
    close: Bytes = anything.response_serializer

    async def opened(raw: bytes, context: Any) -> Any:
        try:
            return parse(seals.incoming.open(raw))
        except AuthenticationError as e:
            refused(f"a call ({e})")
            await context.abort(*_REFUSED)

    async def stream_opened(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for raw in messages:
            try:
                body = seals.incoming.open(raw)
            except AuthenticationError as e:
                refused(f"a call ({e})")
                with suppress(grpc.aio.AbortError):
                    await context.abort(*_REFUSED)
                return
            yield parse(body)

    def requests(request: Any, context: Any) -> Any:
        return stream_opened(request, context)

    def closed(message: Any) -> bytes:
        return seals.outgoing.close(close(message))

    async def unary(request: Any, context: Any) -> bytes:
        given = requests(request, context) if handler.request_streaming else await opened(request, context)
        behave = anything.stream_unary if handler.request_streaming else anything.unary_unary
        return closed(await behave(given, context))

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        given = requests(request, context) if handler.request_streaming else await opened(request, context)
        behave = anything.stream_stream if handler.request_streaming else anything.unary_stream
        async with aclosing(behave(given, context)) as said:
            async for message in said:
                yield closed(message)

    return _of_kind(handler, unary, stream)


async def _refuse(_: Any, context: Any) -> AsyncIterator[bytes]:
    await context.abort(*_REFUSED)
    yield b""  # makes this a generator


def _unheard(behave: Callable[[Any, Any], AsyncIterator[bytes]]) -> Handler:
    """A handler for a call of any kind that looks at none of its messages. gRPC itself would receive the one request
    of a unary call, up to the limit for messages, before it asked the handler; those of a stream it leaves to it."""
    return grpc.stream_stream_rpc_method_handler(behave)


def _of_kind(handler: Handler, unary: Any, stream: Any) -> Handler:
    """With the behaviour that fits the kind of ``handler``; messages are bytes."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)

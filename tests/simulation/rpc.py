"""What ``grpc.aio`` offers to our code, over the simulated network.

Only what controller and agents use: an insecure channel with its four kinds of calls, deadlines, cancellation,
metadata, and a server with interceptors. Messages are serialised, as on a real wire, by the generated stubs' own
functions. A call's fate follows grpc: a connection that is refused or breaks ends it with UNAVAILABLE, a deadline with
DEADLINE_EXCEEDED, a handler that raises with UNKNOWN.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from tests.simulation.loop import Process, current
from tests.simulation.network import Network, Wire

Serializer = Callable[[Any], bytes]
Code = grpc.StatusCode


def _error(code: Code, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


class SimChannel:
    """``grpc.aio.insecure_channel``: one connection, made with the first call."""

    def __init__(self, network: Network, target: str) -> None:
        self._network = network
        self._target = target
        self._wire: Wire | None = None
        self._ready = False
        self._waiting: list[Any] = []
        self._calls: dict[int, SimCall] = {}
        self._number = 0
        self._process = current()
        self.closed = False

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self.closed = True
        for call in list(self._calls.values()):
            call.cancel()
        if self._wire is not None:
            self._wire.close(0)
            self._wire = None

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return lambda request, **how: _One(
            self._call(method, request_serializer, response_deserializer, [request], **how)
        )

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return lambda requests, **how: _One(
            self._call(method, request_serializer, response_deserializer, requests, **how)
        )

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return lambda request, **how: self._call(method, request_serializer, response_deserializer, [request], **how)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return lambda requests=None, **how: self._call(
            method, request_serializer, response_deserializer, requests, **how
        )

    def _call(
        self,
        method: str,
        serialize: Serializer,
        deserialize: Callable[[bytes], Any],
        requests: Any,
        metadata: Iterable[tuple[str, Any]] | None = None,
        timeout: float | None = None,
        wait_for_ready: bool | None = None,
    ) -> SimCall:
        self._number += 1
        serialize, deserialize = serialize or bytes, deserialize or bytes
        call = SimCall(self, self._number, serialize, deserialize)
        self._calls[self._number] = call
        given = tuple(metadata or ())
        self.put(("open", self._number, method, given))
        if timeout is not None:
            call.deadline = asyncio.get_running_loop().call_later(
                timeout, call.finish, Code.DEADLINE_EXCEEDED, "Deadline Exceeded"
            )
        if isinstance(requests, list):
            for request in requests:
                self.put(("message", self._number, serialize(request)))
            self.put(("half", self._number))
        elif requests is not None:
            call.feeder = asyncio.get_running_loop().create_task(self._feed(call, requests))
        return call

    async def _feed(self, call: SimCall, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            await call.write(request)
        self.put(("half", call.number))

    def put(self, frame: Any) -> None:
        """Up, as soon as there is a connection."""
        if self.closed:
            return
        if self._wire is None:
            self._ready = False
            self._wire = self._network.connect(self._target, self._ended)
            self._wire.ends[0].on_item = self._arrived
        if self._ready:
            self._send(frame)
        else:
            self._waiting.append(frame)

    def _send(self, frame: Any) -> None:
        assert self._wire is not None
        self._wire.send(0, frame)

    @property
    def ready(self) -> bool:
        return self._ready

    def _arrived(self, frame: Any) -> None:
        if frame[0] == "settings":
            self._ready = True
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if one[1] in self._calls or one[0] == "cancel":
                    self._send(one)
            for call in self._calls.values():
                call.connected()
            return
        call = self._calls.get(frame[1])
        if call is None:
            return
        if frame[0] == "message":
            call.arrived(frame[2])
        elif frame[0] == "end":
            call.finish(frame[2], frame[3])

    def _ended(self, why: str) -> None:
        self._wire, self._ready = None, False
        self._waiting.clear()
        words = "failed to connect to all addresses" if why == "refused" else "Socket closed"
        for call in list(self._calls.values()):
            call.finish(Code.UNAVAILABLE, words)

    def forget(self, call: SimCall, *, tell: bool) -> None:
        if self._calls.pop(call.number, None) is not None and tell and self._wire is not None:
            self.put(("cancel", call.number))


class SimCall:
    """One call, at the client."""

    def __init__(
        self, channel: SimChannel, number: int, serialize: Serializer, deserialize: Callable[[bytes], Any]
    ) -> None:
        self._channel = channel
        self.number = number
        self._serialize = serialize
        self._deserialize = deserialize
        self._incoming: deque[bytes] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if channel.ready:
            self.connected()
        self._status: tuple[Code, str] | None = None
        self._cancelled = False
        self.deadline: asyncio.TimerHandle | None = None
        self.feeder: asyncio.Task[None] | None = None

    def connected(self) -> None:
        if not self._connected.done():
            self._connected.set_result(None)

    def arrived(self, data: bytes) -> None:
        if self._status is None:
            self._incoming.append(data)
            self._notify()

    def finish(self, code: Code, details: str, *, tell: bool | None = None) -> None:
        if self._status is not None:
            return
        self._status = (code, details)
        if self.deadline is not None:
            self.deadline.cancel()
        if self.feeder is not None:
            self.feeder.cancel()
        self._channel.forget(self, tell=code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED) if tell is None else tell)
        self.connected()
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled = True
        self.finish(Code.CANCELLED, "Locally cancelled by application!")
        return True

    def done(self) -> bool:
        return self._status is not None

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._connected
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._channel.put(("message", self.number, self._serialize(message)))

    async def done_writing(self) -> None:
        self._channel.put(("half", self.number))

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``. It never comes back at once: a cancelled task reads no more."""
        try:
            await asyncio.sleep(0)
            while not self._incoming:
                if self._status is not None:
                    return self._nothing_more()
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._deserialize(self._incoming.popleft())

    def _nothing_more(self) -> Any:
        assert self._status is not None
        if self._cancelled:
            raise asyncio.CancelledError
        code, details = self._status
        if code is not Code.OK:
            raise _error(code, details)
        return grpc.aio.EOF

    def __aiter__(self) -> SimCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


class _One:
    """A call with one answer, which is awaited."""

    def __init__(self, call: SimCall) -> None:
        self._call = call

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self._call.read()
        self._call.finish(Code.OK, "", tell=False)
        return answer


# -- the other side ---------------------------------------------------------------------------------


class SimServer:
    """``grpc.aio.server``: one for each process that listens."""

    def __init__(self, network: Network, interceptors: Iterable[Any] = ()) -> None:
        self._network = network
        self.process: Process = current()
        self._interceptors = list(interceptors)
        self._handlers: dict[str, Any] = {}
        self._ports: list[int] = []
        self._connections: list[_Accepted] = []
        self.errors: Callable[[str, BaseException], None] = lambda method, error: None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass  # the registered ones below are the same

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        host, port = self.process.host, int(address.rpartition(":")[2])
        port = port or host.free_port()
        if port in host.listeners:
            raise RuntimeError(f"Failed to bind to address {address}")
        host.listeners[port] = self
        self._ports.append(port)
        self.process.at_end.append(self._close_ports)
        return port

    def _close_ports(self) -> None:
        for port in self._ports:
            if self.process.host.listeners.get(port) is self:
                del self.process.host.listeners[port]
        self._ports.clear()

    async def start(self) -> None:
        pass

    async def stop(self, grace: float | None) -> None:
        self._close_ports()
        running = [t for c in self._connections for t in c.tasks()]
        if running and grace:
            await asyncio.wait(running, timeout=grace)
        for connection in list(self._connections):
            connection.close()

    def accept(self, wire: Wire) -> None:
        """A connection has come."""
        self._connections.append(_Accepted(self, wire))

    def forget(self, connection: _Accepted) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    async def handler_of(self, method: str, metadata: tuple[tuple[str, Any], ...]) -> Any:
        """What serves a call, after the interceptors."""

        async def innermost(details: Any) -> Any:
            return self._handlers.get(details.method)

        continuation: Callable[[Any], Awaitable[Any]] = innermost
        for interceptor in reversed(self._interceptors):
            continuation = _behind(interceptor, continuation)
        return await continuation(_Details(method, metadata))


def _behind(interceptor: Any, inner: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def outer(details: Any) -> Any:
        return await interceptor.intercept_service(inner, details)

    return outer


@dataclass
class _Details:
    method: str
    invocation_metadata: tuple[tuple[str, Any], ...]


class Aborted(grpc.aio.AbortError):
    """``context.abort`` does not return."""


class _Accepted:
    """One connection at the server, and the calls in it."""

    def __init__(self, server: SimServer, wire: Wire) -> None:
        self._server = server
        self._wire = wire
        self._served: dict[int, _Served] = {}
        wire.ends[1].on_item = self._arrived
        wire.ends[1].on_end = self._ended
        wire.send(1, ("settings",))

    def tasks(self) -> list[asyncio.Task[None]]:
        return [s.task for s in self._served.values() if s.task is not None]

    def send(self, frame: Any) -> None:
        self._wire.send(1, frame)

    def _arrived(self, frame: Any) -> None:
        kind, number = frame[0], frame[1]
        if kind == "open":
            served = self._served[number] = _Served(self, number, frame[2], frame[3])
            served.task = self._server.process.start(served.run(self._server))
            return
        served_now = self._served.get(number)
        if served_now is None:
            return
        if kind == "message":
            served_now.put(frame[2])
        elif kind == "half":
            served_now.put(None)
        elif kind == "cancel":
            served_now.cancel()

    def _ended(self, why: str) -> None:
        for served in list(self._served.values()):
            served.cancel()
        self._server.forget(self)

    def done(self, number: int) -> None:
        self._served.pop(number, None)

    def close(self) -> None:
        for served in list(self._served.values()):
            served.cancel()
        self._wire.close(1)
        self._server.forget(self)


@dataclass
class _Served:
    """One call at the server; also the handler's context."""

    connection: _Accepted
    number: int
    method: str
    metadata: tuple[tuple[str, Any], ...]
    task: asyncio.Task[None] | None = None
    _requests: deque[bytes | None] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _over: bool = False
    _deserialize: Callable[[bytes], Any] = bytes

    def put(self, data: bytes | None) -> None:
        self._requests.append(data)
        self._wake.set()

    def cancel(self) -> None:
        self._over = True
        self._wake.set()
        if self.task is not None:
            self.task.cancel()

    # -- the handler's context --------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self.metadata

    async def abort(self, code: Code, details: str = "", trailing_metadata: object = ()) -> None:
        self.connection.send(("end", self.number, code, details))
        raise Aborted

    # -- its requests -----------------------------------------------------------------------------

    def __aiter__(self) -> _Served:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        while not self._requests:
            if self._over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        data = self._requests[0]
        if data is None:
            raise StopAsyncIteration
        self._requests.popleft()
        return self._deserialize(data)

    async def _only(self) -> Any:
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise asyncio.CancelledError from None

    # -- its life ---------------------------------------------------------------------------------

    async def run(self, server: SimServer) -> None:
        try:
            handler = await server.handler_of(self.method, self.metadata)
            if handler is None:
                self.connection.send(("end", self.number, Code.UNIMPLEMENTED, "Method not found!"))
                return
            await self._serve(handler)
            self.connection.send(("end", self.number, Code.OK, ""))
        except Aborted:
            pass
        except asyncio.CancelledError:
            self.connection.send(("end", self.number, Code.CANCELLED, "cancelled"))
        except Exception as e:  # noqa: BLE001 - as grpc does: the caller is told, and the simulation
            self.connection.send(("end", self.number, Code.UNKNOWN, f"Unexpected {type(e)}: {e}"))
            server.errors(self.method, e)
        finally:
            self._over = True
            self._wake.set()
            self.connection.done(self.number)

    async def _serve(self, handler: Any) -> None:
        self._deserialize = handler.request_deserializer or (lambda data: data)
        request: Any = self
        if not handler.request_streaming:
            request = await self._only()
        function = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        if handler.response_streaming:
            answers = function(request, self)
            try:
                async for answer in answers:
                    self._answer(handler, answer)
            finally:
                with suppress(Aborted, StopAsyncIteration):
                    await answers.aclose()
        else:
            self._answer(handler, await function(request, self))

    def _answer(self, handler: Any, answer: Any) -> None:
        data = handler.response_serializer(answer) if handler.response_serializer else answer
        self.connection.send(("message", self.number, data))

"""A simulated network: hosts, paths that delay, lose, repeat, reorder and break, connections and datagrams.

A connection behaves like TCP: what is sent arrives once and in order, or not yet. While its path is blocked nothing
arrives; afterwards what has been sent comes late. It breaks by a reset, or because the process at the other end is gone
while the kernel there still answers; a host that is off answers nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from flashrecovery.controller.storage.generation_file import Numbers
from tests.simulation.loop import Process, VirtualLoop, current

Address = tuple[str, int]


class Firewall(Enum):
    """What becomes of packets on a blocked path."""

    DROP = "drop"
    REJECT = "reject"


class Listener(Protocol):
    """What listens on a port."""

    process: Process

    def accept(self, wire: Wire) -> None:
        """A connection has come; in the listener's process."""


@dataclass
class Host:
    """A machine with one address. ``clock``, ``boot``, ``wall``: its CLOCK_MONOTONIC, CLOCK_BOOTTIME and CLOCK_REALTIME
    are that many seconds ahead of the simulation's; the first stands while the machine is suspended."""

    name: str
    ip: str
    clock: float = 0.0
    boot: float = 0.0
    wall: float = 0.0
    suspended_at: float | None = None
    went_on_at: float = float("-inf")
    up: bool = True
    frozen: bool = False
    boots: int = 0
    processes: list[Process] = field(default_factory=list)
    listeners: dict[int, Listener] = field(default_factory=dict)
    sockets: dict[int, DatagramSocket] = field(default_factory=dict)
    next_port: int = 40000
    numbers: dict[str, Numbers] = field(default_factory=dict)
    """On its disk: of the newest generation, as a controller here has known it, by launch."""

    def free_port(self) -> int:
        self.next_port += 1
        return self.next_port

    def freeze(self) -> None:
        """The whole machine stands still (a paused virtual machine)."""
        self.frozen = True

    def suspend(self, loop: VirtualLoop) -> None:
        """It sleeps: nothing runs, and CLOCK_MONOTONIC, by which timers go, stands."""
        self.frozen, self.suspended_at = True, loop.now

    def thaw(self, loop: VirtualLoop) -> None:
        """It goes on, wherever it stands."""
        self.frozen, self.went_on_at = False, loop.now
        if self.suspended_at is not None:
            since, self.suspended_at = self.suspended_at, None
            self.clock -= loop.now - since
            loop.postpone(self, since)
        for process in list(self.processes):
            process.catch_up()

    def power_off(self) -> None:
        """Everything on it is gone at once, and no one is told."""
        self.up = self.frozen = False
        self.suspended_at = None
        self.boots += 1
        self.listeners.clear()
        self.sockets.clear()
        processes, self.processes = self.processes, []
        for process in processes:
            process.at_end.clear()
            process.end()

    def power_on(self) -> None:
        self.up = True


@dataclass
class Weather:
    """How bad the network is. Probabilities are per datagram, delays in seconds."""

    delay_s: float = 0.0003
    jitter: float = 1.0
    slow: float = 0.0
    slow_s: float = 0.05
    loss: float = 0.0
    repeat: float = 0.0


class Network:
    """All hosts and paths. ``random`` decides every delay and loss."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        loop.network = self
        self.random = rng
        self.weather = weather
        self.hosts: dict[str, Host] = {}
        self._blocked: dict[tuple[str, str], Firewall] = {}
        self._blocked_at: dict[tuple[str, str], float] = {}
        self._whole_at: dict[tuple[str, str], float] = {}
        self._wires: list[Wire] = []
        self.over = False
        self.seen: Callable[[bytes], None] = lambda data: None
        """Called with everything that goes over the network."""

    def add(self, host: Host) -> Host:
        self.hosts[host.ip] = host
        return host

    # -- paths --------------------------------------------------------------------------------------

    def block(self, a: str, b: str, how: Firewall = Firewall.DROP, *, one_way: bool = False) -> None:
        """Nothing gets from host ``a`` to host ``b`` any more (addresses)."""
        for way in ((a, b),) if one_way else ((a, b), (b, a)):
            if way not in self._blocked:
                self._blocked_at[way] = self.loop.now
            self._blocked[way] = how

    def unblock(self, a: str, b: str) -> None:
        """The path is whole again, both ways."""
        for way in ((a, b), (b, a)):
            if self._blocked.pop(way, None) is not None:
                self._whole_at[way] = self.loop.now
        for wire in [w for w in self._wires if {e.host.ip for e in w.ends} == {a, b}]:
            wire.flush()

    def verdict(self, a: Host, b: Host) -> Firewall | None:
        """What happens to a packet from ``a`` to ``b``; None: it gets there."""
        if a is b:
            return None
        return self._blocked.get((a.ip, b.ip))

    def reaches(self, a: Host, b: Host) -> bool:
        return self.verdict(a, b) is None

    def reached_lately(self, a: Host, b: Host, within_s: float) -> bool:
        """Whether ``a`` reaches ``b``, or did in the last seconds."""
        return self.reaches(a, b) or self.loop.now - self._blocked_at[a.ip, b.ip] < within_s

    def reached_for(self, a: Host, b: Host, seconds: float) -> bool:
        """Whether each has reached the other for so long."""
        ways = ((a.ip, b.ip), (b.ip, a.ip))
        return not any(w in self._blocked or self.loop.now - self._whole_at.get(w, -seconds) < seconds for w in ways)

    def look_at(self, item: Any) -> None:
        """Show every part of what is sent."""
        if isinstance(item, bytes):
            self.seen(item)
        elif isinstance(item, str):
            self.seen(item.encode())
        elif isinstance(item, (tuple, list)):
            for part in item:
                self.look_at(part)

    def delay(self, a: Host, b: Host) -> float:
        w = self.weather
        if a is b:
            return w.delay_s * 0.1 * (1 + self.random.random())
        if w.slow and self.random.random() < w.slow:
            return w.slow_s * (0.2 + self.random.random())
        return w.delay_s * (1 + w.jitter * self.random.random())

    # -- connections --------------------------------------------------------------------------------

    def forget(self, wire: Wire) -> None:
        if wire in self._wires:
            self._wires.remove(wire)

    def connect(self, address: str, on_end: Callable[[str], None]) -> Wire:
        """From the present process. ``on_end``: why it has ended, or could not be made."""
        ip, _, port = address.rpartition(":")
        process = current()
        wire = Wire(self, process)
        near = wire.ends[0]
        near.on_end = on_end
        target = self.hosts.get(ip)
        if target is None:
            return wire  # no such host: silence
        self._wires.append(wire)
        self._knock(process.host, target, int(port), lambda listener: wire.arrive(listener), wire.refused)
        return wire

    def _knock(
        self, source: Host, target: Host, port: int, opened: Callable[[Listener], None], refused: Callable[[], None]
    ) -> None:
        """A first packet, until it is answered. Callbacks come in no process."""
        tries = 0

        def back(callback: Callable[..., None], *args: Any) -> None:
            self.loop.call_later(self.delay(target, source), callback, *args, context=_NOBODY)

        def syn() -> None:
            nonlocal tries
            blocked = self.verdict(source, target) or self.verdict(target, source)
            if blocked is Firewall.REJECT:
                self.loop.call_later(0.0002, refused, context=_NOBODY)
            elif blocked is Firewall.DROP or not target.up or target.frozen:
                tries += 1
                if tries < 5:  # as a kernel does: after 1, 3, 7 s
                    self.loop.call_later(2.0 ** (tries - 1), syn, context=_NOBODY)
            elif port in target.listeners:
                back(opened, target.listeners[port])
            else:
                back(refused)

        self.loop.call_later(self.delay(source, target), syn, context=_NOBODY)

    async def connect_plainly(self, protocol_factory: Any, ip: str, port: int) -> Any:
        """For asyncio.open_connection: only whether it opens."""
        source, target = current().host, self.hosts.get(ip)
        answer: asyncio.Future[bool] = self.loop.create_future()

        def settle(opened: bool) -> None:
            if not answer.done():
                answer.set_result(opened)

        if target is not None:
            self._knock(source, target, int(port), lambda _: settle(True), lambda: settle(False))
        if not await answer:
            raise ConnectionRefusedError
        return _PlainTransport(), protocol_factory()

    def reset(self, a: str, b: str) -> None:
        """Every connection between these hosts gets a reset, at the ends that it still reaches."""
        for wire in [w for w in self._wires if {e.host.ip for e in w.ends} == {a, b}]:
            wire.reset()

    # -- datagrams ----------------------------------------------------------------------------------

    def datagram_client(self, protocol_factory: Any, remote: Address) -> Any:
        protocol = protocol_factory()
        return DatagramClient(self, current(), protocol, remote), protocol

    def send_datagram(
        self, source: Process, target: Address, deliver: Callable[[DatagramSocket], None], refused: Callable[[], None]
    ) -> None:
        """One way, to any process that has the port then."""
        host = self.hosts.get(target[0])
        if host is None:
            return
        blocked = self.verdict(source.host, host)
        if blocked is Firewall.REJECT:
            source.call(0.0002, refused)
        if blocked is not None or self.random.random() < self.weather.loss:
            return
        copies = 2 if self.random.random() < self.weather.repeat else 1

        def arrive() -> None:
            if not host.up or host.frozen or not self.reaches(source.host, host):
                return
            socket = host.sockets.get(target[1])
            if socket is not None:
                deliver(socket)
            elif self.reaches(host, source.host):
                source.call(0.0002, refused)

        for _ in range(copies):
            self.loop.call_later(self.delay(source.host, host), arrive, context=_NOBODY)


@dataclass
class End:
    """One side of a connection. ``on_item``, ``on_end`` run in its process."""

    process: Process
    on_item: Callable[[Any], None] | None = None
    on_end: Callable[[str], None] | None = None
    boots: int = 0
    over: bool = False

    @property
    def host(self) -> Host:
        return self.process.host


class Wire:
    """One connection. ``ends[0]`` has made it; ``ends[1]`` is there once it has been accepted."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self.ends = [End(process, boots=process.host.boots)]
        self._stalled: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._newest = [0.0, 0.0]
        process.at_end.append(lambda: self._lost(0))

    def arrive(self, listener: Listener) -> None:
        if self.ends[0].over:
            return
        process = listener.process
        if process.dead:
            self.refused()
            return
        self.ends.append(End(process, boots=process.host.boots))
        process.at_end.append(lambda: self._lost(1))
        process.call(0.0, listener.accept, self)

    def refused(self) -> None:
        self._finish(0, "refused")

    def send(self, side: int, item: Any) -> None:
        """From this side to the other."""
        if self.ends[side].over or len(self.ends) < 2 or self._network.over:
            return
        self._network.look_at(item)
        loop, near, far = self._network.loop, self.ends[side], self.ends[1 - side]
        at = max(self._newest[side], loop.now + self._network.delay(near.host, far.host))
        self._newest[side] = at
        loop.call_at(at, self._arrives, side, item, context=_NOBODY)

    def _arrives(self, side: int, item: Any) -> None:
        near, far = self.ends[side], self.ends[1 - side]
        if near.boots != near.host.boots and near.over:
            return
        blocked = self._network.verdict(near.host, far.host)
        if self._stalled[side] or blocked is Firewall.DROP or not far.host.up or far.host.frozen:
            self._stalled[side].append(item)
            if blocked is None and far.host.frozen:
                self._network.loop.call_later(0.05, self.flush, context=_NOBODY)
            elif blocked is None and not far.host.up:
                self._network.loop.call_later(0.5, self.flush, context=_NOBODY)
        elif blocked is Firewall.REJECT:
            self._finish(side, "reset")
        else:
            self._hand_over(side, item)

    def _hand_over(self, side: int, item: Any) -> None:
        far = self.ends[1 - side]
        if far.boots != far.host.boots or (far.over and item is not _RESET):
            self._tell_reset(1 - side)  # no one has this connection there any more: its kernel says so
        elif item is _RESET or item is _CLOSED:
            self._finish(1 - side, "reset" if item is _RESET else "closed")
        elif far.on_item is not None:
            on_item = far.on_item
            far.process.call(0.0, on_item, item)

    def flush(self) -> None:
        """The path may be whole again: what has been waiting goes on, after a moment, as with TCP."""
        for side in (0, 1):
            if self._stalled[side]:
                self._network.loop.call_later(
                    0.02 + 0.4 * self._network.random.random(), self._retry, side, context=_NOBODY
                )

    def _retry(self, side: int) -> None:
        near, far = self.ends[side], self.ends[1 - side]
        if not self._stalled[side] or not self._network.reaches(near.host, far.host):
            return
        if not far.host.up or far.host.frozen:
            self._network.loop.call_later(0.2, self._retry, side, context=_NOBODY)
            return
        waiting = list(self._stalled[side])
        self._stalled[side].clear()
        for item in waiting:
            self._hand_over(side, item)

    def close(self, side: int) -> None:
        """Orderly: what was sent before arrives before."""
        self.send(side, _CLOSED)
        self._finish(side, "closed")

    def reset(self) -> None:
        """By something in between."""
        for side in range(len(self.ends)):
            near, far = self.ends[1 - side if len(self.ends) > 1 else side], self.ends[side]
            if near is far or (self._network.reaches(near.host, far.host) and far.host.up):
                self._finish(side, "reset")

    def _tell_reset(self, side: int) -> None:
        """From this side's kernel to the other end."""
        if len(self.ends) < 2:
            return
        near, far = self.ends[side], self.ends[1 - side]

        def arrives() -> None:
            if far.host.up and self._network.reaches(near.host, far.host):
                self._finish(1 - side, "reset")

        self._network.loop.call_later(self._network.delay(near.host, far.host), arrives, context=_NOBODY)

    def _lost(self, side: int) -> None:
        """The process at this side has ended; its kernel closes what it had."""
        if side < len(self.ends) and not self.ends[side].over:
            self.ends[side].over = True
            self._tell_reset(side)

    def _finish(self, side: int, why: str) -> None:
        if side >= len(self.ends) or self.ends[side].over:
            return
        end = self.ends[side]
        end.over = True
        if all(e.over for e in self.ends):
            self._network.forget(self)
        if end.on_end is not None:
            end.process.call(0.0, end.on_end, why)


class DatagramClient:
    """What asyncio gives a protocol as its transport."""

    def __init__(self, network: Network, process: Process, protocol: Any, remote: Address) -> None:
        self._network = network
        self._process = process
        self._protocol = protocol
        self._remote = remote
        self._closed = False
        self.address = (process.host.ip, process.host.free_port())
        self._socket = DatagramSocket(network, process)
        self._socket.taken = self._take
        process.host.sockets[self.address[1]] = self._socket

    def sendto(self, data: bytes) -> None:
        def deliver(socket: DatagramSocket) -> None:
            socket.take(data, self.address)

        self._network.look_at(data)
        self._network.send_datagram(self._process, self._remote, deliver, self._refused)

    def _take(self, data: bytes, address: Address) -> None:
        if not self._closed:
            self._protocol.datagram_received(data, address)

    def _refused(self) -> None:
        if not self._closed:
            self._protocol.error_received(ConnectionRefusedError("port unreachable"))

    def abort(self) -> None:
        self._closed = True
        self._process.host.sockets.pop(self.address[1], None)

    close = abort


class DatagramSocket:
    """What ``socket.socket(..., SOCK_DGRAM)`` gives: bound, not blocking."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._queue: deque[tuple[bytes, Address]] = deque()
        self.on_readable: Callable[[], None] | None = None
        self.taken: Callable[[bytes, Address], None] | None = None
        self.port = 0
        process.at_end.append(self.close)

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *_: Any) -> None:
        pass

    def bind(self, address: Address) -> None:
        self.port = address[1]
        self._process.host.sockets[self.port] = self

    def take(self, data: bytes, address: Address) -> None:
        """By the kernel: it waits here until the process reads it."""
        if self.taken is not None:
            self._process.call(0.0, self.taken, data, address)
            return
        self._queue.append((data, address))
        self._process.call(0.0, self._readable)

    def _readable(self) -> None:
        if self._queue and self.on_readable is not None:
            self.on_readable()

    def recvfrom(self, _: int) -> tuple[bytes, Address]:
        if not self._queue:
            raise BlockingIOError
        return self._queue.popleft()

    def sendto(self, data: bytes, address: Address) -> None:
        def deliver(socket: DatagramSocket) -> None:
            socket.take(data, (self._process.host.ip, self.port))

        self._network.look_at(data)
        self._network.send_datagram(self._process, address, deliver, lambda: None)

    def close(self) -> None:
        if self._process.host.sockets.get(self.port) is self:
            del self._process.host.sockets[self.port]


class _PlainTransport:
    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


_RESET = object()
_CLOSED = object()
_NOBODY = contextvars.Context()
"""Of what the network does by itself, in no process."""

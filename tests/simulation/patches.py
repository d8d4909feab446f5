"""Where our code asks the operating system, it gets the simulation: time, chance, processes, network, files.

Everything is replaced where it is looked up, for as long as histories run; nothing of controller, agent, election,
relay, heartbeats or gate itself is.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc.aio

from flashrecovery import events as ev
from flashrecovery import job
from flashrecovery.agent import agent as agent_module
from flashrecovery.agent.controller_link import session as agent_session
from flashrecovery.agent.monitoring import failure_reports, hang, heartbeat
from flashrecovery.agent.processes import process_manager, providers
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.controller.service import outbound, rank_table_publisher
from flashrecovery.controller.service import service as service_module
from flashrecovery.controller.storage import generation_file
from flashrecovery.controller.storage.generation_file import Numbers
from flashrecovery.heartbeat import receiver
from tests.simulation.laws import Violation
from tests.simulation.loop import PROCESS, current
from tests.simulation.network import DatagramSocket
from tests.simulation.process import SimDeathWatch, SimWorkerProcess
from tests.simulation.rpc import SimChannel, SimServer
from tests.simulation.world import World
from tests.support import validated

_world: World | None = None
_slow_disks = False
_slow_starts = False
_EPOCH = 1_800_000_000.0


def world() -> World:
    """The one whose history runs."""
    assert _world is not None
    return _world


@contextmanager
def inside(one: World) -> Iterator[None]:
    """Run the history of this world."""
    global _world
    _world = one
    try:
        yield
    finally:
        _world = None


def _monotonic() -> float:
    if _world is None:
        return _real_monotonic()
    process = PROCESS.get()
    return _world.loop.now + (process.host.clock if process is not None else 0.0)


def _boottime() -> float:
    if _world is None:
        return _real_clock_gettime(time.CLOCK_BOOTTIME)
    process = PROCESS.get()
    return _world.loop.now + (process.host.boot if process is not None else 0.0)


def _wall() -> float:
    if _world is None:
        return _real_time()
    process = PROCESS.get()
    return _EPOCH + _world.loop.now + (process.host.wall if process is not None else 0.0)


def _clock_gettime(clock: int) -> float:
    which = {time.CLOCK_MONOTONIC: _monotonic, time.CLOCK_BOOTTIME: _boottime, time.CLOCK_REALTIME: _wall}
    return which[clock]() if clock in which else _real_clock_gettime(clock)


_real_monotonic, _real_time, _real_clock_gettime = time.monotonic, time.time, time.clock_gettime


def _drawn(bits: int) -> int:
    return world().random.getrandbits(bits)


@contextmanager
def slow_disks() -> Iterator[None]:
    """In all histories that are run meanwhile."""
    global _slow_disks
    _slow_disks = True
    try:
        yield
    finally:
        _slow_disks = False


@contextmanager
def slow_starts() -> Iterator[None]:
    """In all histories that are run meanwhile: what starts a process takes its time, as a zygote on a busy host."""
    global _slow_starts
    _slow_starts = True
    try:
        yield
    finally:
        _slow_starts = False


class _RunDir:
    """No directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events_path = path / "events.jsonl"
        self.log_dir = path / "logs"

    def log_path(self, rank: int, generation: int) -> Path:
        return self.log_dir / f"rank{rank}.gen{generation}.log"

    def write_rank_table(self, generation: int, ranks: object) -> None:
        pass

    def write_controller(self, address: str, *_: object, **__: object) -> None:
        world().addresses.append(address)

    def close(self) -> None:
        pass


class _EventLog:
    """Into the trace."""

    def __init__(self, path: Path) -> None:
        self._process = current()

    def write(self, event: ev.Event) -> ev.Event:
        if not world().over:
            world().event(self._process, event)
        return event

    def subscribe(self, listener: object) -> None:
        pass

    def close(self) -> None:
        pass


class _Store:
    """The TCPStore's process: its port, and nothing behind it."""

    def __init__(self, host: str, port: int) -> None:
        self.port = current().host.free_port()

    def revive(self) -> None:
        return None

    def close(self) -> None:
        pass


class _Health:
    """No devices."""

    suspect = None

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NoThread:
    """In place of the executor that writes the rank table."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, *_: object) -> None:
        pass

    def shutdown(self, *_: object, **__: object) -> None:
        pass


class _GenerationFile:
    """Each host has its own disk, which outlives its processes. With :func:`slow_disks` it is now and then as slow
    as a network file system, and what takes longer than the controller waits for is written down after it is used."""

    def __init__(self, *_: object) -> None:
        self._process = current()
        self._asked: tuple[str, Numbers] | None = None
        self._kept: tuple[str, Numbers] | None = None

    def read(self) -> Mapping[str, Numbers]:
        return self._process.host.numbers

    def kept(self, launch: str, numbers: Numbers, then: Callable[[], None]) -> bool:
        wanted = launch, numbers
        if not _slow_disks:
            self._written(wanted)
            return True
        if self._kept == wanted:
            return True
        if self._asked != wanted:
            self._asked, disk = wanted, world().slow_disk
            took_s = disk.choice((0.0, 0.002, 0.05, disk.uniform(0.0, 0.5), disk.uniform(0.5, 2.0)))
            self._process.call(took_s, self._written, wanted)
            self._process.call(min(took_s, generation_file._PATIENCE_S), self._use, wanted, then)
        return False

    def _written(self, wanted: tuple[str, Numbers]) -> None:
        launch, numbers = wanted
        self._process.host.numbers[launch] = max(numbers, self._process.host.numbers.get(launch, numbers))

    def _use(self, wanted: tuple[str, Numbers], then: Callable[[], None]) -> None:
        if self._asked == wanted and self._kept != wanted:
            self._kept = wanted
            then()

    def close(self) -> None:
        self._asked = None


class _Tail:
    def __init__(self, *_: object) -> None:
        pass

    def follow(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def _server(
    migration_thread_pool: object = None, *, options: object = (), interceptors: Any = (), **_: object
) -> SimServer:
    server = SimServer(world().network, interceptors or ())
    server.errors = lambda method, error: world().laws.broken("handler", f"{method} raises {error!r}", error)
    return server


def _channel(target: str, options: object = None, **_: object) -> SimChannel:
    return SimChannel(world().network, target)


async def _moved_to(path: Path, place: job.Place) -> job.Place | None:
    from dataclasses import replace

    one = world()
    for address in reversed(one.addresses):
        if address == f"{place.controller}:{place.port}":
            continue
        if await job.answers(address, place.access):
            host, _, port = address.rpartition(":")
            return replace(place, controller=host, port=int(port), embeds=False)
    return None


@asynccontextmanager
async def _observed(*_: object, **__: object) -> AsyncIterator[str]:
    yield ""


class _Service(service_module.ControllerService):
    """The real one; the laws look on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sim_process = current()
        world().services.append((self._sim_process, self))
        elector_set, machine = self._elector_set, self.machine
        on_tick = machine.on_tick

        def watched(now: float) -> None:
            world().laws.decides(self._sim_process, self)
            on_tick(now)

        del elector_set
        machine.on_tick = watched  # type: ignore[method-assign]

    def has_erred(self, error: Exception) -> None:
        if not isinstance(error, Violation):
            world().laws.broken("handler", f"the controller's own code raises {error!r}", error)
        super().has_erred(error)


class _Agent(agent_module.Agent):
    """The real one; the laws look at what it remembers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        world().agent_of[current()] = self

    def measure_speed(self) -> None:
        """A host of the simulation has none."""


class _Election(agent_session.Election):
    """The real one; the laws look at its terms."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("term", "promised") and value < getattr(self, name, 0) and not world().over:
            world().laws.term_falls(current(), name, getattr(self, name), value)
        super().__setattr__(name, value)

    def forget(self) -> None:
        super().__setattr__("term", 0)
        super().forget()


def _socket_module() -> Any:
    return SimpleNamespace(
        SOCK_DGRAM=socket.SOCK_DGRAM,
        SOL_SOCKET=socket.SOL_SOCKET,
        SO_RCVBUF=socket.SO_RCVBUF,
        AF_INET=socket.AF_INET,
        socket=lambda *_: DatagramSocket(world().network, current()),
        getaddrinfo=lambda host, port, **_: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, port))],
    )


@contextmanager
def simulated() -> Iterator[None]:
    """Histories can be run inside. The controller's machine is validated after each event."""
    validated.install()
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", _monotonic),
        (time, "monotonic_ns", lambda: int(_monotonic() * 1e9)),
        (time, "clock_gettime", _clock_gettime),
        (time, "clock_gettime_ns", lambda clock: int(_clock_gettime(clock) * 1e9)),
        (time, "time", _wall),
        (uuid, "uuid4", lambda: uuid.UUID(int=_drawn(128), version=4)),
        (secrets, "randbits", _drawn),
        (secrets, "token_bytes", lambda n=32: _drawn(8 * n).to_bytes(n, "little")),
        (secrets, "token_hex", lambda n=32: _drawn(8 * n).to_bytes(n, "little").hex()),
        (grpc.aio, "insecure_channel", _channel),
        (grpc.aio, "server", _server),
        (receiver, "socket", _socket_module()),
        (job, "rendezvous_of", lambda config: world().rendezvous_of(config)),
        (job, "_moved_to", _moved_to),
        (job, "RunDir", _RunDir),
        (job, "EventLog", _EventLog),
        (job, "observed", _observed),
        (job, "recorder_of", lambda *_: SimpleNamespace(course_json=str)),
        (job, "_on_signals", lambda *_: None),
        (job, "ControllerService", _Service),
        (job, "Agent", _Agent),
        (agent_session, "Election", _Election),
        (providers.Spawned, "start", _spawn),
        (process_manager, "DeathWatch", lambda loop: SimDeathWatch(world())),
        (process_manager, "LogTail", _Tail),
        (agent_module, "StoreServer", _Store),
        (agent_module, "NodeHealth", _Health),
        (failure_reports, "exit_of", lambda pid: world().workers[pid].exit),
        (hang, "is_stopped", lambda pid: world().workers[pid].stopped),
        (Identity, "network_env", lambda self: {}),
        (heartbeat, "_CONFIRM_POLL_S", 0.02),
        (outbound, "_keep_what_there_is", lambda: None),
        (rank_table_publisher, "ThreadPoolExecutor", _NoThread),
        (service_module, "GenerationFile", _GenerationFile),
    ]
    with ExitStack() as stack:
        for where, name, what in replaced:
            stack.enter_context(patch.object(where, name, what))
        stack.enter_context(patch.object(service_module, "print", lambda *_, **__: None, create=True))
        yield


async def _spawn(_: providers.Spawned, order: providers.ProcessOrder) -> SimWorkerProcess:
    if _slow_starts:
        await asyncio.sleep(world().slow_start.choice((0.0, 0.05, 0.5, 3.0, 9.0)))
    return SimWorkerProcess.make(world(), order.log, standby=order.standby)

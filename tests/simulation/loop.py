"""An event loop whose time is virtual, and the processes that run on it.

Nothing is ever waited for: when no callback is ready, the clock jumps to the next timer. All simulated processes of all
hosts share the one loop; which process a callback belongs to is in its context, so a frozen process's callbacks wait
until it goes on, and a dead one's never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.network import Host

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated process", default=None)


class Life(Enum):
    """What a simulated process is doing."""

    RUNS = "runs"
    FROZEN = "frozen"
    DEAD = "dead"


class Idle(Exception):
    """Nothing will ever happen again: everybody waits for another process."""


class Process:
    """One simulated operating system process on ``host``."""

    def __init__(self, loop: VirtualLoop, host: Host, name: str) -> None:
        self.loop = loop
        self.host = host
        self.name = name
        self.life, self._went_on_at = Life.RUNS, float("-inf")
        self.at_end: list[Callable[[], None]] = []
        self._held: deque[asyncio.Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def runs(self) -> bool:
        """Whether its callbacks run now."""
        return self.life is Life.RUNS and not self.host.frozen

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD

    def hold(self, handle: asyncio.Handle) -> None:
        """A callback whose time has come while the process does not run."""
        (self.loop.never if self.dead else self._held).append(handle)

    @property
    def went_on_at(self) -> float:
        """When it went on, after it or its host had stood still; -inf: it has not."""
        return max(self._went_on_at, self.host.went_on_at)

    def freeze(self) -> None:
        """SIGSTOP."""
        if not self.dead:
            self.life = Life.FROZEN

    def thaw(self) -> None:
        """SIGCONT."""
        if not self.dead:
            self.life, self._went_on_at = Life.RUNS, self.loop.now
        self.catch_up()

    def catch_up(self) -> None:
        """What has waited runs now, in its order."""
        if self.runs:
            held, self._held = self._held, deque()
            self.loop.requeue(held)

    def held_timers(self, since: float) -> list[asyncio.TimerHandle]:
        """Takes out of what waits the timers that were not due at that time."""
        late = [h for h in self._held if isinstance(h, asyncio.TimerHandle) and h.when() > since]
        self._held = deque(h for h in self._held if h not in late)
        return late

    def release(self) -> None:
        """The history is over: nothing is held any more."""
        held, self._held = self._held, deque()
        self.loop.requeue(held)

    def end(self) -> None:
        """It is killed: nothing of it runs any more; any process that watches it is told."""
        if self.dead:
            return
        self.life = Life.DEAD
        self.loop.never.extend(self._held)
        self._held.clear()
        callbacks, self.at_end = self.at_end, []
        for callback in callbacks:
            callback()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        task: asyncio.Task[Any] = self.context.copy().run(self.loop.create_task, coroutine)
        return task

    def call(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """A callback of this process, after a delay."""
        if delay_s == 0.0:
            return self.loop.call_soon(callback, *args, context=self.context)
        return self.loop.call_later(delay_s, callback, *args, context=self.context)


def current() -> Process:
    """The process whose code runs now."""
    process = PROCESS.get()
    assert process is not None, "outside of every simulated process"
    return process


class VirtualLoop(asyncio.BaseEventLoop):
    """Time jumps. What the kernel offers to real loops, the simulated ``network`` offers to this one."""

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.handled = 0
        self._asked = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.never: list[asyncio.Handle] = []
        """Callbacks of the dead; they run when the history is over, so that every coroutine comes to its end."""
        self.over = False
        self.network: Any = None
        self.after: Callable[[], None] | None = None
        """Called when all that was due at one moment has run."""

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """As asyncio's, without its checks: a third of all time would go into them."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Of two that are due at the same time, the one that was asked for first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._asked += 1
        heapq.heappush(self._timers, (when, self._asked, timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def postpone(self, host: Host, since: float) -> None:
        """The timers of this host have not gone on since then."""
        slept = self.now - since
        moved = [h for process in host.processes for h in process.held_timers(since)]
        for when, _, timer in self._timers:
            process = timer._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is not None and process.host is host and when > since:
                moved.append(timer)
        gone = set(map(id, moved))
        self._timers = [entry for entry in self._timers if id(entry[2]) not in gone]
        for timer in moved:
            timer._when += slept  # type: ignore[attr-defined]
            self._asked += 1
            self._timers.append((timer.when(), self._asked, timer))
        heapq.heapify(self._timers)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def requeue(self, handles: Iterable[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Idle
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        runs = Life.RUNS
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is not None and (process.life is not runs or process.host.frozen) and not self.over:
                process.hold(handle)
                continue
            self.handled += 1
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's own handles do it
                self.call_exception_handler({"message": "in a callback", "exception": error, "handle": handle})
        if self.after is not None:
            self.after()

    # -- what BaseEventLoop wants of its selector ---------------------------------------------------

    def _process_events(self, event_list: object) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        pass

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Simulated processes get no catchable signals."""

    # -- the network --------------------------------------------------------------------------------

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.network.connect_plainly(protocol_factory, host, port)

    async def create_datagram_endpoint(self, protocol_factory: Any, *_: Any, remote_addr: Any = None, **__: Any) -> Any:
        return self.network.datagram_client(protocol_factory, remote_addr)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        fd.on_readable = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        fd.on_readable = None
        return True

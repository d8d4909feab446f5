"""What :class:`flashrecovery.agent.processes.process.WorkerProcess` and the watch over it offer, without a process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import Exit
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import _COMMITTED, _GENERATION, Health, Page
from tests.simulation.loop import Life, Process, current
from tests.simulation.worker import ModelWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

_PIPE_S = 0.0001


class Popen:
    """What is asked of a ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class _Half:
    """The page's words for someone who reads while they change: after the first of the two words that belong together,
    the writer does all that it is about to do."""

    def __init__(self, words: Any, act: Callable[[], None]) -> None:
        self._words, self._act = words, act

    def __getitem__(self, index: int) -> int:
        value: int = self._words[index]
        if index in (_COMMITTED, _GENERATION):
            self._act()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value


class SimPage(Page):
    """A page that can be read at the same time as it is written, although there is one thread."""

    _amid: tuple[Process, Callable[[], None]] | None = None
    _skipped = 0

    def health(self) -> Health:
        if self._amid is None or not self._amid[0].runs:
            return super().health()
        if self._skipped > 0:
            self._skipped -= 1
            return super().health()
        words = self._words
        self._words = _Half(words, self._act)  # type: ignore[assignment]
        try:
            return super().health()
        finally:
            self._words = words

    def _act(self) -> None:
        if self._amid is not None:
            (_, act), self._amid = self._amid, None
            act()

    async def amid(self, process: Process, act: Callable[[], bool], wait_s: float, skipped: int) -> bool:
        """Do this in the middle of the next reading but ``skipped``, or after this time. Returns what it does."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._skipped = skipped
        self._amid = process, lambda: done.set_result(process.context.copy().run(act))
        timer = process.call(wait_s, self._act)
        try:
            return await done
        finally:
            self._amid = None
            timer.cancel()


class SimWorkerProcess(WorkerProcess):
    """One training process as its agent sees it."""

    child: Popen

    def __init__(self, world: World, pid: int, page: SimPage, process: Process) -> None:
        super().__init__(Popen(pid), page, None)  # type: ignore[arg-type]
        self.sim_page = page
        self.world = world
        self.process = process
        self.agent = current()
        self.model: ModelWorker | None = None
        self._on_message: Callable[[WorkerProcess, pb.FromWorker], None] | None = None
        self._early: list[pb.FromWorker] = []
        self._exits: list[Callable[[], None]] = []
        process.at_end.append(self._ended)
        self.agent.at_end.append(self._orphaned)

    @staticmethod
    def make(world: World, log: Path, *, standby: bool) -> SimWorkerProcess:
        pid = next(world.pids)
        host = current().host
        process = Process(world.loop, host, f"pid{pid}")
        host.processes.append(process)
        world.processes.append(process)
        page = SimPage(Page.create("simulated").fd)
        made = SimWorkerProcess(world, pid, page, process)
        world.workers[pid] = made
        return made

    # -- the channel --------------------------------------------------------------------------------

    async def connect(
        self,
        on_message: Callable[[WorkerProcess, pb.FromWorker], None],
        on_garbage: Callable[[WorkerProcess, str], None] = lambda _process, _why: None,
    ) -> asyncio.Task[None]:
        self._on_message = on_message
        early, self._early = self._early, []
        for message in early:
            self._deliver(message)
        await asyncio.sleep(0)
        return asyncio.create_task(asyncio.sleep(0))  # nothing has to be read

    def send(self, message: pb.ToWorker) -> None:
        copy = pb.ToWorker.FromString(message.SerializeToString())
        self.process.call(_PIPE_S, self._heard, copy)

    def _heard(self, message: pb.ToWorker) -> None:
        body = message.WhichOneof("body")
        if body == "assign":
            self.model = ModelWorker(self.world, self.process, self.sim_page, message.assign, self._say)
            self.process.start(self.model.control())
            self.process.start(self.model.main())
        elif body == "controller" and self.model is not None:
            self.model.controller_heard = message.controller.heard
        elif body == "warm":
            self.process.call(0.2, self._say, pb.FromWorker(warmed=pb.Warmed()))
        elif body == "command" and self.model is not None:
            self.model.hear(message.command)

    def _say(self, message: pb.FromWorker) -> None:
        copy = pb.FromWorker.FromString(message.SerializeToString())
        self.agent.call(_PIPE_S, self._deliver, copy)

    def _deliver(self, message: pb.FromWorker) -> None:
        if self._on_message is None:
            self._early.append(message)
        elif not self._closed:
            self._on_message(self, message)

    _closed = False

    async def hear_out(self, timeout_s: float, *, until_last_words: bool = False) -> None:
        await asyncio.sleep(0.002)

    # -- its life -----------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """When it ends."""
        if self.process.dead:
            callback()
        else:
            self._exits.append(callback)

    def exits(self, code: int) -> None:
        """By itself."""
        if not self.process.dead:
            self.child.returncode = code
            self.process.end()

    def _ended(self) -> None:
        if self.child.returncode is None:
            self.child.returncode = -signal.SIGKILL
        exits, self._exits = self._exits, []
        for callback in exits:
            callback()

    def _orphaned(self) -> None:
        """The agent is gone; this process notices, and ends."""
        self.process.call(0.001, self.exits, 1)

    @property
    def exit(self) -> Exit:
        code = self.child.returncode
        return Exit.from_returncode(code if code is not None else 0)

    def signal(self, number: int) -> None:
        if self.process.dead:
            return
        if number == signal.SIGSTOP:
            self.process.freeze()
        elif number == signal.SIGCONT:
            self.process.thaw()
        elif number == signal.SIGTERM:
            self.exits(-signal.SIGTERM)
        else:
            self.process.end()

    def kill(self) -> None:
        if not self.process.dead:
            self.world.note(f"pid {self.pid} (rank {self.place}) is killed by its agent")
        self.process.end()

    async def gone(self, timeout_s: float) -> bool:
        await asyncio.sleep(0.001)
        return self.process.dead

    @property
    def returncode(self) -> int | None:
        return self.child.returncode

    async def end(self, timeout_s: float) -> int | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.child.returncode is None:
            if loop.time() > deadline:
                return None
            await asyncio.sleep(0.05)
        return self.child.returncode

    def close(self) -> None:
        self.process.end()
        if not self._closed:
            self._closed = True
            self.page.close()

    @property
    def stopped(self) -> bool:
        return self.process.life is Life.FROZEN


class SimDeathWatch:
    """:class:`flashrecovery.agent.processes.death_watch.DeathWatch`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open = True

    def add(self, pid: int, page_fd: int, callback: Callable[[float], None]) -> None:
        agent, delay = current(), 0.0005 + 0.002 * self._world.random.random()
        self._world.workers[pid].watch(lambda: agent.call(delay, self._tell, callback, delay))

    def _tell(self, callback: Callable[[float], None], late: float) -> None:
        if self._open:
            callback(late)

    def close(self) -> None:
        self._open = False

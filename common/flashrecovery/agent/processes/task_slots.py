"""The guards of a node: small processes that stand where a cluster's launcher has started one task for each rank.

srun, mpirun and others start a rank's process themselves, and end the job when it ends. So what they start is a guard
(:mod:`flashrecovery.adopt`): it runs the rank's process as its child and stays until the job's end, whatever happens to
that process. To the agent, a guard is a provider: a rank's first process is started where the launcher has put the task
(its control group, its CPUs, its limits). A replacement is forked from a zygote of the agent, with the task's variables
and CPUs, wherever such a process reaches what the task reaches; else the guard starts this one, too.

A guard's child is no child of the agent. Its entry in the kernel's table is kept by the guard until the agent needs it
no more; if the guard dies, its child dies with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import entry_of
from flashrecovery.agent.processes.providers import ProcessOrder
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import CPUS_ENV
from flashrecovery.runtime.framed import Framed
from flashrecovery.runtime.local_socket import is_ours
from flashrecovery.runtime.surroundings import Surroundings
from flashrecovery.runtime.task import Task, renumbered

_SEND_S = 0.5
"""A guard reads at once; one that does not is stopped."""
_ANSWER_S = 10.0
"""A guard starts a process in milliseconds. On a machine that is very busy it takes longer."""
_TAKE_S = 10.0
"""Longest wait for the guards to have taken the job's end, and gone."""

_READ_BY_C = ("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "TORCH_")
"""Variables that C libraries read when they are loaded."""

log = logging.getLogger("flashrecovery")


class GuardLostError(Exception):
    """A guard has ended, or does not answer."""


class ForeignProcess:
    """A process whose parent is a guard; also a :class:`~.zygote_process.Child`. ``reap``: called when its exit code
    is no longer needed."""

    def __init__(self, pid: int, reap: Callable[[int], None]) -> None:
        self.pid = pid
        self._reap = reap
        entry = entry_of(pid)
        self._started = None if entry is None else entry.started
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """None while the pid is this process's, or unused."""
        if self._returncode is None:
            entry = entry_of(self.pid)
            if entry is not None and entry.started != self._started:
                self._returncode = -signal.SIGKILL  # its guard is dead, and the pid another process's
        return self._returncode

    def end_of(self, _: int) -> int | None:
        """How it has ended, None while it runs. A dead guard takes its child along, and what is known of its end."""
        entry = entry_of(self.pid)
        if entry is None or entry.started != self._started:
            return -signal.SIGKILL
        return None if entry.ended is None else entry.ended.returncode

    def poll(self) -> int | None:
        if self._returncode is None and (code := self.end_of(self.pid)) is not None:
            self._returncode = code
            self._reap(self.pid)
        return self._returncode


class GuardedTask:
    """One guard as its agent sees it. ``said``: it has told something; ``lost``: it has ended."""

    def __init__(
        self,
        sock: socket.socket,
        said: Callable[[GuardedTask, pb.FromGuard], None],
        lost: Callable[[GuardedTask], None],
    ) -> None:
        self.hello = pb.GuardHello()
        self._sock = sock
        self._framed = Framed(sock)
        self._said = said
        self._lost = lost
        self._number = 0
        self._asked: dict[int, asyncio.Future[pb.StartedHere]] = {}
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def greeted(self, hello: pb.GuardHello) -> None:
        """It has said for which task it stands."""
        self.hello = hello

    @property
    def reach(self) -> Surroundings:
        """What the task has to do with."""
        return Surroundings.of(self.hello.reach)

    def _read(self) -> None:
        try:
            for message in self._arrived():
                if message.HasField("started"):
                    self._started(message.started)
                else:
                    self._said(self, message)
        except GuardLostError as e:
            log.debug("guard of local rank %d: %s", self.hello.local_rank, e)
            self._lost(self)

    def _arrived(self) -> list[pb.FromGuard]:
        try:
            return [pb.FromGuard.FromString(data) for data in self._framed.arrived()]
        except OSError as e:
            raise GuardLostError(str(e)) from e
        except DecodeError as e:
            raise GuardLostError(f"it says something unknown: {e}") from e

    def send(self, message: pb.ToGuard, *descriptors: int) -> None:
        """Raises GuardLostError."""
        if self._sock.fileno() < 0:
            raise GuardLostError("it has ended")
        self._sock.settimeout(_SEND_S)
        try:
            self._framed.send(message.SerializeToString(), descriptors)
        except OSError as e:
            raise GuardLostError(str(e)) from e
        finally:
            self._sock.setblocking(False)

    async def start(self, order: ProcessOrder, channel: int, page: int) -> int:
        """The pid of a new child of the guard.

        Raises:
            GuardLostError: it has ended.
            OSError: it could not start one, or (TimeoutError) does not answer.
        """
        self._number += 1
        number, answer = self._number, self._loop.create_future()
        self._asked[number] = answer
        try:
            start = pb.StartHere(number=number, env=order.env, log=str(order.log))
            self.send(pb.ToGuard(start=start), channel, page)
            started: pb.StartedHere = await asyncio.wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError as e:
            raise TimeoutError(f"it has not answered for {_ANSWER_S:g} s") from e
        finally:
            del self._asked[number]
        if started.error:
            raise OSError(started.error)
        return started.pid

    def _started(self, started: pb.StartedHere) -> None:
        answer = self._asked.get(started.number)
        if answer is not None and not answer.done():
            answer.set_result(started)
        elif started.pid:
            self.send(pb.ToGuard(reap=pb.Reap(pid=started.pid)))  # no caller waits for it any more

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(GuardLostError("it has ended"))


class Guards:
    """Those of this node, by local rank: the :class:`~.process_manager.Places` of its agent.

    Args:
        listener: where guards call.
        task: the one whose guard has started this agent; the others must agree with it.
        world_size: of the training; less than the launcher's where there are spare nodes.
        settings: the job's, as JSON, which must be the same for all.
        stop: called with a reason when no task of the job is left on this node, or one is signalled to end.
    """

    def __init__(
        self, listener: socket.socket, task: Task, world_size: int, settings: str, stop: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._task = task
        self._world_size = world_size
        self._settings = settings
        self._stop = stop
        self._guards: dict[int, GuardedTask] = {}
        self._callers: set[GuardedTask] = set()
        self._command: list[str] = []
        self._filled: dict[int, tuple[WorkerProcess, str]] = {}
        self._over: pb.JobOver | None = None
        self._all_here = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._own_reach = Surroundings.own()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._called)

    async def all_here(self, timeout_s: float) -> None:
        """Until every task of this node has its guard here. Raises ConfigError."""
        try:
            await asyncio.wait_for(self._all_here.wait(), timeout_s)
        except TimeoutError as e:
            ranks = [self._task.rank - self._task.local_rank + r for r in self._missing()]
            raise ConfigError(
                f"{self._task.launcher}: after {timeout_s:g} s (timeouts.rendezvous_s) the tasks of ranks {ranks} have "
                f"not come on this node, which has {self._task.local_world_size} tasks: each must run `flashrecovery "
                "adopt` with the same options and script"
            ) from e

    def _missing(self) -> list[int]:
        return [r for r in range(self._task.local_world_size) if r not in self._guards]

    @property
    def number(self) -> int:
        """The number of guards that are connected."""
        return len(self._guards)

    def cpus(self) -> set[int]:
        """Those that any of the tasks may use."""
        return {cpu for guard in self._guards.values() for cpu in guard.hello.cpus}

    def differing(self) -> list[str]:
        """Variables that are not the same in all tasks' environments, or not in all."""
        environments = [guard.hello.env for guard in self._guards.values()]
        names = {name for environment in environments for name in environment}
        return sorted(name for name in names if len({environment.get(name) for environment in environments}) > 1)

    # -- places of ranks ---------------------------------------------------------------------------

    async def start(self, order: ProcessOrder) -> WorkerProcess | None:
        """A process in the task's own place. None where a process of the agent's will do, as for a standby, and where
        the task has no guard any more."""
        place = order.local_rank
        guard = None if place is None else self._guards.get(place)
        if place is None or guard is None or (order.replacement and self.within_reach(place)):
            return None
        page = order.new_page()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = await guard.start(order, theirs.fileno(), page.fd)
        except (OSError, GuardLostError) as e:
            log.warning("the guard of local rank %d starts no process: %s", place, e)
            ours.close()
            page.close()
            if isinstance(e, GuardLostError):
                self._lost(guard)
            return None
        child = ForeignProcess(pid, lambda pid: self._tell(guard, pb.ToGuard(reap=pb.Reap(pid=pid))))
        return WorkerProcess(child, page, ours, child.end_of)

    def env(self, local_rank: int, rank: int) -> Mapping[str, str]:
        """What the environment of the task says. If the place is filled by another rank than its launcher had meant,
        its numbers are that one's."""
        guard = self._guards.get(local_rank)
        if guard is None:
            return {}
        own = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], **guard.hello.env}
        return {**own, **renumbered(own, rank, self._world_size), CPUS_ENV: json.dumps(list(guard.hello.cpus))}

    def within_reach(self, local_rank: int) -> bool:
        """Whether a process of the agent's can do in this place what one of the task's can: it reaches as much, and
        what libraries written in C have read when a zygote imported them is what they would read there."""
        guard = self._guards.get(local_rank)
        if guard is None:
            return True
        theirs = {name: value for name, value in guard.hello.env.items() if name.startswith(_READ_BY_C)}
        ours = {name: value for name, value in os.environ.items() if name in theirs}
        return self._own_reach.covers(guard.reach) and theirs == ours

    def filled(self, process: WorkerProcess, log: str) -> None:
        """``process`` fills its place now, and prints into ``log``."""
        self._filled[process.local_rank] = (process, log)
        guard = self._guards.get(process.local_rank)
        if guard is not None:
            self._tell(guard, pb.ToGuard(follow=pb.Follow(log=log)))

    # -- coming and going -----------------------------------------------------------------------------

    def _called(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            log.debug("a guard has gone before it was heard: %s", e)
            return
        if is_ours(sock):
            self._callers.add(GuardedTask(sock, self._hear, self._lost))
        else:
            sock.close()

    def _hear(self, guard: GuardedTask, message: pb.FromGuard) -> None:
        body = message.WhichOneof("body")
        if body == "hello":
            self._come(guard, message.hello)
        elif body == "signalled":
            self._signalled(guard, message.signalled.number)

    def _come(self, guard: GuardedTask, hello: pb.GuardHello) -> None:
        guard.greeted(hello)
        if self._over is not None:
            self._tell(guard, pb.ToGuard(over=self._over))
            return
        wrong = self._what_is_wrong(hello)
        if wrong:
            self._tell(guard, pb.ToGuard(over=pb.JobOver(code=2, reason=wrong)))
            return
        self._guards[hello.local_rank] = guard
        if hello.local_rank in self._filled:  # the task has been started again
            self._tell(guard, pb.ToGuard(follow=pb.Follow(log=self._filled[hello.local_rank][1])))
        self._command = self._command or list(hello.command)
        if not self._missing():
            self._all_here.set()

    def _what_is_wrong(self, hello: pb.GuardHello) -> str:
        task, said = self._task, (hello.world_size, hello.local_world_size, hello.rank - hello.local_rank)
        if said != (task.world_size, task.local_world_size, task.rank - task.local_rank):
            return (
                f"rank {hello.rank} has variables for {said[0]} ranks, {said[1]} of them on this node from {said[2]} "
                f"on, and "
                f"another task of the same job of {task.world_size}, {task.local_world_size} and "
                f"{task.rank - task.local_rank}: all tasks need variables of one launch"
            )
        if hello.local_rank in self._guards:
            return f"there are two tasks with local rank {hello.local_rank} on this node"
        if hello.settings != self._settings or (self._command and list(hello.command) != self._command):
            return f"the task of rank {hello.rank} has another command or other options than others of this node"
        if hello.directory != os.getcwd():
            return f"the task of rank {hello.rank} works in {hello.directory}, others of this node in {os.getcwd()}"
        return ""

    def _signalled(self, guard: GuardedTask, number: int) -> None:
        """SIGTERM and SIGINT end the job, as they end `flashrecovery run`. What else a launcher sends to a task (a
        warning that its time is up, say) is meant for the rank's process."""
        process, _ = self._filled.get(guard.hello.local_rank, (None, ""))
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stop(f"the task of rank {guard.hello.rank} got a signal to end ({signal.Signals(number).name})")
        elif process is not None and not process.dead:
            process.signal(number)

    def _tell(self, guard: GuardedTask, message: pb.ToGuard) -> None:
        try:
            guard.send(message)
        except GuardLostError as e:
            log.debug("guard of local rank %d: %s", guard.hello.local_rank, e)
            self._lost(guard)

    def _lost(self, guard: GuardedTask) -> None:
        """It has ended, or does not answer. Its rank goes on if another process than its child fills it."""
        if guard not in self._callers:
            return
        self._callers.discard(guard)
        guard.close()
        if self._guards.get(guard.hello.local_rank) is guard:
            del self._guards[guard.hello.local_rank]
            if self._over is None:
                log.warning("the task of rank %d is gone", guard.hello.rank)
        if not self._callers:
            self._all_gone.set()
            if self._over is None:
                self._stop("all tasks of this node are gone")

    async def end(self, code: int, reason: str) -> None:
        """The job is over: every guard ends with this code."""
        self._over = pb.JobOver(code=code, reason=reason)
        for guard in [*self._callers]:
            self._tell(guard, pb.ToGuard(over=self._over))
        try:
            if self._callers:
                self._all_gone.clear()
                await asyncio.wait_for(self._all_gone.wait(), _TAKE_S)
        except TimeoutError:
            log.warning("%d tasks of this node do not end", len(self._callers))
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for guard in self._callers:
            guard.close()

"""Stands in the place of one task until the job's end, and ends with the job's code.

A launcher ends a whole job when one of its tasks dies. A guard does nothing that could kill it: it imports no
framework, starts the rank's process when the agent asks for it, and copies what the rank prints, whichever process it
is by now, to the task's standard output. What the launcher signals to the task goes to the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from flashrecovery.adopt.copier import Copier
from flashrecovery.adopt.launch import TaskLaunch, start_agent
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime import local_socket
from flashrecovery.runtime.environment import AGENT_PID_ENV, LAUNCHER_PID_ENV
from flashrecovery.runtime.framed import Framed
from flashrecovery.runtime.process_control import adopt_orphans, die_with_parent, name_thread, start_interpreter
from flashrecovery.runtime.surroundings import Surroundings
from flashrecovery.runtime.task import Task
from flashrecovery.terminal import say

_LOOK_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_REFUSED = 2
"""As of the command line: options, or tasks, that are wrong."""
_AGENT_LEAVES_S = 15.0
"""The agent's own end after it has told its guards of the job's end, for the guard that has started it."""


def guard_task(task: Task, launch: TaskLaunch) -> int:
    """Guard this task to the end of its job. Returns the code for the launcher. Raises ConfigError."""
    launcher = os.environ.pop(LAUNCHER_PID_ENV, None)
    if launcher is not None:
        die_with_parent(int(launcher))
    name_thread("fr-guard")
    adopt_orphans()

    async def run() -> int:
        return await _Guard(task, launch).run()

    return asyncio.run(run())


class _Guard:
    def __init__(self, task: Task, launch: TaskLaunch) -> None:
        self._task = task
        self._launch = launch
        self._agent: subprocess.Popen[bytes] | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """To the end of the job."""
        loop = asyncio.get_running_loop()
        if self._task.local_rank == 0:
            self._agent = start_agent(self._launch)
        sock = await self._found()
        self._copier = Copier()
        self._framed = Framed(sock)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._say(pb.FromGuard(hello=self._hello()))
        sock.setblocking(False)
        loop.add_reader(sock, self._read)
        code, reason = await self._over
        loop.remove_reader(sock)
        for child in self._children.values():
            _kill(child)
        self._copier.close()
        sock.close()
        if code == _REFUSED:
            say(f"error: {reason}")
        elif code and self._task.local_rank == 0:
            say(f"the job failed: {reason}\nEvidence is kept in {self._launch.path}")
        if self._agent is not None:
            await self._agent_leaves(self._agent)
        return code

    async def _found(self) -> socket.socket:
        """A connection to the node's agent. Raises ConfigError if there is none in time."""
        limit = self._launch.config.timeouts.rendezvous_s
        deadline = time.monotonic() + limit
        while True:
            sock = local_socket.call(self._launch.socket_name, socket.SOCK_STREAM)
            if sock is not None:
                return sock
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{self._task.launcher}: after {limit:g} s (timeouts.rendezvous_s) there is no agent of job "
                    f"{self._task.job!r} on this node: the task with local rank 0, which starts it, has not come"
                )
            await asyncio.sleep(_LOOK_S)

    def _hello(self) -> pb.GuardHello:
        return pb.GuardHello(
            rank=self._task.rank,
            world_size=self._task.world_size,
            local_rank=self._task.local_rank,
            local_world_size=self._task.local_world_size,
            env=dict(os.environ),
            command=self._launch.command,
            directory=os.getcwd(),
            settings=self._launch.settings,
            cpus=os.sched_getaffinity(0),
            reach=Surroundings.own().lines(),
        )

    # -- what the agent says ----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            messages = self._framed.arrived()
        except OSError as e:
            self._end(1, f"the agent of this node has ended ({e}), see {self._launch.log}")
            return
        for data in messages:
            message = pb.ToGuard.FromString(data)
            body = message.WhichOneof("body")
            if body == "start":
                self._start(message.start)
            elif body == "reap":
                self._forget(message.reap.pid)
            elif body == "follow":
                self._copier.follow(Path(message.follow.log))
            elif body == "over":
                self._end(message.over.code, message.over.reason)

    def _start(self, start: pb.StartHere) -> None:
        channel, page = self._framed.descriptors[:2]
        del self._framed.descriptors[:2]
        started = pb.StartedHere(number=start.number)
        try:
            started.pid = self._started(start.env, start.log, channel, page)
        except OSError as e:
            started.error = str(e)
        finally:
            os.close(channel)
            os.close(page)
        self._say(pb.FromGuard(started=started))

    def _started(self, env: Mapping[str, str], log: str, channel: int, page: int) -> int:
        wanted = {**os.environ, **env, AGENT_PID_ENV: str(os.getpid())}
        with open(log, "ab") as out:
            child = start_interpreter("--worker", self._launch.command, wanted, channel, page, out)
        self._children[child.pid] = child
        return child.pid

    def _forget(self, pid: int) -> None:
        """The agent has seen this process's end."""
        child = self._children.pop(pid, None)
        if child is not None:
            _kill(child)
            self._reap()

    # -- signals -----------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        self._say(pb.FromGuard(signalled=pb.Signalled(number=number)))

    def _reap(self) -> None:
        """What the rank's processes have left behind has become this process's: its end is taken. That of the rank's
        processes themselves waits for the agent."""
        own = {*self._children, *(() if self._agent is None else (self._agent.pid,))}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def _say(self, message: pb.FromGuard) -> None:
        try:
            self._framed.send(message.SerializeToString())
        except OSError as e:
            self._end(1, f"the agent of this node has ended ({e}), see {self._launch.log}")

    # -- the end -------------------------------------------------------------------------------------

    def _end(self, code: int, reason: str) -> None:
        if not self._over.done():
            self._over.set_result((code, reason))

    async def _agent_leaves(self, agent: subprocess.Popen[bytes]) -> None:
        """So that the launcher finds nothing of the job when its last task has ended."""
        deadline = time.monotonic() + _AGENT_LEAVES_S
        while agent.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        self._reap()  # what the agent had not waited for


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With its session."""
    if child.returncode is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()

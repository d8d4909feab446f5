"""The node's zygotes (:mod:`flashrecovery.worker.startup.zygote`): which there are, and what they have imported.

The first one has imported nothing, and lives as long as the agent. From it one is forked that imports what the script
will import (``script_reading``), and once workers have taken a step, from this one another that imports what they have.
The newest that is ready forks workers and standbys; the one before is closed. A zygote that an import has made unfit to
be forked names the module, and the next attempt leaves that out. If one dies, the next is grown from the first one.

Where none is ready, or the one that was asked is lost, a new interpreter is started, as with ``start_method: spawn``.
If the first one is lost, too, another first one is started some time later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from flashrecovery.agent.processes.zygote_process import Adopted, Zygote, ZygoteLostError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import OF_ZYGOTES, UNFORKABLE_ENV, ZYGOTE_ENV
from flashrecovery.runtime.process_control import WORKER_PROGRAM, adopt_orphans

_READY_S = 120.0
"""The first workers wait so long for the imports that they would otherwise do themselves."""
_TRIES = 8
"""Modules that may turn out to be unfit, and zygotes that may die, before new interpreters are started instead."""
_AGAIN_S = (30.0, 120.0, 600.0)
"""After zygotes have died, so long until another first one: the first time, the second, and all later ones."""
_NOWHERE = "?"
"""The file of a module that is not the same one in all workers."""

log = logging.getLogger("flashrecovery")


class Zygotes:
    """Those of this node. ``notice``: for the job's events."""

    def __init__(self, command: list[str], log: Path, unforkable: Sequence[str], notice: Callable[[str], None]) -> None:
        self._command = command
        self._log = log
        self._unforkable = unforkable
        self._notice = notice
        self._first: Zygote | None = None
        self._current: Zygote | None = None
        self._growing: Zygote | None = None
        self._asked: asyncio.Future[int] | None = None  # for the one that is to grow
        self._closed: list[Zygote] = []  # or retired
        self._unwanted: list[Adopted] = []
        self._leave_out: list[str] = []
        self._known = KnownModules()
        self._grown: pb.Modules | None = None  # the modules that the growing one has received
        self._failures = 0
        self._env: Mapping[str, str] = {}
        self._ends = 0  # how often all were lost
        self._again: asyncio.TimerHandle | None = None
        self._over = False
        self._decided = asyncio.Event()

    def start(self, env: Mapping[str, str]) -> None:
        """The first one. It is ready in some tenths of a second, the next when it has imported. ``env``: what all ranks
        have in common of the environment."""
        adopt_orphans()
        self._env, self._again = env, None
        ours, theirs = socket.socketpair()
        own = {**OF_ZYGOTES, UNFORKABLE_ENV: " ".join(self._unforkable), ZYGOTE_ENV: str(theirs.fileno())}
        with theirs, open(self._log, "ab") as out:
            popen = subprocess.Popen(
                [sys.executable, "-u", "-m", WORKER_PROGRAM, "--zygote", *self._command],
                env={**os.environ, **env, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._first = Zygote(popen, ours, self._said, self._lost)

    async def ready(self) -> None:
        """Until one can fork, or it is clear that none will, or for two minutes at the most."""
        try:
            await asyncio.wait_for(self._decided.wait(), _READY_S)
        except TimeoutError:
            self._tell(f"it has been importing for {_READY_S:g} s")
            self._decided.set()

    async def fork(self, env: Mapping[str, str], descriptors: Sequence[int], *, standby: bool) -> int | None:
        """Fork a process that runs the script. Returns its pid; None if there is no zygote to fork it. A child that
        arrives after this call was cancelled is killed.

        Raises ZygoteLostError: the zygote was lost, and another one may have replaced it. Ask that one with a new
        channel and page: an unreported child may be using these.
        """
        zygote = self._current
        if zygote is None:
            return None
        try:
            asked = zygote.fork(pb.Fork(env=env, standby=standby), descriptors)
            return await self._answer(asked)
        except OSError as e:
            self._tell(str(e))
            return None
        except ZygoteLostError as e:
            self._warn(zygote, str(e))
            raise

    async def _answer(self, asked: asyncio.Future[int]) -> int:
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._end_unwanted)  # also if it has been answered by now
            raise

    def _end_unwanted(self, asked: asyncio.Future[int]) -> None:
        """Kill the child of a fork whose caller no longer waits."""
        if asked.exception() is None:
            child = Adopted(asked.result())
            os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
            self._unwanted.append(child)

    def learn(self, modules: pb.Modules) -> None:
        """What a worker has imported by the end of its first step."""
        self._known.add(modules)
        self._grow_if_needed()

    def reap(self) -> None:
        """Reap zygotes that were closed meanwhile, and unwanted children."""
        self._closed = [z for z in self._closed if not z.reaped()]
        self._unwanted = [child for child in self._unwanted if child.poll() is None]

    def close(self) -> None:
        """All end."""
        self._over = True
        if self._again is not None:
            self._again.cancel()
        self._close_all()
        for zygote in self._closed:
            zygote.close("all are closed")

    def _close_all(self) -> None:
        self._decided.set()
        for zygote in (self._first, self._current, self._growing):
            self._close(zygote)
        self._first = self._current = self._growing = self._asked = None

    # -- what they say ----------------------------------------------------------------------------

    def _said(self, zygote: Zygote, message: pb.FromZygote) -> None:
        body = message.WhichOneof("body")
        if zygote is self._first and body == "grown":
            self._grow()
        elif zygote is self._growing and body == "grown":
            before, self._current, self._growing = self._current, zygote, None
            if before is None and self._ends:
                self._tell("processes are forked again", lost=False)
            if before is not None:
                before.retire()
                self._closed.append(before)
            self._decided.set()
            self._grow_if_needed()
        elif zygote is self._growing and body == "unforkable":
            self._growing = None
            self._close(zygote)
            self._unfit(message.unforkable)

    def _unfit(self, found: pb.Unforkable) -> None:
        self._failures += 1
        package = found.module.rpartition(".")[0]
        again = "." in package and any(other.startswith(package + ".") for other in self._leave_out)
        unfit = package if again else found.module
        self._leave_out.append(unfit)
        self._tell(f"{unfit} is left to each process's own import: {found.reason}", lost=False)
        if self._failures <= _TRIES:
            self._grow()
        elif self._current is None:
            self._close_all()
            self._tell(f"{unfit} was the last of {_TRIES} such modules")

    def _lost(self, zygote: Zygote) -> None:
        """It has ended, or does not answer."""
        self._close(zygote)
        if zygote not in (self._first, self._current, self._growing):
            return
        self._failures += 1
        was_first = zygote is self._first
        if was_first:
            self._first = None
        if zygote is self._growing:
            self._growing = None
        if zygote is self._current:
            self._current = None
            self._close(self._growing)
            self._growing = self._asked = None
        if self._current is None and (self._first is None or self._failures > _TRIES):
            self._begin_again("its zygotes do not live")
        elif not self._grows and self._failures <= _TRIES and not was_first:
            self._grow()

    def _begin_again(self, reason: str) -> None:
        """None that can fork is left, and none can be grown: another first one is started later."""
        if self._over:
            return
        self._close_all()
        pause_s = _AGAIN_S[min(self._ends, len(_AGAIN_S) - 1)]
        self._ends += 1
        self._failures = 0
        self._again = asyncio.get_running_loop().call_later(pause_s, self._start_again)
        self._tell(f"{reason}; another one is started in {pause_s:g} s")

    def _start_again(self) -> None:
        try:
            self.start(self._env)
        except OSError as e:
            self._begin_again(str(e))

    def _tell(self, reason: str, *, lost: bool = True) -> None:
        self._notice(f"new interpreters are started instead of forked ones: {reason}" if lost else reason)

    def _warn(self, zygote: Zygote, reason: str) -> None:
        if not self._over:
            log.warning("zygote %d: %s", zygote.pid, reason)

    # -- growing ----------------------------------------------------------------------------------

    @property
    def _grows(self) -> bool:
        return self._asked is not None or self._growing is not None

    def _grow_if_needed(self) -> None:
        if not self._grows and self._current is not None and not self._known.within(self._grown):
            self._grow()

    def _grow(self) -> None:
        """Fork one that imports all that is known, from the one that knows most."""
        parent = self._current or self._first
        if parent is None or self._over:
            return
        self._grown = self._known.modules()
        grow = pb.Grow(learned=self._grown, leave_out=self._leave_out)
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(self._log, "ab") as out:
                asked = parent.fork(pb.Fork(grow=grow), [theirs.fileno(), out.fileno()])
        except OSError as e:
            ours.close()
            self._not_grown(parent, e)
        else:
            self._asked = asked
            asked.add_done_callback(partial(self._grown_from, parent, ours))

    def _grown_from(self, parent: Zygote, ours: socket.socket, asked: asyncio.Future[int]) -> None:
        """The parent has answered, or is lost."""
        wanted, error = asked is self._asked, asked.exception()
        if wanted:
            self._asked = None
        if wanted and error is None:
            self._growing = Zygote(Adopted(asked.result()), ours, self._said, self._lost)
            return
        ours.close()
        self._end_unwanted(asked)
        if isinstance(error, ZygoteLostError):
            self._warn(parent, str(error))
        elif wanted and error is not None:
            self._not_grown(parent, error)

    def _not_grown(self, parent: Zygote, error: BaseException) -> None:
        self._grown = None
        if self._current is None:
            self._begin_again(str(error))
        else:
            self._warn(parent, f"no other one has been grown from it: {error}")

    def _close(self, zygote: Zygote | None) -> None:
        if zygote is None:
            return
        zygote.close("it is not needed any more")
        if zygote not in self._closed:
            self._closed.append(zygote)


class KnownModules:
    """What workers have told of their imports."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._origins: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._differ: set[str] = set()
        self._outcomes: dict[str, int] = {}
        self._vary: set[str] = set()  # modules that each worker has with other contents, as the number of its process

    def add(self, modules: pb.Modules) -> None:
        """A variable counts as known if all workers of the node that have one have the same."""
        first = not self._names
        self._names.update(dict.fromkeys(modules.names))
        for top, origin in modules.origins.items():
            same = self._origins.setdefault(top, origin) == origin
            self._origins[top] = origin if same else _NOWHERE
        self._differ |= {name for name, value in modules.env.items() if self._env.get(name, value) != value}
        if not first:
            self._differ |= modules.env.keys() ^ self._env.keys()
        self._differ |= set(modules.unset)
        self._env.update(modules.env)
        self._vary |= {n for n, outcome in modules.outcomes.items() if self._outcomes.setdefault(n, outcome) != outcome}

    def modules(self) -> pb.Modules:
        """For a zygote. Variables in which workers differ count as unset."""
        env = {name: value for name, value in self._env.items() if name not in self._differ}
        outcomes = {name: outcome for name, outcome in self._outcomes.items() if name not in self._vary}
        return pb.Modules(
            names=list(self._names), origins=self._origins, env=env, unset=sorted(self._differ), outcomes=outcomes
        )

    def within(self, told: pb.Modules | None) -> bool:
        """Whether a zygote that has received this knows everything."""
        return told is not None and self._names.keys() <= {*told.names} and self._differ <= {*told.unset}

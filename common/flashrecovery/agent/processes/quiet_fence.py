"""Ends processes that live, after the ranks of their node have let go of each other's GPU memory: the agent's part of a
quiet abort, in the order of :mod:`flashrecovery.plan.quiet_abort`. Every path that kills a live worker comes here.

The GPUs of a node count as one domain, whatever NVML says of their links: those that share nothing abort at the same
moment all the same. Without NCCL communicators a process is killed at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import is_exiting, is_stopped
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.plan.quiet_abort import FENCE_S, Communicators, NodeRank, may_abort, may_kill
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.util.clock import lease_clock

_LOOK_S = 0.001


class QuietFence:
    """Of one node. ``others``: the processes that fill its ranks."""

    def __init__(self, others: Callable[[], Iterable[WorkerProcess]], tasks: Tasks) -> None:
        self._others = others
        self._tasks = tasks
        self._fenced: dict[WorkerProcess, float] = {}  # told to abort, since when
        self._watch_until = 0.0
        self._watches = False

    def fence(self, process: WorkerProcess, why: str) -> bool:
        """Begin to end a process: kill it, or have it abort its communicators and change its state no more. Returns
        whether it was killed; else :meth:`ended` follows."""
        if process in self._fenced:
            return False
        member = _member(process)
        if member.state is Communicators.NONE and may_kill(member, self._beside([process]), 0.0):
            process.kill()
            return True
        if member.state is not Communicators.NONE:
            process.page.lend(lease_clock())
            process.send(pb.ToWorker(command=pb.Command(rank=process.place, quiet=pb.Quiet(reason=why))))
        self._fenced[process] = time.monotonic()
        self.watch()
        return False

    async def ended(self, processes: Sequence[WorkerProcess]) -> None:
        """Kill these processes, of which :meth:`fence` has told some to abort, as soon as that may be. Others may be
        waiting for the same ones."""
        while left := [process for process in processes if process in self._fenced]:
            for process in [p for p in left if self._may_kill(p, processes)]:
                process.kill()
                del self._fenced[process]
            await asyncio.sleep(_LOOK_S)

    def watch(self) -> None:
        """Ranks have been told to stop: have those abort that may."""
        self._watch_until = time.monotonic() + FENCE_S
        if not self._watches and any(m.state is not Communicators.NONE for m in map(_member, self._all())):
            self._watches = True
            self._tasks.start(self._let_abort())

    async def _let_abort(self) -> None:
        quiet_since: dict[WorkerProcess, float] = {}
        while (now := time.monotonic()) < self._watch_until:
            members = {process: _member(process) for process in self._all()}
            for process, member in members.items():
                if member.state is Communicators.QUIET:
                    others = [one for other, one in members.items() if other is not process]
                    if may_abort(others, now - quiet_since.setdefault(process, now)):
                        process.page.let_abort()
            if all(member.state is Communicators.NONE or member.stopped for member in members.values()):
                break
            await asyncio.sleep(_LOOK_S)
        self._watches = False

    def _may_kill(self, process: WorkerProcess, together: Collection[WorkerProcess]) -> bool:
        others = [*self._beside(together), *(_member(other) for other in together if other is not process)]
        return may_kill(_member(process), others, time.monotonic() - self._fenced[process])

    def _beside(self, together: Collection[WorkerProcess]) -> list[NodeRank]:
        return [_member(other) for other in self._all() if other not in together]

    def _all(self) -> list[WorkerProcess]:
        return [*dict.fromkeys([*self._others(), *self._fenced])]


def _member(process: WorkerProcess) -> NodeRank:
    """One that is on its way out has none: to wait before it is killed would save no other rank."""
    if process.page.closed or process.returncode is not None or is_exiting(process.pid):
        return NodeRank(Communicators.NONE)
    state, generation = process.page.communicators
    if state is Communicators.NONE:
        return NodeRank(state, generation)
    return NodeRank(state, generation, is_stopped(process.pid))

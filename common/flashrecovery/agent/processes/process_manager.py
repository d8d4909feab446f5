"""The processes of one node: those that fill its ranks, and its standbys. Started, fenced, halted, buried.

A rank is filled from a standby if there is one, else by the first of the node's providers (:mod:`.providers`) that
gives a process: forked from a zygote if there is one. What was there before is killed first, and the new process is
told to begin only when nothing of the old one runs any more.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashrecovery.agent.processes.death_watch import DeathWatch
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.logs import LogTail
from flashrecovery.agent.processes.orphans import Orphans
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import session_members, uninterruptible
from flashrecovery.agent.processes.providers import Forked, ProcessOrder, ProcessProvider, Spawned
from flashrecovery.agent.processes.quiet_fence import QuietFence
from flashrecovery.agent.processes.setup_logs import SetupLogs
from flashrecovery.agent.processes.snapshots import NodeSnapshots
from flashrecovery.agent.processes.standby import StandbyPool
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.agent.processes.zygote import KnownModules, Zygotes
from flashrecovery.config import RunConfig
from flashrecovery.events import RunDir
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import STANDBY_DEVICE_ENV, common_env, rank_env
from flashrecovery.runtime.page import Page

LAST_WORDS_S = 0.2
"""For what a dying process has still said to arrive."""
_ENDLESS = 6
"""Of ``timeouts.fence_s``: a process that has not ended by then never does, whatever it sleeps in."""
_COPIED_HERE = 16 << 20
"""Bytes of rank-local state that are copied to a replacement's page without a thread."""


class ProcessObserver(Protocol):
    """What is told of the processes. A protocol, as the agent lies above, and makes their manager."""

    def said(self, process: WorkerProcess, message: pb.FromWorker) -> None:
        """A process has sent a message."""

    def ended(self, process: WorkerProcess, late: float) -> None:
        """First sign, ``late`` seconds after it, that a process which fills a rank is dead or dying."""

    def refused(self, process: WorkerProcess, why: str) -> None:
        """A process cannot fill its rank."""

    def never_ends(self, rank: int, why: str) -> None:
        """SIGKILL does not end a process that had filled the rank, so this node can fill it no more."""

    def notice(self, rank: int, kind: NoticeKind, text: str) -> None:
        """Something to know."""


class Places(ProcessProvider, Protocol):
    """Places for the node's ranks that something other than the agent has reserved, one per local rank: for example the
    tasks of a cluster's launcher. It is asked for a rank's process before the other providers. A protocol, as these lie
    above (:class:`.task_slots.Guards`)."""

    def env(self, local_rank: int, rank: int) -> Mapping[str, str]:
        """What the environment of the place has, besides what the agent gives, for a process that fills this rank."""

    def within_reach(self, local_rank: int) -> bool:
        """Whether a process that the agent starts may fill the place."""

    def filled(self, process: WorkerProcess, log: str) -> None:
        """``process`` fills its place now, and prints into ``log``."""


@dataclass(frozen=True)
class NodeParts:
    """What the processes of a node have in common.

    Attributes:
        network_env: what the processes' environment says of this node's network.
        places: None where all processes are the agent's own.
    """

    run_dir: RunDir
    network_env: Callable[[], Mapping[str, str]]
    setup_logs: SetupLogs
    tasks: Tasks
    gpu_fence: GpuFence
    snapshots: NodeSnapshots
    places: Places | None = None


class _KilledLooks:
    """One look at killed processes of a rank after each ``timeouts.fence_s`` that has not been enough for their end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._asleep: dict[tuple[int, int], str] = {}

    def endless(self, pids: Sequence[int]) -> str:
        """Which of them never ends, and how that shows; "": it may still come."""
        self._count += 1
        before, self._asleep = self._asleep, {}
        for pid in pids:
            asleep = uninterruptible(pid)
            self._asleep |= asleep
            for thread in asleep.keys() & before.keys():
                return self._text(pid, asleep[thread])
        if self._count < _ENDLESS:
            return ""
        return self._text(pids[0], f"{self._count} x timeouts.fence_s have passed")

    def _text(self, pid: int, why: str) -> str:
        return f"SIGKILL does not end pid {pid} of rank {self._rank}: {why}"


class ProcessManager:
    """The processes of one node."""

    def __init__(self, foreman: ProcessObserver, config: RunConfig, command: list[str], node: NodeParts) -> None:
        run_dir = node.run_dir
        self._foreman = foreman
        self._places = node.places
        self._config = config
        self._run_dir = run_dir
        self._network_env = node.network_env
        self._setup_logs = node.setup_logs
        self._known = KnownModules()
        self._tasks = node.tasks
        self._gpu_fence = node.gpu_fence
        self._snapshots = node.snapshots
        self.ranks: dict[int, WorkerProcess] = {}
        self._on_gpu: dict[int, list[WorkerProcess]] = {}  # of each local rank, until all that they had there is free
        self.pool = StandbyPool(config.standby, self._spawn_standby, run_dir.log_dir, for_each=config.standby_device)
        self._zygotes: Zygotes | None = None
        if config.start_method == "zygote":
            self._zygotes = Zygotes(
                command, run_dir.log_dir / "zygote.log", config.fork_denylist, self._tell_of_zygotes
            )
        forked = [] if self._zygotes is None else [Forked(self._zygotes)]
        self._providers: list[ProcessProvider] = [*forked, Spawned(command)]
        self._orphans = Orphans()
        self._quiet = QuietFence(self.ranks.values, node.tasks)
        self._leaving: list[WorkerProcess] = []
        self._node_leaves = False  # as far as the node knows
        self._orders: dict[int, int] = {}  # how often each rank was to be filled
        self._before: dict[int, WorkerProcess] = {}  # killed; filled these ranks, which no other process fills yet
        self._goes_on: set[int] = set()  # ranks whose next processes inherit the pages of the ones before
        self._coming_in: list[int] = []  # ranks beside training whose processes are on their way
        self._dismissals = 0
        self.halted = False
        self.ending = False
        self._watch = DeathWatch(asyncio.get_running_loop())
        self._tail = LogTail(run_dir.log_dir)

    def living(self) -> list[WorkerProcess]:
        """The live processes that fill ranks; none once the shutdown has begun, because their pages are freed then."""
        return [] if self.ending else [p for p in self.ranks.values() if not p.dead]

    def replaced(self) -> list[WorkerProcess]:
        """Dead ones whose ranks are being filled again, and which still have the only pages of these."""
        return [process for rank, process in self._before.items() if rank in self._goes_on]

    def page_of(self, rank: int) -> Page | None:
        """That of the process that fills the rank, or of the one before, if no other fills it yet; None once the end
        has begun."""
        process = None if self.ending else self.ranks.get(rank) or self._before.get(rank)
        return None if process is None else process.page

    def joining(self) -> list[int]:
        """Ranks of those that are built up beside training, also such whose process has not come yet."""
        return sorted({*self._coming_in, *(p.place for p in self.ranks.values() if p.joining)})

    # -- filling ranks ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Begin to import what the script will need."""
        if self._zygotes is not None:
            self._zygotes.start(self._env())

    def _tell_of_zygotes(self, text: str) -> None:
        self._foreman.notice(-1, NoticeKind.ZYGOTE, text)

    async def fill(self, command: pb.Command, *, hear_out: bool) -> tuple[WorkerProcess, pb.WorkerStarted] | None:
        """Fence the process that fills the rank, then fill the rank again. ``hear_out``: wait a moment for the last
        messages of the old process. Returns None if the rank is meanwhile being filled again, or its node has been
        fenced."""
        if not command.replace.joining:
            return await self._fill(command, hear_out=hear_out)
        self._coming_in.append(command.rank)
        try:
            return await self._fill(command, hear_out=hear_out)
        finally:
            self._coming_in.remove(command.rank)

    def _fence_old(self, rank: int, *, detached: bool) -> WorkerProcess | None:
        """First step of filling a rank: the old process is killed, or told to let go of other GPUs' memory before that.
        Returns what was there before; it has the rank's page until another one has taken it over."""
        filling = self.ranks.pop(rank, None)
        if filling is not None:
            filling.expect_death()
            self._quiet.fence(filling, "another process fills this rank")
            self._before[rank] = filling
        (self._goes_on.add if detached else self._goes_on.discard)(rank)
        old = self._before.get(rank)
        self._snapshots.filled(rank, detached=detached, was_here=old is not None)
        return old

    def _take_rank(self, process: WorkerProcess, command: pb.Command, log: str) -> list[WorkerProcess]:
        """``process`` fills the rank from now on. Returns those whose memory on its GPU must be free before it runs."""
        rank = command.rank
        self._before.pop(rank, None)
        process.take_rank(command, log)
        self.ranks[rank] = process
        if self._node_leaves:
            process.page.set_leaving()
        others = self._enter_gpu(process)
        if self._config.log == "all" or (self._config.log == "0" and rank == 0):
            self._tail.follow(Path(log), f"[rank{rank}]")
        if self._places is not None:
            self._places.filled(process, log)
        return others

    async def _bury_old(self, rank: int, old: WorkerProcess, *, hear_out: bool) -> bool:
        """Returns when the old process has ended and its GPU memory is free; False if that never comes."""
        looks = _KilledLooks(rank)
        while not await old.gone(self._config.timeouts.fence_s):
            waits = f"pid {old.pid} has not ended after SIGKILL; its rank is not filled before that"
            self._foreman.notice(rank, NoticeKind.FENCE_TIMEOUT, waits)
            if self._never_ends(rank, looks.endless([old.pid])):
                return False
        if not await self._free_gpu(rank, old):
            return False
        if hear_out:
            await old.hear_out(LAST_WORDS_S)
        self._tasks.start(self._bury(old))
        return True

    def _never_ends(self, rank: int, why: str) -> bool:
        """Whether a killed process is not waited for any more; the job is told why."""
        if why:
            self._foreman.never_ends(rank, why)
        return bool(why)

    async def _fill(self, command: pb.Command, *, hear_out: bool) -> tuple[WorkerProcess, pb.WorkerStarted] | None:
        rank, replace = command.rank, command.replace
        self._orders[rank] = order = self._orders.get(rank, 0) + 1
        own = self._places is None or (replace.detached and self._places.within_reach(replace.local_rank))
        if self._zygotes is not None and own:
            await self._zygotes.ready()
            if self.ending or self._orders[rank] != order:
                return None
        there = {} if self._places is None else self._places.env(replace.local_rank, rank)
        env = {**there, **self._env(), **rank_env(self._config, rank, command.generation, replace)}
        old = self._fence_old(rank, detached=replace.detached)
        # A process that is built up beside training takes part in the next generation at the earliest.
        log = self._run_dir.log_path(rank, command.generation + (replace.joining > 0))
        standby = self.pool.take(replace.local_rank) if replace.detached and own else None
        new = ProcessOrder(env, log, replace.local_rank, replace.detached)
        process = standby or await self._start(new, lambda: self._orders[rank] == order)
        if old is not None:
            await self._quiet.ended([old])  # nothing of it runs on: what it has left in its page is final
        if process is None:
            return None
        if self._orders[rank] != order or self._is_over(process):
            self._discard(process)
            return None
        others = self._take_rank(process, command, str(log))
        if old is not None and replace.detached:
            await self._inherit_page(process, old)
        if replace.joining:
            await self._give_setup_log(process, replace)
            if process.failed:
                return None
        elif replace.setup_from:
            await self._inherit_setup_log(process, replace)
        if standby is None and not self._is_over(process):
            await self._take_on(process)
        if old is not None and not await self._bury_old(rank, old, hear_out=hear_out):
            return None
        for other in others:
            if other is not old and not await self._free_gpu(rank, other):
                return None
        if self._is_over(process):
            return None
        assign = pb.Assign(
            rank=rank,
            generation=command.generation,
            env=env,
            log_path=str(log),
            detached=replace.detached,
            ahead=replace.ahead,
        )
        process.send(pb.ToWorker(assign=assign))
        started = pb.WorkerStarted(
            rank=rank,
            generation=command.generation,
            pid=process.pid,
            local_states=process.page.local_state_versions(),
            early=process.page.early_local_states(),
            joining=replace.joining,
        )
        return process, started

    @staticmethod
    async def _inherit_page(process: WorkerProcess, old: WorkerProcess) -> None:
        """``process`` gets what is in the page of the one that filled its rank. Large states are copied in a thread:
        this one has heartbeats to send."""
        with process.page.inheritance(old.page) as local_states:
            if local_states.nbytes > _COPIED_HERE:
                await asyncio.to_thread(local_states.copy)
            else:
                local_states.copy()
        if not process.page.closed and not old.page.closed:
            process.page.adopt(old.page)

    def _enter_gpu(self, process: WorkerProcess) -> list[WorkerProcess]:
        """The process will use the GPU of its local rank. Returns which others may still have memory there: in another
        parallel layout a rank goes to a place where another rank was, whose process is about to end."""
        others = [p for p in self._on_gpu.get(process.local_rank, ()) if p is not process]
        self._on_gpu[process.local_rank] = [*others, process]
        return others

    async def _free_gpu(self, rank: int, gone: WorkerProcess) -> bool:
        """Wait until a process has nothing left on its GPU that ``rank`` is to use; False if that never comes. Not for
        one that lives, and has not been asked to end for long: what it has may still be needed."""
        looks = _KilledLooks(rank)
        while not await self._gpu_fence.released(gone, self._config.timeouts.fence_s):
            if not gone.dead and self.ranks.get(gone.place) is gone:
                return True
            waits = f"pid {gone.pid} still has memory on its GPU; its rank is not filled before it is free"
            self._foreman.notice(rank, NoticeKind.FENCE_TIMEOUT, waits)
            if self._never_ends(rank, looks.endless(session_members(gone.pid) or [gone.pid])):
                return False
        self._leave_gpu(gone)
        return True

    async def _look_at_gpu(self, process: WorkerProcess) -> None:
        """The process has ended. If it leaves memory on its GPU, the next process there waits until it is free."""
        there = process in self._on_gpu.get(process.local_rank, ())
        if there and await self._gpu_fence.released(process, self._config.timeouts.fence_s):
            self._leave_gpu(process)

    def _leave_gpu(self, process: WorkerProcess) -> None:
        there = self._on_gpu.get(process.local_rank, [])
        if process in there:
            there.remove(process)

    async def let_go(self, rank: int, grace_s: float) -> int | None:
        """The rank leaves the job: its process ends by itself within ``grace_s``, or is killed. Returns its exit code;
        None if there is none, or the process was dead already, or it was ended together with all others."""
        self._orders[rank] = self._orders.get(rank, 0) + 1  # what is being filled now is not wanted any more
        leaves = rank in self.ranks
        process = self.ranks.pop(rank, None) or self._before.pop(rank, None)
        if process is None:
            return None
        process.expect_death()
        self._leaving.append(process)
        self._snapshots.forget([rank])
        log = process.page.read_setup_log()
        if log is not None:
            self._setup_logs.keep(rank, log, process.attempt)  # it may come back
        code = await process.end(grace_s)
        self._quiet.fence(process, "this rank has left the job")
        await self._quiet.ended([process])
        code = code if code is not None else await process.end(self._config.timeouts.fence_s)
        await self._look_at_gpu(process)
        if process not in self._leaving:
            return None
        self._leaving.remove(process)
        self._close(process)
        return code if leaves else None

    def _is_over(self, process: WorkerProcess) -> bool:
        """Whether the process was ended while the agent waited for another one; its page may have been freed."""
        return process.dead or self.ending

    async def _inherit_setup_log(self, process: WorkerProcess, replace: pb.Replace) -> None:
        """What the rank's set-up collectives had returned, from an agent that keeps it for the lost node."""
        found = await self._setup_log_for(process, replace)
        if isinstance(found, str):
            text = f"the results of its set-up collectives are lost, {found}"
            self._foreman.notice(process.place, NoticeKind.SETUP_LOG_LOST, text)
        elif not self._is_over(process):
            process.page.write_setup_log(found)

    async def _give_setup_log(self, process: WorkerProcess, replace: pb.Replace) -> None:
        """The same for a rank that joins a running job. Without the log its script could compute other results than
        those of the other ranks, so the rank does not join."""
        log = await self._setup_log_for(process, replace)
        if self._is_over(process):
            return  # it was aborted meanwhile
        if isinstance(log, bytes):
            process.page.write_setup_log(log)
        else:
            why = log or "no other node was there to keep them"
            self._foreman.refused(process, f"the results of its set-up collectives are lost: {why}")

    async def _setup_log_for(self, process: WorkerProcess, replace: pb.Replace) -> bytes | str:
        """The set-up log of the rank as which the process runs the script, or of an earlier process of its own rank,
        which had the same log. If there is none, the reason as text."""
        said = []
        for rank in dict.fromkeys((_runs_as(process.place, replace), process.place)):
            found: bytes | str | None = self._setup_logs.own(rank, process.attempt, self.living())
            if found is None:
                found = await self._setup_logs.fetch(replace.setup_from, rank, process.attempt)
            if isinstance(found, bytes):
                return found
            said.append(found)
        return "; ".join(filter(None, said))

    async def replenish(self) -> None:
        """As many standbys as there should be; what has ended without anybody waiting for it is buried."""
        self._orphans.reap()
        if self._zygotes is not None:
            self._zygotes.reap()
        for _ in range(self.pool.missing()):
            self._tasks.start(self._add_standby())

    async def _add_standby(self) -> None:
        process = await self.pool.start_one()
        if process is not None:
            await self._take_on(process)
            self.pool.warm(process)

    async def _spawn_standby(self, log: Path, device: int | None) -> WorkerProcess | None:
        at_once = {} if device is None else {STANDBY_DEVICE_ENV: str(device)}
        dismissals = self._dismissals
        return await self._start(ProcessOrder({**self._env(), **at_once}, log), lambda: self._dismissals == dismissals)

    async def _start(self, order: ProcessOrder, wanted: Callable[[], bool]) -> WorkerProcess | None:
        """A process of the first provider that has one; None once it is not ``wanted`` any more, or the node's part is
        over."""
        places = [] if self._places is None or order.standby else [self._places]
        for provider in (*places, *self._providers):
            process = await provider.start(order)
            if self.ending or not wanted():
                if process is not None:
                    self._discard(process)
                return None
            if process is not None:
                return process
        raise AssertionError("the last one always gives one")

    def _discard(self, process: WorkerProcess) -> None:
        """It has never filled a rank."""
        process.expect_death()
        process.kill()
        self._tasks.start(self._bury(process))

    def learn(self, modules: pb.Modules) -> None:
        """What standbys and zygotes of this node are to import."""
        self._known.add(modules)
        self.pool.set_modules(self._known.modules())
        if self._zygotes is not None:
            self._zygotes.learn(modules)

    def _env(self) -> dict[str, str]:
        """What standbys and ranks have in common."""
        return {**common_env(self._config), **self._network_env(), **self._snapshots.env()}

    async def _take_on(self, process: WorkerProcess) -> None:
        self._tasks.watch(await process.connect(self._foreman.said, self._on_garbage))
        self._watch.add(process.pid, process.page.fd, lambda late: self._on_death(process, late))

    # -- their end --------------------------------------------------------------------------------

    def _on_garbage(self, process: WorkerProcess, why: str) -> None:
        if process.rank is None:
            process.kill()
        else:
            self._foreman.refused(process, why)

    def stopping(self) -> None:
        """Ranks of this node have been told to stop: they may abort when all of them are quiet."""
        self._quiet.watch()

    def _on_death(self, process: WorkerProcess, late: float) -> None:
        if process.dead or self.ending:
            return
        if process.rank is None:
            process.expect_death()
            self.pool.discard(process)
            self._tasks.start(self._bury(process))
        else:
            self._foreman.ended(process, late)

    async def _bury(self, process: WorkerProcess) -> None:
        """Wait for the end of a dead process, however long the kernel takes, and give back what it had."""
        await process.end(self._config.timeouts.replacement_s)
        await self._look_at_gpu(process)
        self._close(process)

    def _close(self, process: WorkerProcess) -> None:
        process.close()
        if self._zygotes is not None:  # which have made this process the parent of what is left
            self._orphans.expect(process.pid)

    def halt(self) -> None:
        """No process may take a step until :meth:`go_on`."""
        if not self.halted:
            self.halted = True
            for process in self.ranks.values():
                process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After :meth:`halt`."""
        if self.halted:
            self.halted = False
            for process in self.ranks.values():
                process.signal(signal.SIGCONT)

    def lend(self, until: float) -> None:
        """See :meth:`flashrecovery.runtime.page.Page.lend`."""
        for process in self.living():
            process.page.lend(until)

    def tell_leaving(self) -> None:
        """See :meth:`flashrecovery.runtime.page.Page.set_leaving`."""
        self._node_leaves = True
        for process in self.living():
            process.page.set_leaving()

    def dismiss(self) -> None:
        """The ranks of this node have been given away: end every process, standbys too."""
        for rank in self._orders:
            self._orders[rank] += 1
        self._dismissals += 1
        leaving = [*self.ranks.values(), *self._before.values()]
        for process in [*leaving, *self.pool.take_all()]:
            process.expect_death()
            self._quiet.fence(process, "this node's ranks have been given away")
        for process in leaving:
            self._tasks.start(self._end_and_bury(process, leaving))
        self.ranks.clear()
        self._before.clear()
        self._snapshots.forget(None)
        self.halted = False

    async def _end_and_bury(self, process: WorkerProcess, together: list[WorkerProcess]) -> None:
        await self._quiet.ended(together)
        await self._bury(process)

    async def end(self, grace_s: float) -> None:
        """End all processes of the node: SIGTERM, a grace period, SIGKILL. The controller is not told."""
        self.ending = True
        if self._zygotes is not None:
            self._zygotes.close()
        processes = [*self.ranks.values(), *self._before.values(), *self.pool.processes(), *self._leaving]
        self._leaving.clear()
        noted = {p: p.page.terminations for p in processes if not p.dead}
        for process in noted:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(p.returncode is None for p in processes):
            await asyncio.sleep(0.02)
            told = [p for p, count in noted.items() if p.page.terminations > count]
            for process in told:
                self._quiet.fence(process, "the job ends")  # the script has no handler for it
            if all(p in told or p.returncode is not None for p in processes):
                break
        for process in processes:
            process.expect_death()  # the heartbeats, which go on beside this, have no page of it any more
            self._quiet.fence(process, "the job ends")
        await self._quiet.ended(processes)
        for process in processes:
            await process.end(1.0)
            self._close(process)
        self._orphans.reap()
        if self._zygotes is not None:
            self._zygotes.reap()
        self._watch.close()
        self._tail.close()


def _runs_as(rank: int, replace: pb.Replace) -> int:
    """The rank as which the process runs the script to its first step, and whose record it needs for that."""
    return replace.stands_in - 1 if replace.stands_in else rank

"""The agent: carries out the controller's commands on one node and reports what happens there.

It fills ranks (from a standby if there is one), fences what it replaces, relays commands and replies between controller
and workers, and sends heartbeats. It takes no decision about the job; the only judgement made here is whether a local
process is alive (:mod:`.watch`) and not stopped (:mod:`.hang`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from flashrecovery.agent.environment import common_env, rank_env
from flashrecovery.agent.faults import ArmedFaults
from flashrecovery.agent.gather import Gather, singly
from flashrecovery.agent.hang import Looks, StopMonitor
from flashrecovery.agent.identity import Identity
from flashrecovery.agent.logs import LogTail
from flashrecovery.agent.node_health import NodeHealth
from flashrecovery.agent.peers import PeerService, neighbours, probe
from flashrecovery.agent.process import WorkerProcess
from flashrecovery.agent.procfs import Exit, exit_of
from flashrecovery.agent.pulse import Pulse
from flashrecovery.agent.setup_logs import SetupLogs
from flashrecovery.agent.standby import StandbyPool
from flashrecovery.agent.store import StoreServer
from flashrecovery.agent.watch import DeathWatch
from flashrecovery.config import RunConfig
from flashrecovery.errors import ProtocolError
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb

REPLACING = "recovery:replacing"
_LAST_WORDS_S = 0.2
log = logging.getLogger("flashrecovery")
Send = Callable[[pb.AgentMessage], None]


class Agent:
    """One node's agent. ``peers`` is None where there is one node only. It begins with :meth:`connect`."""

    def __init__(
        self,
        config: RunConfig,
        command: list[str],
        run_dir: RunDir,
        identity: Identity,
        token: str = "",
        peers: PeerService | None = None,
    ) -> None:
        self._config = config
        self._command = command
        self._run_dir = run_dir
        self._identity = identity
        self._token = token
        self._peers = peers
        self._setup_logs = SetupLogs(token)
        self._table = pb.RankTable()
        self._halted = False
        self._gather = Gather(_unsent)
        self._generation = 0
        self._attempt = 0
        self._checkpoint: pb.CheckpointSaved | None = None
        self._ranks: dict[int, WorkerProcess] = {}
        self._closing = False
        self._kill_at_replace: set[int] = set()
        self._faults = ArmedFaults()
        self._health = NodeHealth(config, run_dir.path, self._ranks.values, self._report_failure, self._notice)
        self.finished: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._watch = DeathWatch(asyncio.get_running_loop())
        self._tail = LogTail()
        self._stopped = StopMonitor(config.timeouts)
        self._looks = Looks(self.workers)
        self._store = StoreServer(identity.host, config.master_port)
        self._pool = StandbyPool(config.standby, self._spawn_standby, run_dir.log_dir)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- public -----------------------------------------------------------------------------------

    def connect(self, send: Send, send_heartbeat: Send) -> None:
        """``send`` takes a message for the controller and does not lose it; a heartbeat may be lost."""
        self._gather = Gather(send)
        self._pulse = Pulse(self, self._ranks, send_heartbeat, self._config.timeouts.heartbeat_s)
        self._task(self._pulse.run())
        self._health.start()

    @property
    def node(self) -> str:
        """This node's name."""
        return self._identity.name

    @property
    def generation(self) -> int:
        """The newest one that the controller has named."""
        return self._generation

    def workers(self) -> list[WorkerProcess]:
        """The living processes that fill ranks; none once the end has begun, for then their pages are given back."""
        return [] if self._closing else [p for p in self._ranks.values() if not p.dead]

    def standbys(self) -> tuple[int, int]:
        """(ready, starting)"""
        return self._pool.counts()

    def register(self) -> pb.Register:
        """Who this node is now."""
        message = self._identity.register(self._store.port, self._peers.port if self._peers is not None else 0)
        message.generation, message.attempt, message.stride = self._generation, self._attempt, self._table.stride
        message.workers.extend(self._state_of(p) for p in self._ranks.values() if not p.dead)
        if self._checkpoint is not None:
            message.checkpoint.CopyFrom(self._checkpoint)
        return message

    def _state_of(self, process: WorkerProcess) -> pb.WorkerState:
        here = process.page.health().generation == self._generation
        return pb.WorkerState(
            rank=process.place,
            pid=process.pid,
            local_rank=process.local_rank,
            resumed=process.resumed,
            stepping=process.stepping and here,
            joined=process.joined,
            done=process.done if process.done is not None and process.done.generation == self._generation else None,
            capsules=process.page.capsule_versions(),
        )

    def incarnation(self) -> str:
        return self._identity.incarnation

    def neighbours(self) -> list[str]:
        """The agents that the controller would ask about this one."""
        return neighbours(self._table, self._identity.name)

    def halt(self) -> None:
        """This node is cut off: no process of it may take a step until :meth:`go_on`."""
        if not self._halted:
            self._halted = True
            for process in self._ranks.values():
                process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It belongs to the job after all."""
        if self._halted:
            self._halted = False
            for process in self._ranks.values():
                process.signal(signal.SIGCONT)

    def fence(self) -> None:
        """The ranks of this node have been given away: end its processes, and be a spare node from now on."""
        for process in [*self._ranks.values(), *self._pool.take_all()]:
            process.dead = True
            process.kill()
            self._task(self._bury(process))
        self._ranks.clear()
        self._halted = False
        self._pulse.resumed(None)
        self._identity = self._identity.anew()

    def handle(self, command: pb.Command) -> None:
        """Carry out or relay one command of the controller."""
        self._generation = max(self._generation, command.generation)
        body = command.WhichOneof("body")
        if body == "replace":
            self._task(self._replace(command))
        elif body == "batch":
            self._gather.expect(command.batch.commands, command.batch.gather_s)
            for one in command.batch.commands:
                self.handle(one)
        elif command.ranks:
            for one in singly(command):
                self.handle(one)
        elif body == "shutdown":
            self._task(self.shutdown(command.shutdown.reason or None))
        elif body == "rank_table":
            self._adopt(command)
        elif body == "probe":
            self._task(self._probe(command.probe))
        elif body == "look":
            self._task(self._look(command.look))
        elif body == "modules":
            self._pool.size = max(self._pool.size, self._identity.slots)
            self._pool.set_modules(list(command.modules.names))
        elif body in ("beat", "fence"):
            pass  # the session's own
        elif body == "fault" and command.fault.phase == REPLACING:
            self._kill_at_replace.add(command.rank)
        elif body == "fault" and not command.fault.phase:
            self._inject_now(command)
        else:
            if body == "fault":
                self._faults.add(command)
            self._relay(command)

    def _adopt(self, command: pb.Command) -> None:
        """What concerns this node of a new rank table."""
        self._table = command.rank_table
        self._task(self._setup_logs.spread(self._table, self._ranks, self._identity.name))

    async def _probe(self, message: pb.Probe) -> None:
        """Look after another node for the controller."""
        seen = await probe(message.address, self._token, message.timeout_s)
        probed = pb.Probed(node=message.node, reachable=seen.reachable, evidence=seen.evidence)
        self._send(pb.AgentMessage(probed=probed))

    async def _look(self, message: pb.Look) -> None:
        """Where do the workers stand? A node that is cut off has no say."""
        if not self._halted:
            self._send(pb.AgentMessage(standstill=await self._looks.look(message)))

    def _relay(self, command: pb.Command) -> None:
        """To the process that fills the rank."""
        process = self._ranks.get(command.rank)
        if process is not None and not process.dead:
            body = command.WhichOneof("body")
            if body in ("stop", "release"):
                process.stepping = False
            elif body == "resume":
                process.stepping = process.resumed = True
                self._pulse.resumed(command.resume.version)
            process.send(pb.ToWorker(command=command))

    async def shutdown(self, reason: str | None) -> None:
        """End every process of this node: SIGTERM, a grace, SIGKILL. ``reason`` None: the job has finished."""
        if self._closing:
            return
        self._closing = True
        self._health.close()
        processes = list(self._ranks.values()) + self._pool.processes()
        for process in processes:
            if not process.dead:
                process.signal(signal.SIGTERM)
                process.signal(signal.SIGCONT)
        deadline = time.monotonic() + self._config.timeouts.shutdown_grace_s
        while time.monotonic() < deadline and any(p.popen.poll() is None for p in processes):
            await asyncio.sleep(0.02)
        for process in processes:
            process.kill()
            await process.reap(1.0)
            process.close()
        self._watch.close()
        self._tail.close()
        self._store.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.finished.set_result(reason)

    # -- filling ranks ----------------------------------------------------------------------------

    async def _replace(self, command: pb.Command) -> None:
        """Fence what fills the rank, then fill it anew."""
        began = time.monotonic()
        rank, replace = command.rank, command.replace
        self._attempt = replace.attempt
        env = self._env(rank, command)
        old = self._ranks.pop(rank, None)
        if old is not None:
            old.dead = True
            old.kill()  # the fence: nothing of the old process runs on once the rank is filled again
        log = self._run_dir.log_path(rank, command.generation)
        standby = self._pool.take() if replace.detached else None
        process = standby or WorkerProcess.spawn(self._command, env, log, standby=False)
        process.rank, process.local_rank, process.generation = rank, replace.local_rank, command.generation
        self._ranks[rank] = process
        if self._config.log == "all" or (self._config.log == "0" and rank == 0):
            self._tail.follow(log, f"[rank{rank}]")
        if old is not None and replace.detached:
            process.page.inherit(old.page)
        elif replace.setup_from:
            await self._inherit_setup_log(process, replace.setup_from)
        if standby is None:
            await process.connect(self._on_message)
            self._watch.add(process.pid, process.page.fd, lambda late: self._on_death(process, late))
        if old is not None:
            while not await old.gone(self._config.timeouts.fence_s):
                waits = f"pid {old.pid} has not ended after SIGKILL; its rank is not filled before that"
                self._notice(rank, "not_fenced", waits)
            if self._faults.of(rank):
                await old.hear_out(_LAST_WORDS_S)  # which of them has fired?
            self._task(self._bury(old))
        assign = pb.Assign(
            rank=rank,
            generation=command.generation,
            env=env,
            log_path=str(log),
            detached=replace.detached,
        )
        process.send(pb.ToWorker(assign=assign))
        started = pb.WorkerStarted(
            rank=rank,
            generation=command.generation,
            pid=process.pid,
            standby=standby is not None,
            seconds=time.monotonic() - began,
            capsules=process.page.capsule_versions(),
        )
        self._send(pb.AgentMessage(started=started))
        for fault in self._faults.of(rank):
            self._relay(fault)
        if rank in self._kill_at_replace and replace.detached:
            self._kill_at_replace.remove(rank)
            self._notice(rank, "fault_fired", f"sigkill at {REPLACING}")
            process.signal(signal.SIGKILL)

    async def _bury(self, process: WorkerProcess) -> None:
        """Wait for the end of a dead process, however long the kernel takes, and give back what it had."""
        await process.reap(self._config.timeouts.replacement_s)
        process.close()

    async def _inherit_setup_log(self, process: WorkerProcess, keeper: str) -> None:
        """What the rank's set-up collectives had returned, from the agent that keeps it for the lost node."""
        try:
            process.page.write_setup_log(await self._setup_logs.fetch(keeper, process.place))
        except grpc.aio.AioRpcError as e:
            text = f"the results of its set-up collectives are lost: {keeper} answers {e.code().name.lower()}"
            self._notice(process.place, "setup_log_lost", text)

    def _env(self, rank: int, command: pb.Command) -> dict[str, str]:
        return {**self._common_env(), **rank_env(self._config, rank, command.generation, command.replace)}

    def _common_env(self) -> dict[str, str]:
        return {**common_env(self._config), **(self._identity.network_env() if self._peers is not None else {})}

    def _spawn_standby(self, log: Path) -> WorkerProcess:
        return WorkerProcess.spawn(self._command, self._common_env(), log, standby=True)

    async def _replenish(self) -> None:
        for _ in range(self._pool.missing()):
            process = self._pool.start_one()
            await process.connect(self._on_message)
            self._watch.add(process.pid, process.page.fd, lambda late, p=process: self._on_death(p, late))  # type: ignore[misc]
            self._pool.warm(process)

    # -- what the processes say and do ------------------------------------------------------------

    def _on_message(self, process: WorkerProcess, message: pb.FromWorker) -> None:
        body = message.WhichOneof("body")
        if body == "warmed":
            process.ready = True
            self._report_standbys()
        elif body == "modules":
            self._pool.set_modules(list(message.modules.names))
            if process.rank == 0:
                self._send(pb.AgentMessage(modules=message.modules))  # for spare nodes
        elif body == "last_words":
            process.last_words = message.last_words
        elif body in ("joined", "reply", "done"):
            if body == "done":
                process.stepping, process.done = False, message.done
            elif body == "joined":
                process.joined = message.joined
                self._task(self._setup_logs.spread(self._table, self._ranks, self._identity.name))
            self._send(pb.AgentMessage(**{body: getattr(message, body)}))
        elif body == "whereabouts":
            self._looks.answered(process, message.whereabouts)
        elif body in ("checkpoint", "notice"):
            if body == "notice" and message.notice.kind == "fault_fired":
                self._faults.fired(message.notice.rank, message.notice.fault)
            elif body == "checkpoint":
                self._checkpoint = message.checkpoint
            self._send(pb.AgentMessage(**{body: getattr(message, body)}))

    def _on_death(self, process: WorkerProcess, late: float) -> None:
        """First sign that a process is dead or dying."""
        if process.dead or self._closing:
            return
        if process.rank is None:
            process.dead = True
            self._pool.discard(process)
            self._task(self._bury(process))
            return
        found = exit_of(process.pid)
        if found is not None and found.code == 0:
            self._task(self._report_exit(process))
        else:
            self._task(self._report_death(process, found, late))

    async def _report_exit(self, process: WorkerProcess) -> None:
        await process.reap(self._config.timeouts.fence_s)
        message = pb.Exited(rank=process.place, generation=process.generation, pid=process.pid, code=0)
        self._send(pb.AgentMessage(exited=message))

    async def _report_death(self, process: WorkerProcess, found: Exit | None, late: float) -> None:
        if found is None:
            code = await process.reap(1.0)
            found = Exit.from_returncode(code if code is not None else -signal.SIGKILL)
        if found.signal is None:
            await process.hear_out(_LAST_WORDS_S, until_last_words=True)
        if process.last_words is not None:
            kind, evidence = "exception", f"{process.last_words.exception}: {process.last_words.message}"
        else:
            kind = "killed" if found.signal is not None else "exit"
            evidence = str(found)
        self._report_failure(process, kind, evidence, late)

    def _report_failure(self, process: WorkerProcess, kind: str, evidence: str, late: float) -> None:
        now = time.monotonic()
        process.stepping = False
        message = pb.Failure(
            rank=process.place,
            generation=process.generation,
            pid=process.pid,
            kind=kind,
            evidence=evidence,
            detect_s=late,
            failed_at=now - late,
            last_words=process.last_words,
            step=max(process.page.committed, 0),
        )
        self._send(pb.AgentMessage(failure=message))

    def _send(self, message: pb.AgentMessage) -> None:
        self._gather.send(message)

    def _notice(self, rank: int, kind: str, text: str) -> None:
        self._send(pb.AgentMessage(notice=pb.Notice(rank=rank, kind=kind, text=text)))

    def _inject_now(self, command: pb.Command) -> None:
        """A fault without a phase hits from outside."""
        process = self._ranks.get(command.rank)
        if process is not None:
            signals = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "segv": signal.SIGSEGV}
            number = signals.get(command.fault.fault)
            if number is not None:
                process.signal(number)
            else:
                command.fault.phase = "between"
                process.send(pb.ToWorker(command=command))

    # -- periodic ---------------------------------------------------------------------------------

    async def look(self, alive: list[WorkerProcess], now: float) -> None:
        """With every heartbeat: who is stopped, and are there standbys enough?"""
        for process, evidence, late in self._stopped.check([] if self._halted else alive, now):
            self._report_failure(process, "stopped", evidence, late)
        await self._replenish()

    def _report_standbys(self) -> None:
        ready, starting = self._pool.counts()
        self._send(pb.AgentMessage(standby=pb.StandbyCount(ready=ready, starting=starting)))

    def _task(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.finished.done():
            self.finished.set_exception(task.exception())  # type: ignore[arg-type]


def _unsent(message: pb.AgentMessage) -> None:
    raise ProtocolError("the agent has no connection yet")

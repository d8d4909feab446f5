"""The agent: carries out the controller's commands on one node and reports what happens there.

It has ranks filled (:mod:`.processes.process_manager`), relays commands and replies between controller and workers, and
sends heartbeats (:mod:`.monitoring.heartbeat`). It takes no decision about the job; the only judgement made here is
whether a local process is alive (:mod:`.processes.death_watch`) and not stopped (:mod:`.monitoring.hang`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from flashrecovery.agent.monitoring.failure_reports import FailureReports
from flashrecovery.agent.monitoring.fault_injection import NodeFaults
from flashrecovery.agent.monitoring.hang import Looks, StopMonitor
from flashrecovery.agent.monitoring.heartbeat import HeartbeatLoop
from flashrecovery.agent.monitoring.node_health import NodeHealth
from flashrecovery.agent.monitoring.reply_batching import Gather, singly
from flashrecovery.agent.monitoring.worker_messages import WorkerMessages
from flashrecovery.agent.peers.client import neighbours, probe
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import NodeParts, Places, ProcessManager
from flashrecovery.agent.processes.procfs import handles
from flashrecovery.agent.processes.setup_logs import SetupLogs
from flashrecovery.agent.processes.snapshots import NodeSnapshots
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.agent.stores.staging_area import StagingArea
from flashrecovery.agent.stores.store import StoreServer
from flashrecovery.config import RunConfig
from flashrecovery.errors import ProtocolError
from flashrecovery.events import RunDir
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access
from flashrecovery.runtime.machine_speed import machine_speed

_SENT_BYTES = 64 << 20
"""The most bytes of rank-local state in a message to the controller."""
_OTHERS_HEAR_S = 1.0
"""A scheduler that tells some ranks to end has told the others, and this process, by then."""

log = logging.getLogger("flashrecovery")
SendMessage = Callable[[pb.AgentMessage], None]


class Agent:
    """One node's agent. ``places`` is None where all processes are its own. It begins with :meth:`connect`."""

    def __init__(
        self,
        config: RunConfig,
        command: list[str],
        run_dir: RunDir,
        identity: Identity,
        access: Access | None = None,
        places: Places | None = None,
    ) -> None:
        self._config = config
        self._command = command
        self._identity = identity
        self._access = access or Access()
        self._setup_logs = SetupLogs(self._access)
        self._table = pb.RankTable()
        self._gather = Gather(_unsent)
        self._generation = 0
        self._attempt = 0
        self._domains: tuple[int, ...] = ()
        self._members: tuple[int, ...] = ()
        self._regrouped = 0  # the generation in which they have been named last
        self._ended_by: str | None = None
        self._last_save = pb.Shutdown()
        self._terminated_at: float | None = None  # since when some of the ranks have been asked to end
        self._terminated = False  # this process has been asked to end
        self._hears = False
        self._drains_for = ""
        self._speed: pb.MachineSpeed | None = None
        self.finished: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._task_failed)
        self._layout = ""
        self._staging = StagingArea(config, self._access, self._tasks, own_processes=places is None)
        self._failures = FailureReports(self._send, self._tasks, config.timeouts.fence_s)
        gpus = GpuFence.of_this_node(os.environ, config.slots or config.nproc_per_node)
        self._tasks.start(gpus.prepare())
        self._snapshots = NodeSnapshots(config, run_dir.path, self._tell_of_snapshots)
        node = NodeParts(run_dir, self._node_env, self._setup_logs, self._tasks, gpus, self._snapshots, places)
        self._processes = ProcessManager(self, config, command, node)
        self._ranks = self._processes.ranks
        self._pool = self._processes.pool
        self._faults = NodeFaults(self.notice)
        self._health = NodeHealth(config, run_dir.path, self._ranks.values, self._failures.report, self.notice)
        self._stopped = StopMonitor(config.timeouts)
        self._looks = Looks(lambda: [process for process in self.workers() if not process.joining])
        self._store = StoreServer(identity.host, config.master_port)
        self._worker_messages = WorkerMessages(
            self._send, self._processes, self._tasks, self._faults, self._looks, self._staging, self._spread_setup_logs
        )

    # -- public -----------------------------------------------------------------------------------

    def connect(self, send: SendMessage, send_heartbeat: SendMessage) -> None:
        """``send`` takes a message for the controller and does not lose it; a heartbeat may be lost."""
        self._gather = Gather(send)
        self._heartbeats = HeartbeatLoop(self, self._ranks, send_heartbeat, self._config.timeouts.heartbeat_s)
        self._tasks.start(self._heartbeats.run())
        self._health.start()
        self._processes.prepare()

    def measure_speed(self) -> None:
        """Begin to measure this host's speed beside the launch, and tell the controller."""
        self._tasks.start(self._measure_speed())

    async def _measure_speed(self) -> None:
        found = await asyncio.to_thread(machine_speed, self._identity.host)
        self._speed = pb.MachineSpeed(copy=found.copy, link=found.link)
        self._send(pb.AgentMessage(machine_speed=self._speed))

    @property
    def node(self) -> str:
        """This node's name."""
        return self._identity.name

    @property
    def generation(self) -> int:
        """The newest generation that the controller has named."""
        return self._generation

    @property
    def checkpoint(self) -> pb.CheckpointSaved | None:
        """The newest checkpoint of the job that this node knows of."""
        return self._worker_messages.checkpoint

    @property
    def in_job(self) -> bool:
        """Whether a controller has ever given this node a rank, or told it which node has them."""
        return bool(self._ranks or self._table.ranks)

    def workers(self) -> list[WorkerProcess]:
        """The live processes that fill ranks; none once the shutdown has begun, because their pages are freed then."""
        return self._processes.living()

    def standbys(self) -> tuple[int, int]:
        """The number of standbys: (ready, starting)."""
        return self._pool.counts()

    @property
    def staging(self) -> Path | None:
        """The directory for state while the parallel layout changes; None: it does not change."""
        return self._staging.path

    def keep_setup_log(self, rank: int, setup_log: bytes, attempt: int) -> None:
        """Keep it for another node, for as long as the job runs."""
        self._setup_logs.keep(rank, setup_log, attempt)

    def setup_log(self, rank: int, attempt: int) -> bytes | None:
        """The set-up log of ``rank``, of this start of the job, if it is kept or lives here."""
        return self._setup_logs.own(rank, attempt, self.workers())

    def _node_env(self) -> Mapping[str, str]:
        """What the processes' environment says of this node."""
        network = self._identity.network_env() if self._config.several_nodes else {}
        return {**network, **self._staging.env()}

    def register(self, peer_port: int = 0) -> pb.Register:
        """This node's first message on a connection: its identity, and what its workers and pages hold. ``peer_port``:
        where it serves other agents; 0: nowhere."""
        message = self._identity.register(self._store.port, peer_port)
        message.generation, message.attempt, message.stride = self._generation, self._attempt, self._table.stride
        message.domains.extend(self._domains)
        message.launch = self._table.launch
        message.layout = self._layout
        message.command.extend(self._command)
        message.members.extend(self._members)
        message.regrouped = self._regrouped
        message.settings.update(self._config.shared())
        there = [*self._ranks.values(), *self._processes.replaced()]
        members = [p for p in there if not (p.joining or self._is_of_another_layout(p))]
        known = [p for p in members if p.exited or not (p.dead or p.failed or p.returncode == 0)]
        message.workers.extend(self._state_of(p) for p in known)
        message.joining.extend(self._processes.joining())
        if not self._processes.ending:
            message.pages.extend(self._page_of(p) for p in members if p not in known)
        message.suspect = self.warning()
        if self.checkpoint is not None:
            message.checkpoint.CopyFrom(self.checkpoint)
        if self._staging.kept is not None:
            message.staging.CopyFrom(self._staging.kept)
        if self._speed is not None:
            message.speed.CopyFrom(self._speed)
        return message

    def _is_of_another_layout(self, process: WorkerProcess) -> bool:
        """It has been left from before the job changed its parallel layout."""
        return self._config.parallelism is not None and process.attempt < self._attempt

    @staticmethod
    def _page_of(process: WorkerProcess) -> pb.PageOf:
        page = process.page
        return pb.PageOf(
            rank=process.place,
            local_rank=process.local_rank,
            local_states=page.local_state_versions(),
            early=page.early_local_states(),
            committed=page.committed,
        )

    def _state_of(self, process: WorkerProcess) -> pb.WorkerState:
        health = process.page.health()
        here = health.progress_at > 0.0 and health.generation == self._generation  # it has really gone on
        return pb.WorkerState(
            rank=process.place,
            pid=process.pid,
            local_rank=process.local_rank,
            resumed=process.resumed,
            stepping=process.stepping and here,
            joined=process.joined,
            done=process.done if process.done is not None and process.done.generation == self._generation else None,
            local_states=process.page.local_state_versions(),
            early=process.page.early_local_states(),
            store_host=process.store[0],
            store_port=process.store[1],
            committed=process.page.committed,
            released=process.released,
            exited=process.exited,
        )

    def incarnation(self) -> str:
        return self._identity.incarnation

    def neighbours(self) -> list[str]:
        """The agents that the controller would ask about this one."""
        return neighbours(self._table, self._identity.name)

    def halt(self) -> None:
        """This node is cut off: none of its processes may take a step until :meth:`go_on`."""
        self._processes.halt()

    def go_on(self) -> None:
        """This node belongs to the job again: its processes may take steps."""
        self._processes.go_on()

    def lend(self, until: float) -> None:
        """The workers may begin to change their state until ``until`` (:func:`.lease_clock`; 0.0: no limit)."""
        self._processes.lend(until)

    def controller_heard(self, heard: bool) -> None:
        """Whether there is a controller; the workers are notified of each change."""
        self._hears = heard
        if self._drains_for and not heard and not self._processes.ending:
            self._tasks.start(self.shutdown(self._drains_for))  # no controller that could move its ranks
        for process in self.workers():
            process.tell_of_controller(heard=heard)

    def fence(self) -> None:
        """The ranks of this node have been given away: end its processes, and be a spare node from now on."""
        self._processes.dismiss()
        self._heartbeats.resumed(None)
        self._identity = self._identity.renewed()
        self._members, self._regrouped = (), 0  # which ranks belong to the job now, this node has not heard

    def handle(self, command: pb.Command) -> None:
        """Carry out or relay one command of the controller."""
        self._generation = max(self._generation, command.generation)
        if command.ranks:
            for one in singly(command):
                self.handle(one)
            return
        match command.WhichOneof("body"):
            case "batch":
                self._on_batch(command.batch)
            case "replace":
                self._tasks.start(self._replace(command))
            case "shutdown":
                self._on_shutdown(command.shutdown)
            case "keep_last":
                self._on_keep_last(command)
            case "rank_table":
                self._adopt(command.rank_table)
            case "regroup":
                self._on_regroup(command)
            case "leave":
                self._on_leave(command)
            case "probe":
                self._tasks.start(self._probe(command.probe))
            case "look":
                self._tasks.start(self._look(command.look))
            case "modules":
                self._on_modules(command.modules)
            case "saved":
                self._worker_messages.remember(command.saved)
            case "drop_staging":
                self._staging.drop()
            case "staging_kept":
                self._staging.remember_kept(command.staging_kept)
            case "fault":
                self._faults.deliver(command, self._ranks.get(command.rank))
            case "heartbeat" | "fence":
                pass  # the session has carried it out (:mod:`.controller_link.session`)
            case _:
                self._relay(command)

    def _on_batch(self, batch: pb.Batch) -> None:
        self._gather.expect(batch.commands, batch.gather_s)
        for one in batch.commands:
            self.handle(one)

    def _on_modules(self, modules: pb.Modules) -> None:
        """Have this spare node's standbys import these modules."""
        self._pool.keep_at_least(self._identity.slots)
        self._processes.learn(modules)

    def _adopt(self, table: pb.RankTable) -> None:
        """Take in what of a new rank table concerns this node."""
        self._table = table
        self._snapshots.placed([e.rank for e in self._table.ranks if e.node != self._identity.name])
        self._spread_setup_logs()

    def _spread_setup_logs(self) -> None:
        spread = self._setup_logs.spread(self._table, self._ranks, self._identity.name, self._members)
        self._tasks.start(spread)

    def _on_regroup(self, command: pb.Command) -> None:
        before, self._members = self._members, tuple(command.regroup.members)
        self._regrouped = command.generation
        if before != self._members:
            self._spread_setup_logs()  # also those of ranks that have left
        process = self._ranks.get(command.rank)
        if process is not None:
            process.become_member()
        self._relay(command)

    def _on_leave(self, command: pb.Command) -> None:
        """A rank of this node leaves the job."""
        self._relay(command)
        self._tasks.start(self._let_go(command.rank, command.leave.grace_s))

    async def _let_go(self, rank: int, grace_s: float) -> None:
        code = await self._processes.let_go(rank, grace_s)
        if code is not None and grace_s:
            self.notice(
                rank, NoticeKind.RANK_LEFT, f"the process of rank {rank} has left the job, with exit code {code}"
            )

    async def _replace(self, command: pb.Command) -> None:
        """Fill a rank with a new process."""
        if command.replace.attempt != self._attempt:
            self._members = ()  # of the ranks before
            self._staging.start_again()
        self._attempt, self._domains = command.replace.attempt, tuple(command.replace.domains)
        if command.replace.layout != self._layout:
            self._setup_logs.forget(but=self._attempt)  # of ranks of the layout before
        self._layout = command.replace.layout
        filled = await self._processes.fill(command, hear_out=self._faults.armed(command.rank))
        if filled is not None:
            process, started = filled
            self._send(pb.AgentMessage(started=started))
            self._faults.filled(process, replacement=command.replace.detached)

    async def _probe(self, message: pb.Probe) -> None:
        """Ask another node's agent whether it lives, for the controller."""
        seen = await probe(message.address, self._access, message.timeout_s)
        probed = pb.Probed(node=message.node, reachable=seen.reachable, evidence=seen.evidence)
        self._send(pb.AgentMessage(probed=probed))

    async def _look(self, message: pb.Look) -> None:
        """Report where the workers are. A node that is cut off does not answer."""
        if not self._processes.halted:
            self._send(pb.AgentMessage(hang_reports=await self._looks.look(message)))

    def _relay(self, command: pb.Command) -> None:
        """Pass ``command`` on to the process that fills its rank."""
        process = self._ranks.get(command.rank)
        if process is not None and not process.dead:
            body = command.WhichOneof("body")
            if body in ("stop", "release"):
                process.stops(released=body == "release")
                self._processes.stopping()
            elif body == "resume":
                process.goes_on()
                self._heartbeats.resumed(command.resume.version)
            process.send(pb.ToWorker(command=command))

    def ask_to_drain(self, reason: str) -> bool:
        """This node is to end: have its ranks handed over before, if there is a controller that can do that. False if
        there is none, or it has been asked already."""
        self._terminated = True
        self.tell_leaving()
        if not self._hears or self._drains_for or self._processes.ending or not self.in_job:
            return False
        self._drains_for = reason
        self._send(
            pb.AgentMessage(node_leaving=pb.NodeLeaving(within_s=self._config.timeouts.handoff_s, reason=reason))
        )
        return True

    def tell_leaving(self) -> None:
        """A notice of preemption has reached this node: its ranks, also those to come, may ask for it."""
        self._processes.tell_leaving()

    def pass_on(self, number: int) -> list[int]:
        """Give this node's ranks a signal, those that have a handler for it. Returns which, and those that ask for
        notices instead; the others would end."""
        self._terminated = self._terminated or number == signal.SIGTERM
        self.tell_leaving()
        having = [p for p in self.workers() if handles(p.pid, number) and not _only_notes(p, number)]
        for process in having:
            process.signal(number)
        asking = [p for p in self.workers() if p.page.asks_leaving and p not in having]
        return sorted(process.place for process in (*having, *asking))

    def warning(self) -> str:
        """What a device plugin has warned of last; "" if of nothing."""
        return "" if self._health.suspect is None else str(self._health.suspect)

    def warned(self, reason: str) -> bool:
        """This node is about to be taken away: have its ranks handed over, if that is possible. False if there is no
        controller now."""
        self.tell_leaving()
        if not self._hears:
            return False
        node_leaving = pb.NodeLeaving(within_s=self._config.notice.within_s, reason=reason, stays=True)
        self._send(pb.AgentMessage(node_leaving=node_leaving))
        return True

    async def shutdown(self, reason: str | None) -> None:
        """End every process of this node: SIGTERM, a grace, SIGKILL. ``reason`` None: the job has finished."""
        if self._processes.ending:
            return
        self._ended_by = reason
        self._health.close()
        await self._processes.end(self._config.timeouts.shutdown_grace_s)
        self._staging.close()
        self._store.close()
        self._tasks.cancel()
        if not self.finished.done():  # by the failure that this is the end of
            self.finished.set_result(reason)

    async def end_snapshots(self) -> None:
        """After :meth:`shutdown`: give the snapshots back, written to disk first if the job has not come to its end."""
        unfinished = not self.finished.done() or self._ended_by is not None
        last = self._last_save
        if unfinished and last.saved:
            step, path = last.version, last.saved
            log.warning(
                "flashrecovery: the state of step %d is in checkpoint %s; --resume goes on from there", step, path
            )
        await self._snapshots.end(
            unfinished=unfinished, version=last.version, whole=last.whole, void=last.void, saved=bool(last.saved)
        )

    def _on_shutdown(self, order: pb.Shutdown) -> None:
        self._last_save = order
        self._tasks.start(self.shutdown(order.reason or None))

    def _on_keep_last(self, command: pb.Command) -> None:
        """The job ends: a rank's part of its state is to outlive it, and the agent sees to that if the rank cannot."""
        order = command.keep_last
        if not order.gone:
            self._relay(command)
            return
        page = self._processes.page_of(command.rank)
        usable = page is not None and (order.early or order.version not in page.early_local_states())
        local_state = page.read_local_state(order.version) if page is not None and usable else None
        missing = self._snapshots.keep_for(command.rank, order.version, local_state, tensors=order.tensors)
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=command.rank)
        if order.send and local_state is not None:
            if len(local_state) <= _SENT_BYTES:
                reply.local_state = local_state
            else:
                missing = missing or f"its own state ({len(local_state):,} bytes) is too large to be sent"
        if missing:
            reply.error_type, reply.error = "RestoreError", missing
        self._send(pb.AgentMessage(reply=reply))

    # -- what the processes say and do ------------------------------------------------------------

    def said(self, process: WorkerProcess, message: pb.FromWorker) -> None:
        """A worker or a standby has sent this."""
        self._worker_messages.take_in(process, message)

    def refused(self, process: WorkerProcess, why: str) -> None:
        """A process cannot fill its rank; the controller will have it ended."""
        self._failures.report(process, FailureKind.COMMAND, why, 0.0)

    def never_ends(self, rank: int, why: str) -> None:
        """This node can fill the rank no more; the controller gives it up."""
        self.notice(rank, NoticeKind.PROCESS_NEVER_ENDS, why)
        self._send(pb.AgentMessage(node_stuck=pb.NodeStuck(evidence=why)))

    def ended(self, process: WorkerProcess, late: float) -> None:
        """First sign that a worker is dead or dying."""
        self._failures.ended(process, late)

    def _send(self, message: pb.AgentMessage) -> None:
        self._gather.send(message)

    def notice(self, rank: int, kind: NoticeKind, text: str) -> None:
        """Send a notice for the controller's log."""
        self._send(pb.AgentMessage(notice=pb.Notice(rank=rank, kind=kind, text=text)))

    # -- periodic ---------------------------------------------------------------------------------

    async def look(self, alive: list[WorkerProcess], now: float) -> None:
        """With every heartbeat: which processes are stopped, is the store there, and are there standbys enough?"""
        self._on_terminations(alive, now)
        for process, evidence, late in self._stopped.check([] if self._processes.halted else alive, now):
            self._failures.report(process, FailureKind.STOPPED, evidence, late)
        died = self._store.revive()
        if died:
            self.notice(
                -1,
                NoticeKind.STORE_RESTARTED,
                f"the TCPStore on node {self.node} has died ({died}) and was started again",
            )
        self._snapshots.revive()
        await self._processes.replenish()

    def _on_terminations(self, alive: list[WorkerProcess], now: float) -> None:
        """Ranks that were asked to end, and by no handler of the script's. A scheduler that ends the job tells all
        processes; a process that has told only this one has it, too, after a moment."""
        told = [process for process in alive if process.page.terminations and not process.failed]
        if not told or self._processes.ending or self._processes.halted:
            self._terminated_at = None
            return
        self._terminated_at = self._terminated_at or now
        if len(told) == len(alive) and not self._terminated:
            self._terminated = True
            log.warning("flashrecovery: all ranks of this node have got SIGTERM: the job is asked to end")
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._terminated and now - self._terminated_at >= _OTHERS_HEAR_S:
            for process in told:
                self._failures.report(
                    process, FailureKind.KILLED, "killed by SIGTERM", now - self._terminated_at, signal.SIGTERM
                )

    def _tell_of_snapshots(self, text: str) -> None:
        self.notice(-1, NoticeKind.SNAPSHOTS, text)

    def _task_failed(self, error: BaseException) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


def _only_notes(process: WorkerProcess, number: int) -> bool:
    """The handler is none of the script's (:mod:`flashrecovery.worker.exit.termination`)."""
    return number == signal.SIGTERM and process.page.notes_terminations


def _unsent(message: pb.AgentMessage) -> None:
    raise ProtocolError("the agent has no connection yet")

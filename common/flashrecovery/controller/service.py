"""The controller as a gRPC service: agents' streams in, the machine's actions out; status and faults for tools."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from flashrecovery import events as ev
from flashrecovery.access import CONTROLLER, Access, Server
from flashrecovery.ballot import ask_elector
from flashrecovery.clock import lease_clock
from flashrecovery.config import FaultSpec, RunConfig
from flashrecovery.controller.batches import Batches
from flashrecovery.controller.checkpoints import Checkpoints
from flashrecovery.controller.connections import Connection, Connections
from flashrecovery.controller.console import Console
from flashrecovery.controller.drills import Drills
from flashrecovery.controller.elector_set import ElectorSet
from flashrecovery.controller.heartbeats import ControllerHeartbeats
from flashrecovery.controller.job_state import AGENT
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.nodes import NodeState
from flashrecovery.controller.outbox import Emit, Publish
from flashrecovery.controller.relays import Relays
from flashrecovery.controller.sessions import Sessions
from flashrecovery.controller.status import StatusBoard
from flashrecovery.controller.table_publisher import TablePublisher
from flashrecovery.errors import ConfigError
from flashrecovery.heartbeat.receiver import HeartbeatReceiver
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.leases import NODE_PROBE
from flashrecovery.plan.liveness import Ask, Liveness, Lost
from flashrecovery.plan.quorum import Quorum
from flashrecovery.plan.transitions import RECOVERY_STATES, State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_TICK_S = 0.05
_GRACE_S = 1.0
"""For the connections to end by themselves."""
_HEALTH_S = 1.0
"""How often the ranks' health is wanted, for whoever looks."""
_HEALTH_SELDOM_S = 5.0
"""In a recovery of a job of more than so many nodes, where the controller has enough to do:"""
_MANY_NODES = 100
_YOUNG_OBJECTS = 200_000
"""Between two looks of the garbage collector."""

log = logging.getLogger("flashrecovery")


class ControllerService(rpc.ControllerServicer):  # type: ignore[misc]
    """Feeds :class:`Machine` from the agents' streams. Runs on one event loop, so the machine needs no lock."""

    def __init__(
        self, config: RunConfig, access: Access, log: ev.EventLog, run_dir: ev.RunDir, quorum: Quorum | None = None
    ) -> None:
        self.machine = Machine(config)
        self._config = config
        self._access = access
        self._log = log
        self.run_dir = run_dir
        self._agents = Connections()
        quorum = quorum or Quorum("")
        self._liveness = Liveness(config.timeouts, quorum.leader)
        self._elector_set = ElectorSet(quorum, self.machine.job, config.timeouts)
        self._renewal: asyncio.Task[None] | None = None
        self._tables = TablePublisher(run_dir)
        self._heartbeats = HeartbeatReceiver(access.token, self, config.timeouts.heartbeat_s)
        self._relays = Relays(config.direct_agents, quorum.leader)
        self._sessions = Sessions(
            self, self.machine, self._agents, self._liveness, self._heartbeats, self._relays, config.shared()
        )
        self._own_heartbeats = ControllerHeartbeats(
            self._agents, self.machine.job, self._heartbeats.gets_through, config.timeouts.heartbeat_s, _TICK_S
        )
        self._gathering = False
        self._incarnation = uuid.uuid4().hex
        self._standbys: dict[str, tuple[int, int]] = {}
        self._drills = Drills(config.world_size)
        self._board = StatusBoard(self.machine, self._liveness, str(run_dir.path))
        self._checkpoints = Checkpoints(config.checkpoint)
        self._console = Console()
        self._server: Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._dismissed = False
        self._absent: set[str] = set()
        self._modules: pb.Modules | None = None
        self._undo_told = (-1, -1)
        self._take_in: Mapping[str, Callable[[pb.AgentMessage, str, float], None]] = {
            "heartbeat": self._on_heartbeat,
            "vouch": self._on_vouch,
            "started": self._on_started,
            "probed": self._on_probed,
            "electors_known": self._on_electors_known,
            "hang_reports": self._on_hang_reports,
            "modules": self._on_modules,
            "joined": self._on_joined,
            "failure": self._on_failure,
            "reply": self._on_reply,
            "replies": self._on_replies,
            "done": self._on_done,
            "exited": self._on_exited,
            "checkpoint": self._on_checkpoint,
            "standby": self._on_standby,
            "notice": self._on_notice,
        }
        """What agents say, by its body; with the agent's node, and the time."""
        self.over = asyncio.Event()
        """The job has finished or failed, or this controller has ended."""

    def take_over(self, why: str) -> None:
        """This controller is not the job's first one, which has been lost."""
        self._record(ev.Notice(generation=0, kind=NoticeKind.CONTROLLER_ELECTED, text=why))
        self.machine.takeover.inherit(time.monotonic())

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError if it is in use."""
        self._server = self._access.server()
        rpc.add_ControllerServicer_to_server(self, self._server.grpc)
        try:
            bound = await self._server.start(host, port, CONTROLLER)
        except ConfigError as e:
            raise ConfigError(f"controller {e}") from e
        if self._config.several_nodes and self._config.datagrams:
            self._heartbeats.open(host, bound)
        self._ticker = asyncio.create_task(self._tick())
        return bound

    async def stop(self) -> None:
        for task in (self._ticker, self._renewal):
            if task is not None:
                task.cancel()
        self._heartbeats.close()
        self.over.set()
        self._agents.close()
        if self._server is not None:
            await self._server.stop(_GRACE_S)
        self._tables.close()

    def request_stop(self, reason: str) -> None:
        self.machine.on_stop_request(reason)
        self._carry_out()

    # -- rpc --------------------------------------------------------------------------------------

    async def Who(self, request: pb.WhoRequest, context: Context) -> pb.WhoReply:
        """Is this still the controller that an agent knows?"""
        if self._renewal is None and self._elector_set.needs_newer(request.promised, lease_clock()):
            self._renewal = asyncio.create_task(self._renew(request.promised))
        return pb.WhoReply(incarnation=self._incarnation, term=self._elector_set.term)

    async def _renew(self, promised: int) -> None:
        """An agent has promised not to follow this term any more: get a newer one."""
        try:
            if await self._elector_set.renew(promised, lambda e, request: ask_elector(e, request, self._access)):
                self._agents.post(None, self._elector_set.command())
        finally:
            self._renewal = None

    async def Session(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncIterator[pb.Command]:
        """One connection of an agent."""
        async with aclosing(self._sessions.straight(request_iterator, context)) as commands:
            async for command in commands:
                yield command

    async def Trunk(self, request_iterator: AsyncIterator[pb.Upward], context: Context) -> AsyncIterator[pb.Downward]:
        """One connection of an agent that carries others'."""
        async with aclosing(self._sessions.carried(request_iterator, context)) as carried:
            async for downward in carried:
                yield downward

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.JobStatus:
        """The whole job at one look."""
        return self.status()

    def status(self) -> pb.JobStatus:
        """What the rpc of this name answers; not to be changed."""
        return self._board.look(self._standby_counts())

    def _standby_counts(self) -> tuple[int, int]:
        """(ready, starting), of all nodes"""
        return sum(r for r, _ in self._standbys.values()), sum(s for _, s in self._standbys.values())

    async def Inject(self, request: pb.InjectRequest, context: Context) -> pb.InjectReply:
        """Arm or deliver a fault."""
        error = self._drills.refusal(request)
        if not error:
            self._inject(request)
        return pb.InjectReply(accepted=not error, error=error)

    def arm(self, spec: FaultSpec) -> None:
        """A fault of the command line; its rank gets it right before the first step."""
        self._drills.arm(spec)

    def _inject(self, r: pb.InjectRequest) -> None:
        generation = self.machine.job.generation
        self._record(ev.FaultInjected(generation=generation, rank=r.rank, fault=r.fault, phase=r.phase, step=r.step))
        message = pb.Fault(fault=r.fault, phase=r.phase, step=r.step)
        command = pb.Command(generation=generation, rank=r.rank, fault=message)
        self._agents.post(self.machine.job.ranks[r.rank].home, command)

    # -- heartbeat.receiver.Hearer ------------------------------------------------------------------

    def hears(self, node: str, now: float, echo: float) -> bool:
        """A sign of life by datagram."""
        record = self.machine.job.nodes.get(node)
        if record is None or not record.alive:
            return False
        self._liveness.heard(node, now)
        self._elector_set.echoed(node, echo)
        return not self._own_heartbeats.suspended

    def wanted_every_s(self) -> float:
        """With every heartbeat where something waits for the next step; while ranks stand still anyway, seldom."""
        if self.machine.wants_every_heartbeat:
            return 0.0
        large = len(self.machine.job.nodes) > _MANY_NODES
        return _HEALTH_SELDOM_S if large and self.machine.job.state in RECOVERY_STATES else _HEALTH_S

    def health(self, node: str, heartbeat: pb.Heartbeat) -> None:
        self.machine.on_heartbeat(heartbeat, time.monotonic())

    def connected(self, node: str) -> bool:
        """Whether it can be told anything now."""
        return self._agents.is_connected(node)

    def after_beats(self) -> None:
        self.act()

    # -- feeding the machine ----------------------------------------------------------------------

    def greet(self, connection: Connection) -> pb.Command:
        """The first word to an agent; what else it has to know follows."""
        node = connection.node
        if self._over_for_all() and connection.link.sent == 0:
            self._agents.post(node, self._last_word())  # it has come after the job's end
        self._tell_modules(node)
        if self._elector_set.named:
            self._agents.post(node, self._elector_set.command())
        if self.machine.job.checkpoint is not None and not self.machine.takeover.gathering:
            self._agents.post(node, self.machine.job.saved())
        # at once, because an agent that was cut off waits for it
        beat = self._heartbeats.invite(node, connection.link)
        beat.suspended, beat.gathering = self._own_heartbeats.suspended, self.machine.takeover.gathering
        return pb.Command(generation=self.machine.job.generation, heartbeat=beat)

    def deliver(self, message: pb.AgentMessage, node: str) -> None:
        """What an agent says."""
        body = message.WhichOneof("body")
        if body is not None:
            self._take_in[body](message, node, time.monotonic())

    def _on_heartbeat(self, message: pb.AgentMessage, node: str, now: float) -> None:
        self.machine.on_heartbeat(message.heartbeat, now)
        self._own_heartbeats.answer(node, lease_clock(), self.machine.takeover.gathering)

    def _on_vouch(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._vouched(node, message.vouch, lease_clock())

    def _on_started(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self.machine.on_started(message.started, node, self.machine.job.nodes[node].host)

    def _on_probed(self, message: pb.AgentMessage, node: str, _: float) -> None:
        probed = message.probed
        self._liveness.answered(node, probed.node, probed.reachable, probed.evidence)

    def _on_electors_known(self, message: pb.AgentMessage, node: str, _: float) -> None:
        if self._elector_set.known(node, message.electors_known.version):
            for elector in self._elector_set.voters:
                if elector.node in self._agents.links:
                    self._agents.post(elector.node, self._elector_set.command())

    def _on_hang_reports(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self.machine.watch.on_hang_reports(node, message.hang_reports)

    def _on_modules(self, message: pb.AgentMessage, _: str, __: float) -> None:
        self._modules = message.modules
        for name in self.machine.job.nodes:
            self._tell_modules(name)

    def _on_joined(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self._checkpoints.adopt(message.joined, now)
        self.machine.on_joined(message.joined, now)

    def _on_failure(self, message: pb.AgentMessage, _: str, now: float) -> None:
        if message.failure.failed_at:  # by the agent's clock
            message.failure.failed_at += now - message.age_base
        self.machine.on_failure(message.failure, now)

    def _on_reply(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self.machine.on_reply(message.reply, now)

    def _on_replies(self, message: pb.AgentMessage, _: str, now: float) -> None:
        for reply in message.replies.replies:
            self.machine.on_reply(reply, now)

    def _on_done(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self.machine.on_done(message.done, now)

    def _on_exited(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self.machine.on_exited(message.exited, now)

    def _on_checkpoint(self, message: pb.AgentMessage, _: str, __: float) -> None:
        saved = message.checkpoint
        self.machine.on_checkpoint(saved.version, saved.path)
        if saved.found:
            return
        self._checkpoints.saved(saved)
        self._record(
            ev.CheckpointSaved(
                generation=self.machine.job.generation,
                version=saved.version,
                path=saved.path,
                seconds=saved.seconds,
                k0_s=saved.k0_s,
                step_s=self.machine.job.step_s,
            )
        )

    def _on_standby(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._standbys[node] = (message.standby.ready, message.standby.starting)
        ready, starting = self._standby_counts()
        self._record(ev.StandbyReady(generation=self.machine.job.generation, ready=ready, starting=starting))

    def _on_notice(self, message: pb.AgentMessage, node: str, _: float) -> None:
        n, job = message.notice, self.machine.job
        self._record(ev.Notice(generation=job.generation, rank=n.rank, kind=n.kind, text=n.text))
        if n.kind == NoticeKind.HEALTH_WARNING:
            job.nodes[node].suspect = n.text  # the last to get ranks of a lost node
        elif n.kind == NoticeKind.UNDO_ENABLED and self._undo_told != (job.generation, n.step):
            self._undo_told = (job.generation, n.step)  # once, however many ranks find it out
            # a rank whose steps need it cannot be brought back unless the others can go back, too
            for rank, record in job.ranks.items():
                keep = pb.KeepUndo(step=n.step)
                self._agents.post(record.home, pb.Command(generation=job.generation, rank=rank, keep_undo=keep))

    def echoed(self, node: str, sent_at: float) -> None:
        """The agent has received what was sent at this time."""
        self._elector_set.echoed(node, sent_at)

    def _vouched(self, observer: str, vouch: pb.Vouch, now: float) -> None:
        """A node that does not get through has asked another one to say that it lives."""
        record = self.machine.job.nodes.get(vouch.node)
        lives = record is not None and record.alive and record.incarnation == vouch.incarnation
        heard = lives and not self._own_heartbeats.suspended
        if heard:
            self._liveness.vouches(observer, vouch.node, now)
        answer = pb.Vouched(number=vouch.number, heard=heard)
        self._agents.links[observer].send_now_or_never(pb.Command(rank=AGENT, vouched=answer))

    def _tell_modules(self, node: str) -> None:
        """A spare node has no worker to learn from what its standbys should import."""
        if self._modules is not None and self.machine.job.nodes[node].state is NodeState.SPARE:
            self._agents.post(node, pb.Command(rank=AGENT, modules=self._modules))

    def _record(self, event: ev.Event) -> None:
        """Into the log, and on the terminal if it is of interest there."""
        self._log.write(event)
        line = self._console.line_of(event)
        if line is not None:
            print(f"flashrecovery: {line}", file=sys.stderr, flush=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now, lease_now = time.monotonic(), lease_clock()
            self._tell_all(lease_now)
            if self._elector_set.may_decide(lease_now):
                self._look_for_the_silent(lease_now, now)
                self.machine.on_tick(now)
                self._announce_checkpoint(now)
                self._spread_out(now)
                self.act()
                if self._elector_set.changed():
                    self._agents.post(None, self._elector_set.command())

    def _tell_all(self, now: float) -> None:
        """Tell the agents that this controller is there, and whether it may decide."""
        suspended = self._elector_set.suspended(now)
        if self._own_heartbeats.suspend(suspended):
            self._record(self._elector_set.notice(suspended=suspended))
        self._own_heartbeats.tick(now, self.machine.takeover.gathering)

    def _look_for_the_silent(self, lease_now: float, now: float) -> None:
        """Who is lost?"""
        for found in self._liveness.check(lease_now):
            if isinstance(found, Ask):
                probe = pb.Probe(
                    node=found.suspect,
                    address=self.machine.job.nodes[found.suspect].peer,
                    timeout_s=NODE_PROBE * self._config.timeouts.node_probe_s,
                )
                self._agents.post(found.observer, pb.Command(rank=AGENT, probe=probe))
            elif isinstance(found, Lost):
                self._standbys.pop(found.node, None)
                self._heartbeats.forget(found.node)
                self._sessions.cut(found.node)
                self._agents.end(found.node)  # if it hears this, it comes back, and is told that it was lost
                self.machine.on_node_lost(found.node, found.evidence, found.silent_s, now)
            else:
                seen = f"but node {found.observer} reaches it" if found.observer else "nor is any other node"
                text = f"node {found.node} has not been heard for {found.silent_s:.2f} s, {seen}: it keeps its ranks"
                self._record(ev.Notice(generation=self.machine.job.generation, kind=NoticeKind.NODE_UNHEARD, text=text))

    def _spread_out(self, now: float) -> None:
        """More agents than may speak here themselves are to go through others, but not in the middle of a recovery."""
        if self.machine.job.state not in (State.STARTING, State.RUNNING) or self.machine.job.recovery is not None:
            return
        for node, relay in self._relays.moves(self._agents.newest(), self.machine.job.nodes, now):
            through = pb.GoThrough(node=relay, peer=self.machine.job.nodes[relay].peer)
            self._agents.post(node, pb.Command(rank=AGENT, go_through=through))

    def _announce_checkpoint(self, now: float) -> None:
        """Have every rank save a version, if it is time."""
        if self.machine.job.state is State.RUNNING:
            for command in self._checkpoints.announce(self.machine.job.ranks.values(), now):
                command.generation = self.machine.job.generation
                self._agents.post(self.machine.job.ranks[command.rank].home, command)

    def act(self) -> None:
        """Carry out what the machine wants; later, if somebody else may have been elected meanwhile."""
        if self._elector_set.may_decide(lease_clock()):
            self._carry_out()

    def _carry_out(self) -> None:
        batches = Batches()
        for action in self.machine.job.take_actions():
            if isinstance(action, Emit):
                self._record(action.event)
                if isinstance(action.event, ev.JobStarted):
                    self._agents.post_batches(batches, len(self.machine.job.nodes))
                    for request in self._drills.take_armed():
                        self._inject(request)
                    _keep_what_there_is()
                elif isinstance(action.event, ev.RecoveryStarted):
                    self._checkpoints.recovered()
                elif isinstance(action.event, ev.RecoveryFinished):
                    _keep_what_there_is()
            elif isinstance(action, Publish):
                for node, command in self._tables.publish(action, self._agents.links):
                    self._agents.post(node, command)
            elif action.node is None or action.command.HasField("fence"):  # which the session itself must see
                self._agents.post_batches(batches, len(self.machine.job.nodes))
                self._agents.post(action.node, action.command)
            else:
                batches.add(action.node, action.command)
        self._agents.post_batches(batches, len(self.machine.job.nodes))
        if self._gathering and not self.machine.takeover.gathering:
            self._agents.post(
                None, self._own_heartbeats.message(gathering=False)
            )  # from now on the ranks of a failed collective can be stopped
        self._gathering = self.machine.takeover.gathering
        if self.machine.job.state is State.FINISHED and not self._dismissed:
            self._dismissed = True
            self._agents.post(None, self._last_word())
        if self._over_for_all() and not self.over.is_set():
            self._absent = {n.name for n in self.machine.job.nodes.values() if n.alive}.difference(
                self._agents.connected()
            )
            self.over.set()

    def _over_for_all(self) -> bool:
        """The job has ended, well or not."""
        return self.machine.job.state in (State.FINISHED, State.FAILED)

    def _last_word(self) -> pb.Command:
        """To an agent, when the job has ended."""
        return pb.Command(rank=AGENT, shutdown=pb.Shutdown(reason=self.machine.job.failure_reason))

    async def dismissed(self, timeout_s: float) -> None:
        """The job is over: wait until every agent knows, also one that is just connecting anew: it would wait for a
        controller for a long time."""
        await self._agents.settled(self._absent, timeout_s)


def _keep_what_there_is() -> None:
    """The garbage collector need not look at it again, nor at what comes as often as it would by itself: in a large job
    that is a fifth of a recovery's work."""
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.collect()
    gc.freeze()

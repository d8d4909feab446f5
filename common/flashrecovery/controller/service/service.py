"""The controller as a gRPC service, and what it does by the clock. :mod:`.inbound` takes in what agents say,
:mod:`.outbound` carries out what the machine wants."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from flashrecovery import events as ev
from flashrecovery.config import FaultSpec, RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.checkpoints import Checkpoints, Snapshots
from flashrecovery.controller.service.connections import AgentConnection, Connections
from flashrecovery.controller.service.console import Console
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.service.heartbeats import ControllerHeartbeats
from flashrecovery.controller.service.inbound import Inbound
from flashrecovery.controller.service.outbound import Actions, Receivers
from flashrecovery.controller.service.rank_table_publisher import RankTablePublisher
from flashrecovery.controller.service.relays import Relays
from flashrecovery.controller.service.sessions import Sessions
from flashrecovery.controller.service.status import StatusBoard
from flashrecovery.controller.state.fault_drills import FaultDrills
from flashrecovery.controller.state.job_state import AGENT, EarlierLaunch
from flashrecovery.controller.storage.earlier_launch import earlier_step
from flashrecovery.controller.storage.generation_file import GenerationFile
from flashrecovery.controller.storage.node_failure_log import NodeFailureLog
from flashrecovery.errors import ConfigError
from flashrecovery.heartbeat.receiver import HeartbeatReceiver
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.membership.leases import NODE_PROBE
from flashrecovery.plan.membership.liveness import Ask, Liveness, Lost
from flashrecovery.plan.membership.node_failures import Rating
from flashrecovery.plan.membership.quorum import Quorum
from flashrecovery.plan.transitions import RECOVERY_STATES, State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.redundancy.checkpoint.published import published
from flashrecovery.rpc.channel import CONTROLLER, Access, Server
from flashrecovery.rpc.vote import ask_elector
from flashrecovery.snapshot.files import LAST_CHECKPOINT
from flashrecovery.terminal import say
from flashrecovery.util.clock import lease_clock

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_TICK_S = 0.05
_GRACE_S = 1.0
"""Seconds that the connections have to end by themselves."""
_HEALTH_S = 1.0
"""How often the ranks' health is wanted, for status and metrics."""
_HEALTH_SELDOM_S = 5.0
"""The same in a recovery of a job of more than :data:`_MANY_NODES` nodes, where the controller has enough to do."""
_MANY_NODES = 100

log = logging.getLogger("flashrecovery")


def new_machine(config: RunConfig, run_dir: ev.RunDir) -> Machine:
    """The state machine of a job whose events are in ``run_dir``."""
    return Machine(config, launch=uuid.uuid4().hex, where=str(run_dir.path))


class ControllerService(rpc.ControllerServicer):  # type: ignore[misc]
    """Puts the parts of a controller together. Runs on one event loop, so the machine needs no lock."""

    def __init__(
        self,
        config: RunConfig,
        access: Access,
        log: ev.EventLog,
        run_dir: ev.RunDir,
        quorum: Quorum | None = None,
        marks: Path | None = None,
        home: Path | None = None,
        *,
        machine: Machine | None = None,
        course: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            marks: the file in which failures of nodes are remembered; None: they are not.
            home: the job's run directory, if ``run_dir`` is one of several in it.
            machine: the job's; None: a new one.
            course: gives the recorded timeline of the job as JSON, for a status that asks for it; None: it is not
                recorded.
        """
        self.machine = machine or new_machine(config, run_dir)
        self._incarnation = self.machine.job.launch  # as drawn: a controller that finds a job takes over its launch
        self._config = config
        self._access = access
        self._log = log
        self.run_dir = run_dir
        self._agents = Connections()
        quorum = quorum or Quorum("")
        self._leader = quorum.leader
        self._liveness = Liveness(config.timeouts, quorum.leader)
        self._elector_set = ElectorSet(quorum, self.machine.job, config.timeouts)
        self._renewal: asyncio.Task[None] | None = None
        self._tables = RankTablePublisher(run_dir)
        self._heartbeats = HeartbeatReceiver(access.token, self, config.timeouts.heartbeat_s)
        self._relays = Relays(config.max_direct_agents, quorum.leader)
        self._sessions = Sessions(
            self, self.machine, self._agents, self._liveness, self._heartbeats, self._relays, config.shared()
        )
        self._own_heartbeats = ControllerHeartbeats(
            self._agents, self.machine.job, self._heartbeats.gets_through, config.timeouts.heartbeat_s, _TICK_S
        )
        self._drills = FaultDrills(config.most_ranks)
        self._board = StatusBoard(self.machine, self._liveness, str(run_dir.path))
        self._checkpoints = Checkpoints(config.checkpoint)
        self._snapshots = Snapshots(config.snapshots.max_age_s)
        self._memory = NodeFailureLog(marks, str(run_dir.path.absolute()), self._rated, self._no_memory)
        self._numbers = GenerationFile(
            run_dir.path if config.several_nodes else None, home or run_dir.path, self._not_written_down
        )
        self._console = Console()
        self._server: Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._course = course
        self._intake = Inbound(
            self.machine,
            self._agents,
            self._liveness,
            self._elector_set,
            self._own_heartbeats,
            self._checkpoints,
            self._snapshots,
            self._record,
        )
        receivers = Receivers(
            self._agents,
            self._own_heartbeats,
            self._tables,
            self._drills,
            self._checkpoints,
            self._snapshots,
            self._memory,
            self._numbers,
        )
        self._actions = Actions(self.machine, receivers, self._record, self.after_beats)

    def take_over(self, why: str) -> None:
        """Begin as the successor of a controller that has been lost."""
        self._record(ev.Notice(generation=0, kind=NoticeKind.CONTROLLER_ELECTED, text=why))
        self.machine.takeover.inherit(time.monotonic())

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError if it is in use."""
        await self._memory.begin()
        self.machine.takeover.read_numbers(self._numbers.read())
        if self._config.resume:
            left = published(self.run_dir.path / LAST_CHECKPOINT)
            checkpoints = tuple((version, str(path)) for version, path in left)
            self.machine.job.found_earlier(EarlierLaunch(earlier_step(self.run_dir), checkpoints))
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
        self._actions.over.set()
        self._agents.close()
        if self._server is not None:
            await self._server.stop(_GRACE_S)
        self._tables.close()
        self._numbers.close()
        await self._memory.end(_GRACE_S)

    def request_stop(self, reason: str, *, by_itself: bool = False, at_once: bool = False) -> None:
        """See :meth:`flashrecovery.controller.machine.Machine.on_stop_request`."""
        self._memory.told_to_end()
        self.machine.on_stop_request(reason, time.monotonic(), by_itself=by_itself, at_once=at_once)
        self._actions.carry_out()

    # -- rpc --------------------------------------------------------------------------------------

    async def Who(self, request: pb.WhoRequest, context: Context) -> pb.WhoReply:
        """Is this still the controller that an agent knows?"""
        if self._renewal is None and self._elector_set.needs_newer(request.promised, lease_clock()):
            self._renewal = asyncio.create_task(self._renew(request.promised))
        return pb.WhoReply(incarnation=self._incarnation, term=self._elector_set.term)

    async def _renew(self, promised: int) -> None:
        """An agent has promised not to follow this term any more: get a newer one."""
        try:
            with self.deciding():
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
        """The whole job at one look; with its course over time, if that is wanted."""
        status = self.status()
        if not request.course or self._course is None:
            return status
        answer = pb.JobStatus(course=self._course())
        answer.MergeFrom(status)
        return answer

    def status(self) -> pb.JobStatus:
        """What the rpc of this name answers; not to be changed."""
        return self._board.look(self._intake.standby_counts())

    async def Inject(self, request: pb.InjectRequest, context: Context) -> pb.InjectReply:
        """Arm or deliver a fault."""
        error = self._drills.refusal(request)
        if not error and request.rank not in self.machine.job.ranks:
            error = f"rank {request.rank} has left the job"
        if not error:
            self._actions.inject(request)
        return pb.InjectReply(accepted=not error, error=error)

    async def Resize(self, request: pb.ResizeRequest, context: Context) -> pb.ResizeReply:
        """Change the number of replicas of an elastic job."""
        error = self.machine.resize(request.replicas, request.step, time.monotonic())
        self._actions.carry_out()
        return pb.ResizeReply(error=error)

    async def Replan(self, request: pb.ReplanRequest, context: Context) -> pb.ReplanReply:
        """Lay the job out in another way."""
        error, layout, lines = self.machine.replan(request.layout, request.step)
        self._actions.carry_out()
        return pb.ReplanReply(error=error, layout=layout, lines=lines)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        """Have a node leave the job."""
        if request.node == self._leader:
            text = (
                f"node {request.node} runs the job's controller, so it has to stay; if its agent is ended, the other "
                f"nodes elect another controller, if there are enough of them (docs/nodes.md)"
            )
            return pb.DrainReply(error=text)
        error, text = self.machine.drain.ask(request.node, request.within_s, time.monotonic())
        self._actions.carry_out()
        return pb.DrainReply(error=error, text=text)

    def arm(self, spec: FaultSpec) -> None:
        """A fault of the command line; its rank gets it right before the first step."""
        self._drills.arm(spec)

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
        with self.deciding():
            self.machine.on_heartbeat(heartbeat, time.monotonic(), node)

    def connected(self, node: str) -> bool:
        """Whether a message can be sent to it now."""
        return self._agents.is_connected(node)

    def after_beats(self) -> None:
        with self.deciding():
            self.act()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Whatever is raised inside is an error of the controller itself, and ends the job: it may have done half of
        what follows from an event, and would go on from there, or wait for ever."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it would go unnoticed otherwise
            self.has_erred(error)

    def has_erred(self, error: Exception) -> None:
        """The controller's own code has raised this."""
        log.error("an error in the controller", exc_info=error)
        if self.machine.job.state not in (State.FINISHED, State.FAILED):
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            self.machine.job.fail(f"an error in the controller ({place}): {type(error).__name__}: {error}")
        elif self.machine.job.ending.saving:
            self.machine.job.shut_down()
        try:
            self.act()
        except Exception as second:  # what is left to be done is done with the next tick
            log.error("another error in the controller", exc_info=second)

    # -- sessions.SessionEvents ----------------------------------------------------------------------

    def greet(self, connection: AgentConnection) -> pb.Command:
        """The first word to an agent; what else it has to know follows."""
        node = connection.node
        if self._actions.over_for_all and not self.machine.job.ending.saving and connection.link.sent == 0:
            self._agents.post(node, self._actions.last_word())  # it has come after the job's end
        self._intake.tell_modules(node)
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
        self._intake.deliver(message, node)

    def echoed(self, node: str, sent_at: float) -> None:
        """The agent has received what was sent at this time."""
        self._elector_set.echoed(node, sent_at)

    def _record(self, event: ev.Event) -> None:
        """Into the log, and on the terminal if it is of interest there."""
        event = self.machine.job.counting.told(event)
        self._log.write(event)
        line = self._console.line_of(event)
        if line is not None:
            say(line)

    def _rated(self, ratings: Mapping[str, Rating]) -> None:
        """What is thought of the nodes has changed."""
        with self.deciding():
            self.machine.conduct.on_ratings(ratings)
            self.act()

    def _no_memory(self, text: str) -> None:
        self._record(ev.Notice(generation=self.machine.job.generation, kind=NoticeKind.NODE_FAILURE_LOG, text=text))

    def _not_written_down(self, text: str) -> None:
        self._record(ev.Notice(generation=self.machine.job.generation, kind=NoticeKind.GENERATION_NOT_KEPT, text=text))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            with self.deciding():
                self._look_around(time.monotonic(), lease_clock())

    def _look_around(self, now: float, lease_now: float) -> None:
        self._tell_all(lease_now)
        if self._elector_set.may_decide(lease_now):
            self._look_for_the_silent(lease_now, now)
            self.machine.on_tick(now)
            self._announce_versions(now)
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
        """Act on nodes that are not heard: have others asked, or declare a node dead."""
        for found in self._liveness.check(lease_now):
            if isinstance(found, Ask):
                probe = pb.Probe(
                    node=found.suspect,
                    address=self.machine.job.nodes[found.suspect].peer,
                    timeout_s=NODE_PROBE * self._config.timeouts.node_probe_s,
                )
                self._agents.post(found.observer, pb.Command(rank=AGENT, probe=probe))
            elif isinstance(found, Lost):
                self._intake.forget(found.node)
                self._heartbeats.forget(found.node)
                self._sessions.cut(found.node)
                self._agents.end(found.node)  # if it gets this, it reconnects, and learns that it was declared lost
                self.machine.on_node_lost(found.node, found.evidence, found.silent_s, now)
            elif self.machine.job.nodes[found.node].alive:  # else it has left, and is ending
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

    def _announce_versions(self, now: float) -> None:
        """Have every rank save a version, or take a snapshot, if it is time."""
        if self.machine.drain.take_save_wanted():
            self._checkpoints.hurry()
        job = self.machine.job
        if job.state is State.RUNNING:
            ranks = job.ranks.values()
            wanted = self._checkpoints.announce(ranks, job.launch, now) + self._snapshots.announce(ranks, now)
            for command in wanted:
                command.generation = job.generation
                self._agents.post(job.ranks[command.rank].home, command)

    def act(self) -> None:
        """Carry out the machine's actions; postponed while another controller may have been elected."""
        if self._elector_set.may_decide(lease_clock()):
            self._actions.carry_out()

    @property
    def over(self) -> asyncio.Event:
        """The job has finished or failed, or this controller has ended."""
        return self._actions.over

    async def dismissed(self, timeout_s: float) -> None:
        """The job is over: wait until every agent knows."""
        await self._actions.dismissed(timeout_s)

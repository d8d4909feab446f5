"""The controller as a gRPC service: agents' streams in, the machine's actions out; status and faults for tools."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import grpc

from flashrecovery import events as ev
from flashrecovery.beats.controller import BeatServer
from flashrecovery.config import FaultSpec, RunConfig, check_phase
from flashrecovery.controller.batches import Batches
from flashrecovery.controller.console import line_of
from flashrecovery.controller.electorate import Electorate
from flashrecovery.controller.job_state import AGENT
from flashrecovery.controller.liveness import NODE_PROBE, Ask, Liveness, Lost
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.nodes import NodeState
from flashrecovery.controller.outbox import Emit, Publish
from flashrecovery.controller.quorum import Quorum
from flashrecovery.controller.states import State
from flashrecovery.controller.status import job_status
from flashrecovery.controller.table_publisher import TablePublisher
from flashrecovery.errors import ConfigError
from flashrecovery.link import Link
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.redundancy.interval import CheckpointSchedule
from flashrecovery.security import TokenCheck

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

    AgentLink = Link[pb.Command, pb.AgentMessage]

_TICK_S = 0.05
_REGISTER_S = 10.0
"""A connection that has not said who it is by then is closed."""
_GRACE_S = 1.0
"""For the connections to end by themselves."""
_FAULTS = ("sigkill", "sigstop", "exit", "raise", "segv", "hang", "corrupt")
_MESSAGE_LIMIT = 256 << 20
_CHEAP_S = 0.005
_BEATS_A_TICK = 100
"""On streams, at a few tenths of a millisecond each."""

log = logging.getLogger("flashrecovery")


class ControllerService(rpc.ControllerServicer):  # type: ignore[misc]
    """Feeds :class:`Machine` from the agents' streams. Runs on one event loop, so the machine needs no lock."""

    def __init__(
        self, config: RunConfig, token: str, log: ev.EventLog, run_dir: ev.RunDir, quorum: Quorum | None = None
    ) -> None:
        self.machine = Machine(config)
        self._config = config
        self._token = token
        self._log = log
        self.run_dir = run_dir
        self._links: dict[str, AgentLink] = {}
        self._incarnations: dict[str, str] = {}
        self._connections: dict[str, object] = {}
        self._liveness = Liveness(config.timeouts)
        self._electorate = Electorate(quorum or Quorum(""), self.machine, self._liveness, config.timeouts)
        self._tables = TablePublisher(run_dir)
        self._beats = BeatServer(token, self, config.timeouts.heartbeat_s)
        self._beat_at = 0.0
        self._to_beat: list[str] = []
        self._suspended = False
        self._incarnation = uuid.uuid4().hex
        self._standbys: dict[str, tuple[int, int]] = {}
        self._to_arm: list[FaultSpec] = []
        self._started = time.monotonic()
        self._interval_s = config.checkpoint.interval_s
        self._schedule = self._new_schedule(self._started)
        self._checkpoints = config.checkpoint.dir is not None
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._dismissed = False
        self._modules: pb.Modules | None = None
        self._undo_told = -1
        self._status, self._status_until = pb.JobStatus(), 0.0
        self.over = asyncio.Event()
        """The job has finished or failed, or this controller has ended."""

    def take_over(self, why: str) -> None:
        """This controller is not the job's first one, which has been lost."""
        self._record(ev.Notice(generation=0, kind="controller_elected", text=why))
        self.machine.inherit(time.monotonic())

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError if it is in use."""
        options = [("grpc.max_receive_message_length", _MESSAGE_LIMIT), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options, interceptors=[TokenCheck(self._token)])
        rpc.add_ControllerServicer_to_server(self, self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as e:
            raise ConfigError(f"controller {host}:{port}: the address cannot be bound: {e}") from e
        await self._server.start()
        if self._config.several_nodes and self._config.datagrams:
            self._beats.open(host, int(bound))
        self._ticker = asyncio.create_task(self._tick())
        return int(bound)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._beats.close()
        self.over.set()
        for link in self._links.values():
            link.close()
        if self._server is not None:
            await self._server.stop(grace=_GRACE_S)
        self._tables.close()

    def request_stop(self, reason: str) -> None:
        self.machine.on_stop_request(reason)
        self._act()

    # -- rpc --------------------------------------------------------------------------------------

    async def Who(self, request: pb.WhoRequest, context: Context) -> pb.WhoReply:
        """Is this still the controller that an agent knows?"""
        if self._electorate.raised_to(request.promised, time.monotonic()):
            self._post(None, self._electorate.command())
        return pb.WhoReply(incarnation=self._incarnation, term=self._electorate.term)

    async def Session(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncIterator[pb.Command]:
        """One connection of an agent. A newer one of the same node takes its place."""
        try:
            first = await asyncio.wait_for(anext(request_iterator), _REGISTER_S)
        except (asyncio.TimeoutError, StopAsyncIteration):
            return
        if first.WhichOneof("body") != "register" or not first.register.node:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of an agent must be Register")
        node, connection = first.register.node, object()
        link = self._link_of(first.register)
        self._connections[node] = connection
        link.accept(first)
        self._liveness.heard(node, time.monotonic())
        self.machine.on_register(first.register, time.monotonic())
        self._act()
        reader = asyncio.create_task(self._read(request_iterator, node, link))
        try:
            if self.machine.nodes[node].alive:
                self._tell_modules(node)
                if self._electorate.named:
                    self._post(node, self._electorate.command())
                # at once, because an agent that was cut off waits for it
                beat = self._beats.invite(node, link)
                beat.suspended = self._suspended
                yield pb.Command(generation=self.machine.generation, beat=beat)
            async for command in link.outgoing():
                if self._connections.get(node) is not connection:
                    return
                yield command
        finally:
            reader.cancel()
            if self._connections.get(node) is connection:
                del self._connections[node]
                self._beats.forget(node)
                self._liveness.disconnected(node)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.JobStatus:
        """The whole job at one look."""
        return self.status()

    def status(self) -> pb.JobStatus:
        """What the rpc of this name answers; not to be changed. In a very large job everybody gets the same one for so
        long that all the looking takes a tenth of a core at most."""
        now = time.monotonic()
        if now >= self._status_until:
            status = job_status(self.machine, self._liveness, self._standby_counts(), now)
            status.run_dir, status.uptime_s = str(self.run_dir.path), now - self._started
            self._status, took = status, time.monotonic() - now
            self._status_until = now + 10 * took if took > _CHEAP_S else 0.0
        return self._status

    def _standby_counts(self) -> tuple[int, int]:
        """(ready, starting), of all nodes"""
        return sum(r for r, _ in self._standbys.values()), sum(s for _, s in self._standbys.values())

    def _beat(self) -> pb.Command:
        return pb.Command(generation=self.machine.generation, beat=pb.Beat(suspended=self._suspended))

    async def Inject(self, request: pb.InjectRequest, context: Context) -> pb.InjectReply:
        """Arm or deliver a fault."""
        if request.rank >= self._config.world_size:
            return pb.InjectReply(error=f"rank {request.rank} is outside the world of {self._config.world_size} ranks")
        if request.fault not in _FAULTS:
            return pb.InjectReply(error=f"fault {request.fault!r} is unknown; allowed: {', '.join(_FAULTS)}")
        try:
            check_phase(request.phase or None)
        except ConfigError as e:
            return pb.InjectReply(error=str(e))
        self._deliver(request.rank, request.fault, request.phase, request.step)
        return pb.InjectReply(accepted=True)

    def arm(self, spec: FaultSpec) -> None:
        """A fault of the command line; its rank gets it right before the first step."""
        self._to_arm.append(spec)

    def _deliver(self, rank: int, fault: str, phase: str, step: int) -> None:
        generation = self.machine.generation
        self._record(ev.FaultInjected(generation=generation, rank=rank, fault=fault, phase=phase, step=step))
        message = pb.Fault(fault=fault, phase=phase, step=step)
        self._post(self.machine.ranks[rank].home, pb.Command(generation=generation, rank=rank, fault=message))

    def _link_of(self, message: pb.Register) -> AgentLink:
        """The node's link; a new one for a new incarnation of its agent, and for one that was taken for lost: what it
        was told before is void."""
        known = self.machine.nodes.get(message.node)
        lost = known is not None and not known.alive
        if lost or self._incarnations.get(message.node) != message.incarnation:
            self._incarnations[message.node] = message.incarnation
            self._links[message.node] = Link()
        return self._links[message.node]

    # -- beats.controller.Hearer ------------------------------------------------------------------

    def hears(self, node: str, now: float) -> bool:
        """A sign of life by datagram."""
        record = self.machine.nodes.get(node)
        if record is None or not record.alive:
            return False
        self._liveness.heard(node, now)
        return not self._suspended

    def urgent(self) -> bool:
        return self.machine.wants_every_heartbeat

    def health(self, node: str, heartbeat: pb.Heartbeat) -> None:
        self.machine.on_heartbeat(heartbeat, time.monotonic())

    def after_beats(self) -> None:
        self._act()

    # -- feeding the machine ----------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[pb.AgentMessage], node: str, link: AgentLink) -> None:
        async for message in messages:
            if not link.accept(message):
                continue
            record = self.machine.nodes.get(node)
            if record is None or not record.alive:
                continue  # taken for lost: its ranks belong to others now
            self._liveness.heard(node, time.monotonic())
            self._dispatch(message, node)
            self._act()

    def _dispatch(self, message: pb.AgentMessage, node: str) -> None:
        now = time.monotonic()
        m = self.machine
        body = message.WhichOneof("body")
        if body == "heartbeat":
            m.on_heartbeat(message.heartbeat, now)
        elif body == "started":
            m.on_started(message.started, node, m.nodes[node].host)
        elif body == "probed":
            probed = message.probed
            self._liveness.answered(node, probed.node, probed.reachable, probed.evidence)
        elif body == "electors_known":
            self._electorate.known(node, message.electors_known.version)
        elif body == "standstill":
            m.on_standstill(node, message.standstill)
        elif body == "modules":
            self._modules = message.modules
            for name in m.nodes:
                self._tell_modules(name)
        elif body == "joined":
            self._adopt_settings(message.joined, now)
            m.on_joined(message.joined, now)
        elif body == "failure":
            if message.failure.failed_at:  # by the agent's clock
                message.failure.failed_at += now - message.age_base
            m.on_failure(message.failure, now)
        elif body == "reply":
            m.on_reply(message.reply, now)
        elif body == "replies":
            for reply in message.replies.replies:
                m.on_reply(reply, now)
        elif body == "done":
            m.on_done(message.done, now)
        elif body == "exited":
            m.on_exited(message.exited, now)
        elif body == "checkpoint":
            saved = message.checkpoint
            m.on_checkpoint(saved.version, saved.path)
            if saved.found:
                return
            self._schedule.published(saved.k0_s)
            self._record(
                ev.CheckpointSaved(
                    generation=m.generation, version=saved.version, path=saved.path, seconds=saved.seconds
                )
            )
        elif body == "standby":
            self._standbys[node] = (message.standby.ready, message.standby.starting)
            ready, starting = self._standby_counts()
            self._record(ev.StandbyReady(generation=m.generation, ready=ready, starting=starting))
        elif body == "notice":
            n = message.notice
            self._record(ev.Notice(generation=m.generation, rank=n.rank, kind=n.kind, text=n.text))
            if n.kind == "health_warning":
                m.nodes[node].suspect = n.text  # the last to get ranks of a lost node
            elif n.kind == "undo_enabled" and self._undo_told != m.generation:
                self._undo_told = m.generation  # once, however many ranks find it out
                # a rank whose steps need it cannot be brought back unless the others can go back, too
                for rank in m.ranks:
                    command = pb.Command(generation=m.generation, rank=rank, keep_undo=pb.KeepUndo(reason=n.text))
                    self._post(m.ranks[rank].home, command)

    def _tell_modules(self, node: str) -> None:
        """A spare node has no worker to learn from what its standbys should import."""
        if self._modules is not None and self.machine.nodes[node].state is NodeState.SPARE:
            self._post(node, pb.Command(rank=AGENT, modules=self._modules))

    def _record(self, event: ev.Event) -> None:
        """Into the log, and on the terminal if it is of interest there."""
        self._log.write(event)
        line = line_of(event)
        if line is not None:
            print(f"flashrecovery: {line}", file=sys.stderr, flush=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._beat_all(now)
            if self._electorate.may_decide(now):
                self._look_for_the_silent(now)
                self.machine.on_tick(now)
                self._announce_checkpoint(now)
                self._act()
                if self._electorate.changed():
                    self._post(None, self._electorate.command())

    def _beat_all(self, now: float) -> None:
        """Tell the agents, as far as they do not hear it by datagram, that this controller is there and may decide. So
        many at a time that it does not keep this controller from anything else, however many they are."""
        suspended = self._electorate.suspended(now)
        if suspended is not self._suspended:
            self._suspended, self._beat_at, self._to_beat = suspended, 0.0, []
            self._record(self._electorate.notice(suspended=suspended))
        if not self._to_beat and now - self._beat_at >= self._config.timeouts.heartbeat_s:
            self._beat_at = now
            self._to_beat = [n for n in self._connections if suspended or not self._beats.gets_through(n, now)]
        told, self._to_beat = self._to_beat[:_BEATS_A_TICK], self._to_beat[_BEATS_A_TICK:]
        for name in told:
            if name in self._connections and self.machine.nodes[name].alive:
                self._links[name].send_now_or_never(self._beat())

    def _look_for_the_silent(self, now: float) -> None:
        """Who is lost?"""
        for found in self._liveness.check(now):
            if isinstance(found, Ask):
                probe = pb.Probe(
                    node=found.suspect,
                    address=self.machine.nodes[found.suspect].peer,
                    timeout_s=NODE_PROBE * self._config.timeouts.node_probe_s,
                )
                self._post(found.observer, pb.Command(rank=AGENT, probe=probe))
            elif isinstance(found, Lost):
                self._standbys.pop(found.node, None)
                self._beats.forget(found.node)
                self._links[found.node].close()  # if it hears this, it comes back, and is told that it was lost
                self.machine.on_node_lost(found.node, found.evidence, found.silent_s, now)
            else:
                text = (
                    f"node {found.node} has not been heard for {found.silent_s:.2f} s, but node {found.observer} "
                    "reaches it: it keeps its ranks"
                )
                self._record(ev.Notice(generation=self.machine.generation, kind="node_unheard", text=text))

    def _new_schedule(self, now: float) -> CheckpointSchedule:
        return CheckpointSchedule(self._interval_s, self._config.checkpoint.failures_per_day, now=now)

    def _adopt_settings(self, joined: pb.Joined, now: float) -> None:
        """A framework's configuration may ask for checkpoints; rank 0's counts."""
        if joined.rank != 0:
            return
        self._checkpoints = joined.checkpoints
        interval_s: float | Literal["auto"] = joined.checkpoint_interval_s or "auto"
        if interval_s != self._interval_s:
            self._interval_s = interval_s
            self._schedule = self._new_schedule(now)

    def _announce_checkpoint(self, now: float) -> None:
        """Tell every rank which version to save, far enough ahead that all hear it in time."""
        if not self._checkpoints or self.machine.state is not State.RUNNING or not self._schedule.is_due(now):
            return
        records = self.machine.ranks.values()
        version = self._schedule.announce(max(r.committed for r in records), max(r.step_s for r in records), now=now)
        if version is not None:
            for record in records:
                command = pb.Command(checkpoint=pb.TakeCheckpoint(version=version))
                command.generation, command.rank = self.machine.generation, record.rank
                self._post(record.home, command)

    def _act(self) -> None:
        batches = Batches()
        for action in self.machine.take_actions():
            if isinstance(action, Emit):
                self._record(action.event)
                if isinstance(action.event, ev.JobStarted):
                    self._post_all(batches)
                    for spec in self._to_arm:
                        step = -1 if spec.step is None else spec.step
                        self._deliver(spec.rank, spec.fault, spec.at or "between", step)
                    self._to_arm = []
                elif isinstance(action.event, ev.RecoveryStarted):
                    self._schedule.recovered()
            elif isinstance(action, Publish):
                for node, command in self._tables.publish(action, self._links):
                    self._post(node, command)
            elif action.node is None or action.command.HasField("fence"):  # which the session itself must see
                self._post_all(batches)
                self._post(action.node, action.command)
            else:
                batches.add(action.node, action.command)
        self._post_all(batches)
        if self.machine.state is State.FINISHED and not self._dismissed:
            self._dismissed = True
            self._post(None, pb.Command(rank=AGENT, shutdown=pb.Shutdown()))
        if self.machine.state in (State.FINISHED, State.FAILED):
            self.over.set()

    def _post_all(self, batches: Batches) -> None:
        for node, command in batches.take(len(self.machine.nodes)):
            self._post(node, command)

    def _post(self, node: str | None, command: pb.Command) -> None:
        """To one agent, or to all (None)."""
        if node is not None:
            if node:  # a rank that waits for a node has nobody to be told
                self._links[node].send(command)
            return
        for link in self._links.values():
            copy = pb.Command()
            copy.CopyFrom(command)
            link.send(copy)

    async def dismissed(self, timeout_s: float) -> None:
        """The job is over: wait until every agent that is connected knows."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(not self._links[n].settled() for n in self._connections):
            await asyncio.sleep(0.01)

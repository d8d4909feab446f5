"""The controller as a gRPC service: agents' streams in, the machine's actions out; status and faults for tools."""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Literal

import grpc

from flashrecovery import events as ev
from flashrecovery.config import FaultSpec, RunConfig, check_phase
from flashrecovery.controller.console import line_of
from flashrecovery.controller.job_state import AGENT
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.outbox import Emit
from flashrecovery.controller.states import State
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.redundancy.interval import CheckpointSchedule

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

TOKEN_KEY = "flashrecovery-token"
_TICK_S = 0.25
_FAULTS = ("sigkill", "sigstop", "exit", "raise", "segv", "corrupt")
_MESSAGE_LIMIT = 256 << 20


class ControllerService(rpc.ControllerServicer):  # type: ignore[misc]
    """Feeds :class:`Machine` from the agents' streams. Runs on one event loop, so the machine needs no lock."""

    def __init__(
        self,
        config: RunConfig,
        token: str,
        log: ev.EventLog,
        store_address: Callable[[], tuple[str, int]],
        run_dir: str,
    ) -> None:
        self.machine = Machine(config, store_address)
        self._config = config
        self._token = token
        self._log = log
        self._run_dir = run_dir
        self._streams: dict[int, asyncio.Queue[pb.Command]] = {}
        self._node_of: dict[int, int] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._standbys = (0, 0)
        self._to_arm: list[FaultSpec] = []
        self._started = time.monotonic()
        self._interval_s = config.checkpoint.interval_s
        self._schedule = self._new_schedule(self._started)
        self._checkpoints = config.checkpoint.dir is not None
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError if it is in use."""
        options = [("grpc.max_receive_message_length", _MESSAGE_LIMIT), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        rpc.add_ControllerServicer_to_server(self, self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as e:
            raise ConfigError(f"controller {host}:{port}: the address cannot be bound: {e}") from e
        await self._server.start()
        self._ticker = asyncio.create_task(self._tick())
        return int(bound)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self.closed.set()
        if self._server is not None:
            await self._server.stop(grace=0.1)

    def request_stop(self, reason: str) -> None:
        self.machine.on_stop_request(reason)
        self._act()

    # -- rpc --------------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> AsyncIterator[pb.Command]:
        """One agent's stream."""
        await self._authorize(context)
        queue: asyncio.Queue[pb.Command] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, queue))
        try:
            while True:
                yield await queue.get()
        finally:
            reader.cancel()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.JobStatus:
        """The whole job at one look."""
        m = self.machine
        ready, starting = self._standbys
        return pb.JobStatus(
            state=m.state.value,
            generation=m.generation,
            run_dir=self._run_dir,
            uptime_s=time.monotonic() - self._started,
            standby_ready=ready,
            standby_starting=starting,
            last_failure=m.last_failure,
            failure_reason=m.failure_reason,
            ranks=[
                pb.RankStatus(
                    rank=r.rank,
                    pid=r.pid,
                    node=r.node,
                    host=r.host,
                    state=r.place.value,
                    tag=r.tag,
                    progress_age_s=r.progress_age_s,
                    generation=r.joined_generation,
                    committed=r.committed,
                    step_s=r.step_s,
                )
                for r in m.ranks.values()
            ],
            recoveries=[
                pb.RecoverySummary(
                    generation=x.generation,
                    victims=x.victims,
                    resume_step=x.resume_step,
                    total_s=x.total_s,
                    kind=x.cause,
                )
                for x in m.history
            ],
        )

    async def Inject(self, request: pb.InjectRequest, context: Context) -> pb.InjectReply:
        """Arm or deliver a fault."""
        await self._authorize(context)
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
        self._post(rank, pb.Command(generation=generation, rank=rank, fault=message))

    async def _authorize(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(given), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing job token")

    # -- feeding the machine ----------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[pb.AgentMessage], queue: asyncio.Queue[pb.Command]) -> None:
        node = -1
        async for message in messages:
            if message.WhichOneof("body") == "register":
                node = message.register.node_rank
                self._streams[node] = queue
                self._names[node] = (message.register.node, message.register.host)
                first = node * self._config.nproc_per_node
                self._node_of.update({first + i: node for i in range(message.register.slots)})
                if len(self._node_of) == self._config.world_size:
                    self.machine.on_launch(time.monotonic())
            else:
                self._dispatch(message, node)
            self._act()

    def _dispatch(self, message: pb.AgentMessage, node: int) -> None:
        now = time.monotonic()
        m = self.machine
        body = message.WhichOneof("body")
        if body == "heartbeat":
            m.on_heartbeat(message.heartbeat, now)
        elif body == "started":
            name, host = self._names[node]
            m.on_started(message.started, name, host)
        elif body == "joined":
            self._adopt_settings(message.joined, now)
            m.on_joined(message.joined, now)
        elif body == "failure":
            m.on_failure(message.failure, now)
        elif body == "reply":
            m.on_reply(message.reply, now)
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
            self._standbys = (message.standby.ready, message.standby.starting)
            self._record(
                ev.StandbyReady(generation=m.generation, ready=message.standby.ready, starting=message.standby.starting)
            )
        elif body == "notice":
            n = message.notice
            self._record(ev.Notice(generation=m.generation, rank=n.rank, kind=n.kind, text=n.text))
            if n.kind == "undo_enabled":
                # a rank whose steps need it cannot be brought back unless the others can go back, too
                for rank in m.ranks:
                    command = pb.Command(generation=m.generation, rank=rank, keep_undo=pb.KeepUndo(reason=n.text))
                    self._post(rank, command)

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
            self.machine.on_tick(now)
            self._announce_checkpoint(now)
            self._act()

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
        if not self._checkpoints or self.machine.state is not State.RUNNING:
            return
        records = self.machine.ranks.values()
        version = self._schedule.announce(max(r.committed for r in records), max(r.step_s for r in records), now=now)
        if version is not None:
            for record in records:
                command = pb.Command(checkpoint=pb.TakeCheckpoint(version=version))
                command.generation, command.rank = self.machine.generation, record.rank
                self._post(record.rank, command)

    def _act(self) -> None:
        for action in self.machine.take_actions():
            if isinstance(action, Emit):
                self._record(action.event)
                if isinstance(action.event, ev.JobStarted):
                    for spec in self._to_arm:
                        step = -1 if spec.step is None else spec.step
                        self._deliver(spec.rank, spec.fault, spec.at or "between", step)
                    self._to_arm = []
                elif isinstance(action.event, ev.RecoveryStarted):
                    self._schedule.recovered()
            else:
                self._post(action.rank, action.command)
        if self.machine.state is State.FINISHED:
            self._post(AGENT, pb.Command(rank=AGENT, shutdown=pb.Shutdown()))

    def _post(self, rank: int, command: pb.Command) -> None:
        nodes = list(self._streams) if rank == AGENT else [self._node_of[rank]]
        for node in nodes:
            self._streams[node].put_nowait(command)

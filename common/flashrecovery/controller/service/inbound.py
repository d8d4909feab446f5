"""What agents say: each kind of message goes to the part of the controller that it concerns, most to the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from flashrecovery import events as ev
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.checkpoints import Checkpoints, Snapshots
from flashrecovery.controller.service.connections import Connections
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.service.heartbeats import ControllerHeartbeats
from flashrecovery.controller.state.job_state import AGENT
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.errors import ProtocolError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.bodies import no_handler
from flashrecovery.runtime.machine_speed import MachineSpeed
from flashrecovery.util.clock import lease_clock

_SHORT = 240
"""Characters of a notice that are repeated in another one."""


class Inbound:
    """The intake of one controller. ``record`` writes an event down."""

    def __init__(
        self,
        machine: Machine,
        agents: Connections,
        liveness: Liveness,
        elector_set: ElectorSet,
        heartbeats: ControllerHeartbeats,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        record: Callable[[ev.Event], None],
    ) -> None:
        self._machine = machine
        self._agents = agents
        self._liveness = liveness
        self._elector_set = elector_set
        self._own_heartbeats = heartbeats
        self._checkpoints = checkpoints
        self._snapshots = snapshots
        self._record = record
        self._standbys: dict[str, tuple[int, int]] = {}
        self._modules: pb.Modules | None = None
        self._undo_told = (-1, -1)

    def deliver(self, message: pb.AgentMessage, node: str) -> None:
        """What an agent says."""
        now = time.monotonic()
        body = message.WhichOneof("body")
        match body:
            case "heartbeat":
                self._on_heartbeat(message.heartbeat, node, now)
            case "vouch":
                self._on_vouch(message.vouch, node, lease_clock())
            case "started":
                self._machine.on_started(message.started, node, self._machine.job.nodes[node].host)
            case "probed":
                self._on_probed(message.probed, node)
            case "electors_known":
                self._on_electors_known(message.electors_known, node)
            case "hang_reports":
                self._machine.watch.on_hang_reports(node, message.hang_reports)
            case "modules":
                self._on_modules(message.modules)
            case "joined":
                self._on_joined(message.joined, node, now)
            case "failure":
                self._on_failure(message.failure, node, now, message.age_base)
            case "reply":
                self._machine.on_reply(message.reply, now)
            case "replies":
                for reply in message.replies.replies:
                    self._machine.on_reply(reply, now)
            case "done":
                self._machine.on_done(message.done, now)
            case "paused":
                self._machine.on_paused(message.paused, now)
            case "exited":
                self._machine.on_exited(message.exited, now, node)
            case "node_leaving":
                self._on_node_leaving(message.node_leaving, node, now)
            case "node_stuck":
                self._machine.on_node_stuck(node, message.node_stuck.evidence, now)
            case "checkpoint":
                self._on_checkpoint(message.checkpoint)
            case "snapshot":
                self._snapshots.taken(message.snapshot)
            case "standby":
                self._on_standby(message.standby, node)
            case "machine_speed":
                speed = message.machine_speed
                self._machine.job.nodes[node].speed_measured(MachineSpeed(speed.copy, speed.link))
            case "notice":
                self._on_notice(message.notice, node)
            case "register":
                raise ProtocolError(f"node {node} registers twice in the same session")
            case None:
                pass  # an acknowledgement
            case _:
                no_handler(body)

    def standby_counts(self) -> tuple[int, int]:
        """(ready, starting), of all nodes."""
        return sum(r for r, _ in self._standbys.values()), sum(s for _, s in self._standbys.values())

    def forget(self, node: str) -> None:
        """The node is lost, and so are its standbys."""
        self._standbys.pop(node, None)

    def tell_modules(self, node: str) -> None:
        """A spare node has no worker to learn from what its standbys should import."""
        if self._modules is not None and self._machine.job.nodes[node].state is NodeState.SPARE:
            self._agents.post(node, pb.Command(rank=AGENT, modules=self._modules))

    def _on_heartbeat(self, heartbeat: pb.Heartbeat, node: str, now: float) -> None:
        self._machine.on_heartbeat(heartbeat, now, node)
        self._own_heartbeats.answer(node, lease_clock(), self._machine.takeover.gathering)

    def _on_vouch(self, vouch: pb.Vouch, observer: str, now: float) -> None:
        """A node that does not get through has asked another one to say that it lives."""
        record = self._machine.job.nodes.get(vouch.node)
        lives = record is not None and record.alive and record.incarnation == vouch.incarnation
        heard = lives and not self._own_heartbeats.suspended
        if heard:
            self._liveness.vouches(observer, vouch.node, now)
        answer = pb.Vouched(number=vouch.number, heard=heard)
        self._agents.links[observer].send_now_or_never(pb.Command(rank=AGENT, vouched=answer))

    def _on_probed(self, probed: pb.Probed, observer: str) -> None:
        self._liveness.answered(observer, probed.node, probed.reachable, probed.evidence)

    def _on_electors_known(self, known: pb.ElectorsKnown, node: str) -> None:
        if self._elector_set.known(node, known.version):
            for elector in self._elector_set.voters:
                if elector.node in self._agents.links:
                    self._agents.post(elector.node, self._elector_set.command())

    def _on_modules(self, modules: pb.Modules) -> None:
        self._modules = modules
        for name in self._machine.job.nodes:
            self.tell_modules(name)

    def _on_joined(self, joined: pb.Joined, node: str, now: float) -> None:
        self._checkpoints.adopt(joined, now)
        self._machine.on_joined(joined, now, node)

    def _on_failure(self, failure: pb.Failure, node: str, now: float, age_base: float) -> None:
        """``age_base``: the agent's clock when it has sent this, seconds; ``failed_at`` is of that clock."""
        if failure.failed_at:
            failure.failed_at += now - age_base
        self._machine.on_failure(failure, now, node)

    def _on_node_leaving(self, node_leaving: pb.NodeLeaving, node: str, now: float) -> None:
        """A node asks to leave. If its ranks cannot be moved, it leaves at once, as if it had failed."""
        job = self._machine.job
        why_not, _ = self._machine.drain.ask(node, node_leaving.within_s, now, node_leaving.reason)
        if why_not and node_leaving.stays:
            job.notice(NoticeKind.NODE_LEAVES, f"node {node} is to leave, because {node_leaving.reason}; but {why_not}")
        elif why_not:
            reason = f"{node_leaving.reason}; its ranks cannot be handed over: {why_not}"
            self._agents.post(node, pb.Command(rank=AGENT, shutdown=pb.Shutdown(reason=reason)))

    def _on_checkpoint(self, saved: pb.CheckpointSaved) -> None:
        self._machine.on_checkpoint(saved.version, saved.path)
        if saved.found:
            return
        self._checkpoints.saved(saved)
        self._record(
            ev.CheckpointSaved(
                generation=self._machine.job.generation,
                version=saved.version,
                path=saved.path,
                seconds=saved.seconds,
                k0_s=saved.k0_s,
                step_s=self._machine.job.step_s,
            )
        )

    def _on_standby(self, standby: pb.StandbyCount, node: str) -> None:
        self._standbys[node] = (standby.ready, standby.starting)
        ready, starting = self.standby_counts()
        self._record(ev.StandbyReady(generation=self._machine.job.generation, ready=ready, starting=starting))

    def _on_notice(self, n: pb.Notice, node: str) -> None:
        job = self._machine.job
        self._record(ev.Notice(generation=job.generation, rank=n.rank, kind=n.kind, text=n.text, seconds=n.seconds))
        if n.kind == NoticeKind.FAULT_FIRED:
            job.asked.fires(n.rank, n.fault)
        if n.kind == NoticeKind.NOT_REGISTERED:
            job.hear_unregistered(shortened(n.text))
        if n.kind == NoticeKind.HEALTH_WARNING:
            job.nodes[node].suspect_of(n.text)  # the last to get ranks of a lost node
        elif n.kind == NoticeKind.DATA_ENDED:
            self._machine.watch.data_ended(n.rank, n.text)
        elif n.kind == NoticeKind.PRE_STEP_COPY_ENABLED and self._undo_told != (job.generation, n.step):
            self._undo_told = (job.generation, n.step)  # once, however many ranks find it out
            # a rank whose steps need it cannot be brought back unless the others can go back, too
            for rank, record in job.ranks.items():
                keep = pb.KeepUndo(step=n.step)
                self._agents.post(record.home, pb.Command(generation=job.generation, rank=rank, keep_undo=keep))


def shortened(text: str) -> str:
    """The beginning of what takes many lines."""
    return text if len(text) <= _SHORT else f"{text[:_SHORT].rpartition(' ')[0]} ..."

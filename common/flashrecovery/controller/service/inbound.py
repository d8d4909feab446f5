"""What agents say: each kind of message goes to the part of the controller that it concerns, most to the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flashrecovery import events as ev
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.checkpoints import Checkpoints
from flashrecovery.controller.service.connections import Connections
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.service.heartbeats import ControllerHeartbeats
from flashrecovery.controller.state.job_state import AGENT
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.proto import flashrecovery_pb2 as pb
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
        record: Callable[[ev.Event], None],
    ) -> None:
        self._machine = machine
        self._agents = agents
        self._liveness = liveness
        self._elector_set = elector_set
        self._own_heartbeats = heartbeats
        self._checkpoints = checkpoints
        self._record = record
        self._standbys: dict[str, tuple[int, int]] = {}
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
            "paused": self._on_paused,
            "exited": self._on_exited,
            "departing": self._on_departing,
            "checkpoint": self._on_checkpoint,
            "standby": self._on_standby,
            "notice": self._on_notice,
        }
        """What agents say, by its body; with the agent's node, and the time."""

    def deliver(self, message: pb.AgentMessage, node: str) -> None:
        """What an agent says."""
        body = message.WhichOneof("body")
        if body is not None:
            self._take_in[body](message, node, time.monotonic())

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

    def _on_heartbeat(self, message: pb.AgentMessage, node: str, now: float) -> None:
        self._machine.on_heartbeat(message.heartbeat, now, node)
        self._own_heartbeats.answer(node, lease_clock(), self._machine.takeover.gathering)

    def _on_vouch(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._vouched(node, message.vouch, lease_clock())

    def _on_started(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._machine.on_started(message.started, node, self._machine.job.nodes[node].host)

    def _on_probed(self, message: pb.AgentMessage, node: str, _: float) -> None:
        probed = message.probed
        self._liveness.answered(node, probed.node, probed.reachable, probed.evidence)

    def _on_electors_known(self, message: pb.AgentMessage, node: str, _: float) -> None:
        if self._elector_set.known(node, message.electors_known.version):
            for elector in self._elector_set.voters:
                if elector.node in self._agents.links:
                    self._agents.post(elector.node, self._elector_set.command())

    def _on_hang_reports(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._machine.watch.on_hang_reports(node, message.hang_reports)

    def _on_modules(self, message: pb.AgentMessage, _: str, __: float) -> None:
        self._modules = message.modules
        for name in self._machine.job.nodes:
            self.tell_modules(name)

    def _on_joined(self, message: pb.AgentMessage, node: str, now: float) -> None:
        self._checkpoints.adopt(message.joined, now)
        self._machine.on_joined(message.joined, now, node)

    def _on_failure(self, message: pb.AgentMessage, node: str, now: float) -> None:
        if message.failure.failed_at:  # by the agent's clock
            message.failure.failed_at += now - message.age_base
        self._machine.on_failure(message.failure, now, node)

    def _on_reply(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self._machine.on_reply(message.reply, now)

    def _on_replies(self, message: pb.AgentMessage, _: str, now: float) -> None:
        for reply in message.replies.replies:
            self._machine.on_reply(reply, now)

    def _on_done(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self._machine.on_done(message.done, now)

    def _on_paused(self, message: pb.AgentMessage, _: str, now: float) -> None:
        self._machine.on_paused(message.paused, now)

    def _on_exited(self, message: pb.AgentMessage, node: str, now: float) -> None:
        self._machine.on_exited(message.exited, now, node)

    def _on_departing(self, message: pb.AgentMessage, node: str, now: float) -> None:
        """What cannot be helped happens at once, as if nobody had asked."""
        departing, job = message.departing, self._machine.job
        why_not, _ = self._machine.handoff.ask(node, departing.within_s, now, departing.reason)
        if why_not and departing.stays:
            job.notice(NoticeKind.NODE_LEAVES, f"node {node} is to leave, because {departing.reason}; but {why_not}")
        elif why_not:
            reason = f"{departing.reason}; its ranks cannot be handed over: {why_not}"
            self._agents.post(node, pb.Command(rank=AGENT, shutdown=pb.Shutdown(reason=reason)))

    def _on_checkpoint(self, message: pb.AgentMessage, _: str, __: float) -> None:
        saved = message.checkpoint
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

    def _on_standby(self, message: pb.AgentMessage, node: str, _: float) -> None:
        self._standbys[node] = (message.standby.ready, message.standby.starting)
        ready, starting = self.standby_counts()
        self._record(ev.StandbyReady(generation=self._machine.job.generation, ready=ready, starting=starting))

    def _on_notice(self, message: pb.AgentMessage, node: str, _: float) -> None:
        n, job = message.notice, self._machine.job
        self._record(ev.Notice(generation=job.generation, rank=n.rank, kind=n.kind, text=n.text, seconds=n.seconds))
        if n.kind == NoticeKind.FAULT_FIRED:
            job.asked.strikes(n.rank, n.fault)
        if n.kind == NoticeKind.NOT_REGISTERED and not job.not_registered:
            job.not_registered = shortened(n.text)
        if n.kind == NoticeKind.HEALTH_WARNING:
            job.nodes[node].suspect = n.text  # the last to get ranks of a lost node
        elif n.kind == NoticeKind.DATA_ENDED:
            self._machine.watch.data_ended(n.rank, n.text)
        elif n.kind == NoticeKind.PRE_STEP_COPY_ENABLED and self._undo_told != (job.generation, n.step):
            self._undo_told = (job.generation, n.step)  # once, however many ranks find it out
            # a rank whose steps need it cannot be brought back unless the others can go back, too
            for rank, record in job.ranks.items():
                keep = pb.KeepUndo(step=n.step)
                self._agents.post(record.home, pb.Command(generation=job.generation, rank=rank, keep_undo=keep))

    def _vouched(self, observer: str, vouch: pb.Vouch, now: float) -> None:
        """A node that does not get through has asked another one to say that it lives."""
        record = self._machine.job.nodes.get(vouch.node)
        lives = record is not None and record.alive and record.incarnation == vouch.incarnation
        heard = lives and not self._own_heartbeats.suspended
        if heard:
            self._liveness.vouches(observer, vouch.node, now)
        answer = pb.Vouched(number=vouch.number, heard=heard)
        self._agents.links[observer].send_now_or_never(pb.Command(rank=AGENT, vouched=answer))


def shortened(text: str) -> str:
    """The beginning of what takes many lines."""
    return text if len(text) <= _SHORT else f"{text[:_SHORT].rpartition(' ')[0]} ..."

"""What workers and standbys say: most of it goes on to the controller."""

from __future__ import annotations

from collections.abc import Callable

from flashrecovery.agent.monitoring.fault_injection import NodeFaults
from flashrecovery.agent.monitoring.hang import Looks
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import ProcessManager
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.agent.stores.staging_area import StagingArea
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.bodies import no_handler


class WorkerMessages:
    """Takes in what the processes of one node say. ``send`` takes a message for the controller, ``spread_setup_logs``
    gives the set-up logs of this node's ranks to the nodes that keep them.

    Attributes:
        checkpoint: the newest one of the job that this node knows of.
    """

    def __init__(
        self,
        send: Callable[[pb.AgentMessage], None],
        processes: ProcessManager,
        tasks: Tasks,
        faults: NodeFaults,
        looks: Looks,
        staging: StagingArea,
        spread_setup_logs: Callable[[], None],
    ) -> None:
        self._send = send
        self._processes = processes
        self._tasks = tasks
        self._faults = faults
        self._looks = looks
        self._staging = staging
        self._spread_setup_logs = spread_setup_logs
        self.checkpoint: pb.CheckpointSaved | None = None

    def remember(self, saved: pb.CheckpointSaved) -> None:
        """Keep the newest checkpoint of the job in mind, whichever node has published it. The next controller hears of
        it."""
        if saved.version < 0:
            self.checkpoint = None
        elif self.checkpoint is None or saved.version >= self.checkpoint.version:
            self.checkpoint = saved

    def take_in(self, process: WorkerProcess, message: pb.FromWorker) -> None:
        """A worker or a standby has sent this."""
        body = message.WhichOneof("body")
        match body:
            case "warmed":
                self._on_warmed(process)
            case "modules":
                self._on_modules(process, message.modules)
            case "last_words":
                process.hear_last_words(message.last_words)
            case "joined":
                self._on_joined(process, message.joined)
            case "reply":
                self._on_reply(process, message.reply)
            case "done":
                self._on_done(process, message.done)
            case "paused":
                self._on_paused(process, message.paused)
            case "hang_report":
                self._looks.answered(process, message.hang_report)
            case "checkpoint":
                self._on_checkpoint(message.checkpoint)
            case "snapshot":
                self._send(pb.AgentMessage(snapshot=message.snapshot))
            case "notice":
                self._on_notice(message.notice)
            case "staging_wanted":
                self._tasks.start(self._bring(process, message.staging_wanted))
            case None:
                pass  # of a newer version
            case _:
                no_handler(body)

    def _on_warmed(self, process: WorkerProcess) -> None:
        process.has_warmed()
        ready, starting = self._processes.pool.counts()
        self._send(pb.AgentMessage(standby=pb.StandbyCount(ready=ready, starting=starting)))

    def _on_modules(self, process: WorkerProcess, modules: pb.Modules) -> None:
        self._processes.learn(modules)
        if process.rank == 0:
            self._send(pb.AgentMessage(modules=modules))  # for spare nodes

    def _on_joined(self, process: WorkerProcess, joined: pb.Joined) -> None:
        if _counts(process):
            process.has_joined(joined)
            self._spread_setup_logs()
            self._send(pb.AgentMessage(joined=joined))

    def _on_reply(self, process: WorkerProcess, reply: pb.Reply) -> None:
        if _counts(process):
            process.replied(reply)
            self._send(pb.AgentMessage(reply=reply))

    def _on_done(self, process: WorkerProcess, done: pb.Done) -> None:
        if _counts(process):
            process.has_done(done)
            self._send(pb.AgentMessage(done=done))

    def _on_paused(self, process: WorkerProcess, paused: pb.Paused) -> None:
        if _counts(process):
            process.has_paused()
            self._send(pb.AgentMessage(paused=paused))

    def _on_checkpoint(self, saved: pb.CheckpointSaved) -> None:
        self.checkpoint = saved
        self._send(pb.AgentMessage(checkpoint=saved))

    def _on_notice(self, notice: pb.Notice) -> None:
        if notice.kind == NoticeKind.FAULT_FIRED:
            self._faults.fired(notice.rank, notice.fault)
        self._send(pb.AgentMessage(notice=notice))

    async def _bring(self, process: WorkerProcess, wanted: pb.StagingWanted) -> None:
        """Get what a worker of the new layout needs from where the old one's ranks have written it."""
        there = await self._staging.bring(wanted)
        if there is not None:
            process.send(pb.ToWorker(staging_there=there))


def _counts(process: WorkerProcess) -> bool:
    """Whether what ``process`` says still counts: it has neither died nor failed."""
    return not (process.dead or process.failed)

"""The parts of a worker process that live from its start to its end: registry, gate, control, faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.words import shortened
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.terminal import say
from flashrecovery.worker.connection import Connection
from flashrecovery.worker.control.control_thread import Control
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.control.fault_injection import Faults
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.control.quiet_abort import QuietAbort
from flashrecovery.worker.control.unwinding import Unwinding
from flashrecovery.worker.registry import AdapterFactory, ModuleAdapterFactory, Registry

if TYPE_CHECKING:
    from flashrecovery.worker.reshard.relayout import RankStaging

_SHOWN = 8
"""Names in one notice."""


class Worker:
    """The worker of this process.

    Attributes:
        rank: its place in the job, as that was launched.
        members: the ranks of which the job consists now, in order; their places here are their numbers in the groups.
        unwinding: helps a stopped step out of a script that catches its interruption.
        own_staging: of a job whose parallel layout may change, from its first step on.

    Args:
        adapter_for: for a registered model and its optimizers.
        module_adapter_for: for a module without any.
        announce_checkpoint: called by the control thread with a version that is to be saved, generation and launch.
        announce_snapshot: the same with one that is to outlive the job's processes, and generation.
    """

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        adapter_for: AdapterFactory,
        module_adapter_for: ModuleAdapterFactory,
        announce_checkpoint: Callable[[int, int, str], None],
        announce_snapshot: Callable[[int, int], None],
    ) -> None:
        self.connection = connection
        self.settings = settings
        self.rank = connection.assigned.rank
        self.unwinding = Unwinding(self.end_process)
        self.gate = Gate(connection.page, connection.assigned.generation, self.unwinding.interrupts)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.members = tuple(range(world_size))
        self.own_staging: RankStaging | None = None
        limit = settings.rank_local_state_mib << 20
        self.registry = Registry(
            connection.assigned.place, world_size, adapter_for, module_adapter_for, self.rank, limit
        )
        self.faults = Faults(self.notice, connection.page.step_text)
        self.device = DeviceClock()
        self.control = Control(
            connection.channel,
            self.gate,
            settings.timeouts,
            self.device,
            self.faults.arm,
            announce_checkpoint,
            announce_snapshot,
            self.registry.habits.hear,
            self.registry.is_reading,
        )
        groups.use_abort_order(QuietAbort(connection.page), connection.assigned.generation)
        self.control.start()

    def stage_by(self, staging: RankStaging) -> None:
        """The first step begins, in a job whose parallel layout may change."""
        self.own_staging = staging

    def has_members(self, members: tuple[int, ...]) -> None:
        """The job consists of these ranks now."""
        self.members = members

    def send(self, message: pb.FromWorker) -> None:
        """Send ``message`` to the agent."""
        self.connection.channel.send(message)

    def end_process(self, why: str) -> None:
        """End this process, so that it is replaced. ``why``: shown, and reported to the job."""
        text = f"{why}; the process is replaced"
        say(text)
        words = pb.LastWords(exception="flashrecovery.errors.StepInterrupted", message=text)
        self.send(pb.FromWorker(last_words=words))
        os._exit(1)

    def end_if_context_is_lost(self, error: BaseException) -> None:
        """End this process if none of its calls to the device succeeds any more, whatever ``error`` is in which that
        has shown. No error of the script's may be what the job sees, nor may the script catch it and go on."""
        device = groups.lost_context()
        if not device:
            return
        say(f"the device cannot be used any more: {device}; the process is replaced")
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        words = pb.LastWords(exception=name, message=str(error)[:4000], device=device)
        self.send(pb.FromWorker(last_words=words))
        os._exit(1)

    def notice(self, kind: NoticeKind, text: str, fault: pb.Fault | None = None, *, step: int = -1) -> None:
        """Send a notice, which becomes one of the job's events."""
        self.send(pb.FromWorker(notice=pb.Notice(rank=self.rank, kind=kind, text=text, fault=fault, step=step)))

    def tell_own(self, names: list[str]) -> None:
        """Tell that registered objects or settings have turned out to be each rank's own."""
        if names and self.rank == 0:
            text = f"not equal on all ranks: {shortened(names, _SHOWN)}; each rank's own is protected from now on"
            self.notice(NoticeKind.OWN_OBJECTS, text)

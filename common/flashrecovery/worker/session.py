"""A worker before its first step: what the script registers, and how its loop begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashrecovery.capabilities import untested
from flashrecovery.capabilities.of_torch import STEPS, TORCH
from flashrecovery.config import Settings
from flashrecovery.errors import JobFailedError, RegistrationError
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint import published, writer
from flashrecovery.runtime import naming
from flashrecovery.runtime.environment import in_changed_layout
from flashrecovery.worker.connection import Connection
from flashrecovery.worker.consistency import all_equal
from flashrecovery.worker.consistency.start_checks import check_world, check_wrappers, find_own
from flashrecovery.worker.context import Worker
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.data.global_batches import GlobalBatches
from flashrecovery.worker.data.step_data import StepData
from flashrecovery.worker.exit.termination import LeavingNotice
from flashrecovery.worker.local_state.fast_forward import Ahead
from flashrecovery.worker.loop import Loop
from flashrecovery.worker.registry import AdapterFactory, ModuleAdapterFactory, Registry, in_words
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard import elastic_checks

if TYPE_CHECKING:
    from flashrecovery.worker.reshard.relayout import RankStaging


class Session:
    """The set-up of one worker process. :meth:`open` makes the loop, once. For the arguments see
    :class:`.context.Worker`."""

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        adapter_for: AdapterFactory,
        module_adapter_for: ModuleAdapterFactory,
    ) -> None:
        self._loop: Loop | None = None
        self._notice = LeavingNotice(connection.page)
        naming.by_model_rank(settings.elastic is not None)
        self._worker = Worker(
            connection, settings, adapter_for, module_adapter_for, self._announce_checkpoint, self._announce_snapshot
        )
        goes_on = connection.detached or settings.resume
        self._oldest_found = published.oldest(settings.checkpoint.dir) if goes_on and self.has_checkpoints else 0

    @property
    def gate(self) -> Gate:
        return self._worker.gate

    @property
    def ahead(self) -> Ahead:
        """The calls that this process may skip before :meth:`open`."""
        return self._worker.connection.assigned.ahead

    @property
    def void(self) -> bool:
        """See :attr:`.loop.Loop.void`."""
        return self._loop is not None and self._loop.void

    @property
    def begun(self) -> bool:
        """Whether the loop of steps has begun."""
        return self._loop is not None

    @property
    def is_replacement(self) -> bool:
        """See :attr:`.recovery.Recovery.is_replacement`."""
        return self._worker.connection.detached or in_changed_layout()

    @property
    def first_launch(self) -> bool:
        """See :attr:`.recovery.Recovery.first_launch`."""
        return not self.is_replacement and not self.settings.resume

    @property
    def leaving(self) -> bool:
        """See :attr:`.recovery.Recovery.leaving`."""
        return self._notice.has_come or (self._loop is not None and self._loop.loaders_told_to_end)

    @property
    def registry(self) -> Registry:
        return self._worker.registry

    @property
    def settings(self) -> Settings:
        return self._worker.settings

    @property
    def has_checkpoints(self) -> bool:
        """Whether the job writes fallback checkpoints."""
        return self.settings.checkpoint.dir is not None

    @property
    def oldest_checkpoint(self) -> int:
        """The job does not go back further than to this version."""
        if self._loop is None:
            return self._oldest_found
        found = self._oldest_found if self._oldest_found <= self.gate.version else 0  # of another run
        fallback = self._loop.copies.checkpoint
        return found if fallback is None else max(found, fallback.oldest)

    def add_stream(self, stream: StepData) -> None:
        """Raises RegistrationError after the first step: a replacement could not find its place in it."""
        if self._loop is not None:
            raise RegistrationError("recovery.data() after the first step; call it before, once for each data source")
        stream.register_fetch_pre_hook(self._at_data)
        stream.register_fetch_post_hook(self.gate.has_fetched)
        self.registry.streams.append(stream)

    def refuse_streams(self) -> None:
        """Raises UnsupportedError in an elastic job, in which no rank has its own batches."""
        elastic_checks.refuse_streams(self.settings)

    def take_batches(self, batches: GlobalBatches) -> None:
        """Raises RegistrationError after the first step."""
        if self._loop is not None:
            raise RegistrationError("recovery.elastic_batches() after the first step; call it before")
        elastic = self.settings.elastic
        # A changed layout has as many replicas as it begins with.
        batches.join_job(0 if elastic is None or in_changed_layout() else elastic.max, self._at_data)
        self.registry.take_batches(batches)

    def noted(self, name: str, make: Callable[[], str]) -> str | None:
        """See :meth:`.recovery.Recovery.noted`."""
        setup = self._worker.connection.setup
        if self.is_replacement:
            return None if setup is None else setup.record.notes.get(name)
        text = make()
        if setup is not None:
            setup.record.notes[name] = text
        return text

    def at_script_end(self, callback: Callable[[], None]) -> None:
        """Call ``function`` when the script has come to its end, but not when it fails."""
        self._worker.connection.at_script_end.append(callback)

    def count_calls(self, what: str) -> None:
        """Steps are numbered by calls of the script. ``what``: what one is."""
        worker = self._worker
        if worker.rank == 0 and not worker.connection.detached:
            text = f"events, --inject and the tools count {what}; messages name the iteration of its own log, too"
            worker.notice(NoticeKind.STEPS_ARE_CALLS, text)

    def tell_not_registered(self, text: str) -> None:
        """Name what changes and is not brought back. One rank says it: what the ranks have is alike."""
        if self._worker.rank == 0:
            self._worker.notice(NoticeKind.NOT_REGISTERED, text)

    def tell_not_brought_back(self, text: str) -> None:
        """Name what this rank alone changes and is not brought back."""
        self._worker.notice(NoticeKind.NOT_REGISTERED, text)

    def open(self, num_steps: int | None, *, own_calls: bool = True) -> Loop:
        """Called when the script asks for its first step: tell the controller what there is, and wait until the loop
        may begin.

        Args:
            num_steps: None where it is not known how many there are.
            own_calls: without ``num_steps``, the steps are calls (:mod:`.framework_calls`), and the script's end is the
                end of them; else they are rounds of its own loops (:mod:`.own_loops`).

        Raises:
            JobFailedError: the loop has been opened already, or the process group is not the launcher's world.
            RegistrationError: nothing is registered, or it cannot be protected.
            UnsupportedError: this torch lacks something private that is needed, named in the message; or the job is
                elastic, and something in it depends on its size.
        """
        if self._loop is not None:
            raise JobFailedError(
                "recovery.steps() can be run through only once in a process; take the steps of all epochs in one loop: "
                "`for step in recovery.steps(epochs * steps_per_epoch):`, with `epoch = step.index // steps_per_epoch`"
            )
        own_calls = own_calls and num_steps is None
        TORCH.require(STEPS)
        worker, registry = self._worker, self.registry
        registry.close()
        check_wrappers(registry.models)
        check_world(registry.rank, registry.world_size)
        objects, settings = find_own(registry)
        own = [*objects, *map(in_words, settings)]
        if self.settings.elastic is not None:
            elastic_checks.check_start(registry, self.settings, self.settings.elastic, own, single_calls=own_calls)
        if self.settings.parallelism is not None:  # after check_start(), which finds the replicas
            worker.stage_by(_own_staging(worker, own, single_calls=own_calls))
        registry.habits.add_own(objects)
        registry.habits.begin_with_own_settings(settings)
        worker.tell_own(own)
        on_kept = worker.connection.page.set_kept
        copies = Copies(
            registry,
            worker.settings,
            self._checkpoint_published,
            self._checkpoint_failed,
            on_kept,
            lambda text: worker.notice(NoticeKind.REDUNDANCY, text),
            self._snapshot_taken,
        )
        self._loop = Loop(worker, copies, own_calls=own_calls, own_loops=num_steps is None and not own_calls)
        self._loop.adopt_own(all_equal.union(copies.left_own()))
        survival = copies.survival()
        if worker.rank == 0 and not worker.connection.detached:
            worker.notice(NoticeKind.REDUNDANCY, copies.describe())
            if survival:
                worker.notice(NoticeKind.REDUNDANCY, survival)
            if worker.own_staging is not None and worker.own_staging.warning:
                worker.notice(NoticeKind.UNPROTECTED, worker.own_staging.warning)
            if left := registry.not_brought_back():
                self.tell_not_registered(
                    f"in attributes of optimizers, and may change, but cannot be read: {', '.join(left)}. A recovery "
                    "does not bring them back: have numbers or lists in their place (docs/optimizers.md)"
                )
            for text in untested():
                worker.notice(NoticeKind.UNTESTED, text)
        self._loop.join(num_steps)
        return self._loop

    def _at_data(self) -> None:
        """Called when the script asks for a batch."""
        self.gate.check()
        self.gate.fetches()
        self._worker.faults.hit("data", self.gate.version)

    # -- checkpoints ------------------------------------------------------------------------------

    def _announce_checkpoint(self, version: int, generation: int, launch: str) -> None:
        """Called by the control thread with a version that is to be saved, and in which generation of which launch."""
        if self._loop is not None and self._loop.copies.checkpoint is not None:
            self._loop.copies.checkpoint.announce(version, generation, launch)

    def _announce_snapshot(self, version: int, generation: int) -> None:
        """The same with a version that is to outlive the processes of the job."""
        if self._loop is not None:
            self._loop.copies.announce_snapshot(version, generation)

    def _snapshot_taken(self, waited_s: float) -> None:
        if self._worker.rank == 0:  # the others have waited as long, or for others
            self._worker.send(pb.FromWorker(snapshot=pb.SnapshotTaken(waited_s=waited_s)))

    def _checkpoint_published(self, saved: writer.Published) -> None:
        message = pb.CheckpointSaved(
            version=saved.version, path=str(saved.path), seconds=saved.seconds, k0_s=saved.k0_s
        )
        self._worker.send(pb.FromWorker(checkpoint=message))

    def _checkpoint_failed(self, error: BaseException) -> None:
        self._worker.notice(NoticeKind.CHECKPOINT_FAILED, failed_text(self.settings.checkpoint.dir, error))


def _own_staging(worker: Worker, own: Sequence[str], *, single_calls: bool) -> RankStaging:
    """What only a job needs whose parallel layout may change is imported here, before its first step."""
    from flashrecovery.worker.reshard.relayout import RankStaging
    from flashrecovery.worker.reshard.remote_staging import AgentStaging

    control = worker.control
    agent = AgentStaging(worker.send, control.staging_answers, lambda: not control.inbox.empty())
    return RankStaging(worker.registry, worker.settings, own, agent, single_calls=single_calls)


def failed_text(folder: Path | None, error: BaseException) -> str:
    """What has become of a checkpoint, and what is left."""
    newest = None if folder is None else published.newest(folder)
    left = "there is no whole one" if newest is None else f"the newest whole one is of step {newest[0]}"
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return f"nothing was written to {folder} ({why}); {left}; the job trains on"

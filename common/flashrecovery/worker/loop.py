"""A worker's loop: which steps are yielded, and what lies between them.

*Version i is everything as it is when step i is yielded*: what the body of the step before has changed, and what the
script has changed below it. So :meth:`Loop.settle` comes before each yield, and there a version is complete.

A step is ``settle``, ``begin`` .. ``end``. When it is stopped, wherever the training thread is, that unwinds to
``end``, and :mod:`.recovery_commands` carries out the controller's commands until the next ``resume``. Then the script
runs on to the next yield, which takes back what it does on the way (:mod:`.step.discarded_run`).
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from types import FrameType
from typing import NoReturn

from flashrecovery import groups
from flashrecovery.errors import DataEndedError, FlashRecoveryError, RestoreError, StepInterrupted
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime import process_end
from flashrecovery.terminal import say
from flashrecovery.worker.consistency.divergence_check import DivergenceCheck
from flashrecovery.worker.consistency.early_writes import EarlyWriteDetector
from flashrecovery.worker.context import Worker
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.control.interruption import InterruptionClassifier
from flashrecovery.worker.control.nccl_error_watch import NcclErrorWatch
from flashrecovery.worker.control.overhead import Overhead, TimedHooks
from flashrecovery.worker.data.accelerate import check_rest
from flashrecovery.worker.exit.termination import Termination
from flashrecovery.worker.exit.undisturbed import undisturbed
from flashrecovery.worker.local_state.step_profile import IN_ALL_STEPS, UNTIL_RESEALED
from flashrecovery.worker.preimport.preimport_script import imported_so_far
from flashrecovery.worker.recovery_commands import RecoveryExecutor
from flashrecovery.worker.registry import Drawn, Registry
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard.elastic_checks import ElasticRules, StepRules
from flashrecovery.worker.script_checks import join_refusal
from flashrecovery.worker.script_checks.optimizer_watch import OptimizerWatch
from flashrecovery.worker.script_checks.stray_collectives import StrayCollectiveWatch
from flashrecovery.worker.script_checks.unregistered import Unregistered
from flashrecovery.worker.script_text.plain_values import is_kept
from flashrecovery.worker.script_text.post_step_collectives import communicates_below
from flashrecovery.worker.script_text.script_frames import check_loop, texts_of
from flashrecovery.worker.step import activation_release, compilation
from flashrecovery.worker.step import post_step_code as below
from flashrecovery.worker.step.collectives import CollectiveWatch
from flashrecovery.worker.step.device_barrier import DeviceBarrier
from flashrecovery.worker.step.discarded_run import DiscardedRun
from flashrecovery.worker.step.sealing import Sealing
from flashrecovery.worker.step.transaction import Transaction

log = logging.getLogger("flashrecovery")


class Loop:
    """The loop of one worker, from its first step on.

    Args:
        own_calls: the script's loop makes calls (:mod:`.framework_calls`); nothing of it lies between two steps.
        own_loops: its own loops are led back (:mod:`.own_loops`): what lies between two steps is cut short by the error
            of a collective, and no stand-in answers it.
    """

    def __init__(self, worker: Worker, copies: Copies, *, own_calls: bool, own_loops: bool = False) -> None:
        self._own_loops = own_loops
        self.copies = copies
        self.sealing: Sealing[Drawn] = Sealing(worker.registry.habits, _LocalStates(worker.registry, worker.gate))
        self._worker = worker
        self._gate = worker.gate
        if own_calls:
            self._gate.steps_are_calls()
        self._registry = worker.registry
        self._own_calls = own_calls
        self._outside = StrayCollectiveWatch(
            lambda text: worker.notice(NoticeKind.COMMUNICATION_OUTSIDE, text),
            below.is_harmless,
            worker.gate.check,
            calls=own_calls,
        )
        self._termination = Termination(worker.gate.page, lambda: worker.registry.streams)
        patience_s = worker.settings.timeouts.peer_error_wait_s
        self._stops = InterruptionClassifier(
            worker.gate, worker.control, patience_s, lambda: self._termination.has_come
        )
        frameworks = any(adapter.whole_framework for adapter in worker.registry.adapters)
        self._unregistered = None if worker.rank else self._first_to_look(frameworks)  # what they have is alike
        self._optimizers = OptimizerWatch(
            worker.registry.stepping(),
            worker.registry.models,
            lambda: worker.gate.version,
            None if worker.rank else self._tell_not_registered,
        )
        if not frameworks:
            self._optimizers.start()
        self._proving = DivergenceCheck(
            worker.registry,
            self._stops,
            tensors=worker.settings.verify,
            replacement=worker.connection.detached,
        )
        self._collectives = CollectiveWatch()
        self._touches = EarlyWriteDetector(worker.registry)
        for stream in worker.registry.streams if own_calls else ():
            stream.leave_samplers()
        barrier = DeviceBarrier(self._tell_barrier, on=worker.settings.barrier == "auto")
        self._step = Transaction(
            worker, copies, self.sealing, self._touches, self._collectives, self._proving, self._stops, barrier
        )
        self._recoverer = RecoveryExecutor(worker, self)
        self._rules: list[StepRules] = []
        if worker.settings.elastic is not None and worker.registry.batches is not None:
            self._rules.append(ElasticRules(worker.registry, worker.registry.batches))
        if worker.own_staging is not None:
            self._rules.append(worker.own_staging.step_rules())
        self._published = False  # the version that is yielded; its own pre-step copy, too, where touched
        self._unsettled = False  # a version has come about and is not complete yet
        self._committed = False  # ... by a step
        self._together = False  # all ranks have come to the first step of this generation
        self._discarded_run: DiscardedRun | None = None
        self._graphs_since = 0  # where the graphs of this attempt of a step begin
        self._cut_short_by: BaseException | None = None
        self._told_modules = False
        self._bytes_at_join = 0
        self._failing = False
        self._entered = False
        self._num_steps: int | None = None
        self.left = False
        """The rank has left the job."""
        self._from_checkpoint = False
        self._ended_at = 0

    @property
    def gate(self) -> Gate:
        return self._gate

    @property
    def ended_at(self) -> int:
        """After how many calls the scripts of some ranks have come to their end; 0: of none, as far as is known."""
        return self._ended_at

    def scripts_ended(self, calls: int) -> None:
        """The scripts of some ranks have come to their end after this number of calls; 0: of none."""
        self._ended_at = calls

    def restored_from_checkpoint(self) -> None:
        """The state has come from a fallback checkpoint."""
        self._from_checkpoint = True

    def came_from_checkpoint(self) -> bool:
        """Whether the state has come from a fallback checkpoint since this was asked last."""
        came, self._from_checkpoint = self._from_checkpoint, False
        return came

    @property
    def void(self) -> bool:
        """Whether what the script does now belongs to no version: it is below an attempt that does not count, or a
        collective since the step has not been answered by its peers."""
        return self._discarded_run is not None or (self._unsettled and self._cut_short_below)

    @property
    def _cut_short_below(self) -> bool:
        """Whether a collective since the commit of a step was answered by a stand-in, or given up on a device, where
        the script may not have waited for it."""
        if not self._committed:
            return False
        behind = self._worker.device.runs_behind and self._collectives.abandoned_since_commit
        return behind or self._collectives.stood_in_for

    @property
    def loaders_told_to_end(self) -> bool:
        """Whether SIGTERM has ended a worker of one of the data loaders."""
        return self._termination.has_come

    @property
    def outside(self) -> bool:
        """Whether the script is between two steps, and what it does there is done again if it is cut short."""
        return self._gate.stands_in

    @property
    def cut_off(self) -> bool:
        """Whether no peer answers the script's collectives, or soon none will."""
        return self.void or (self._gate.stands_in and self._gate.stopped)

    @property
    def can_go_back(self) -> bool:
        """Whether this rank keeps the state before the step."""
        return self.copies.keeps_undo

    def explains(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a stop. May wait for it."""
        return self._stops.explain(error)

    def saving(self) -> AbstractContextManager[None]:
        """Within it the script writes a checkpoint."""
        return self._gate.saving()

    def stood_in(self) -> None:
        """The script has been given what no peer has said."""
        self._collectives.answered()

    def exchanges(self) -> int:
        """How often the communication of this process has been abandoned."""
        return groups.abandonment_count()

    def _tell_barrier(self, text: str) -> None:
        """What is done before an optimizer's step is alike on all ranks, as far as can be said."""
        if self._worker.rank == 0:
            self._worker.notice(NoticeKind.BARRIER, text, step=self._gate.version)

    def not_saved(self, text: str) -> None:
        """Tell that something was not written."""
        below = self._gate.outside and not self.void
        self._worker.notice(NoticeKind.NOT_SAVED, text, step=self._gate.version - below)

    def _answers(self, elsewhere: bool) -> bool:
        """Whether a stand-in is to answer an operation of this thread (``elsewhere``: of the main thread's, for whose
        future it waits) that has failed between two steps, since a rank has died: what the script does there is done
        again."""
        here = threading.current_thread() is threading.main_thread() and not below.handles_errors()
        if (not elsewhere and not here) or (self._own_loops and not self.void):
            return False
        return self._gate.stands_in and self._stops.wait()

    @property
    def overhead(self) -> Overhead:
        return self._gate.overhead

    def join(self, num_steps: int | None) -> None:
        """Waits until this worker may begin."""
        self._num_steps = num_steps
        self._bytes_at_join = self._registry.host_bytes()
        self._touches.begin()
        for adapter in self._registry.adapters:
            adapter.watch(TimedHooks(self._step, self._gate.overhead))
        self._recoverer.join(num_steps)
        below.watch(self)
        compilation.watch(self._gate.page)
        self._outside.start()
        if not self._own_calls:
            groups.set_between_hook(self._answers)
        NcclErrorWatch(self._gate, self._worker.settings.timeouts.peer_error_wait_s).start()

    # -- a step -----------------------------------------------------------------------------------

    def entered(self, frame: FrameType) -> None:
        """The script has come to ``with step:``, in ``frame``. Raises RegistrationError if steps cannot be yielded
        again to the loop that it is in."""
        if not self._entered and self._gate.generation == 0:  # a replacement's predecessor has been asked
            check_loop(frame)
        if not self._entered and not self._own_calls:
            self._look_ahead(frame)
        self._entered = True
        join_refusal.check(self._registry.joinables)
        if self._unregistered is not None:
            self._unregistered.before_step(frame, self._gate.generation)

    def _look_ahead(self, frame: FrameType) -> None:
        """What the script's text says of its steps. Own copies are kept from the first one on where it will communicate
        below its block."""
        check_rest([stream.loader for stream in self._registry.streams], self._num_steps, lambda: texts_of(frame))
        if self._registry.world_size == 1:
            return
        habits, place = self._registry.habits, communicates_below(frame)
        if place is None or habits.undo:
            return
        habits.hear(IN_ALL_STEPS)
        if self._worker.rank == 0:
            self._step.tell_undo(f"the step communicates below its block, at {place}", IN_ALL_STEPS)

    def begin(self) -> None:
        """The body of a step begins."""
        with self._gate.lock:
            self._gate.body_reached()
            if self._gate.stopped:  # above the block stand-ins have answered since; here something catches errors
                groups.stand_in(False)
        self._between(False)
        if self._gate.stopped:
            groups.watch_outside(True)
        self._graphs_since = activation_release.sequence_number()
        self._step.begin()

    @undisturbed
    def end(self, error: BaseException | None) -> bool:
        """Commit, or recover. Returns True if ``error`` was only the consequence of a stop."""
        self._worker.unwinding.over()
        if error is not None:
            self._step.unwound()
        try:
            return self._end(error)
        finally:
            self._gate.leave_block()

    def _end(self, error: BaseException | None) -> bool:
        if error is None:
            try:
                self._tell_if_data_ended()
                self._commit()
                if self._own_calls:
                    self.settle()
                return True
            except StepInterrupted:
                log.debug("step %d was stopped before its mutation", self._gate.version)
            except RuntimeError as e:  # a communication error of the copies; anything else is raised again
                if not self._stops.explain(e):
                    self._failing = True
                    raise
            except FlashRecoveryError:
                self._failing = True
                raise
        elif not self._stops.explain(error):
            self._failing = True
            self._refuse_end_of_data(error)
            return False
        self._failing = True
        self._cut_short_by = error
        self.recover()
        self._cut_short_by = None
        self._failing = False
        if not self._own_calls:
            self._discarded_run = DiscardedRun(
                self._registry.tensor_shards(), self._registry.streams, self._gate.version
            )
        return True

    def _tell_if_data_ended(self) -> None:
        """The body has taken no optimizer step, and its data has ended: the others may be waiting for this rank in
        theirs, for ever."""
        if not self._gate.mutating and any(stream.ended for stream in self._registry.streams):
            step = self._gate.version
            text = f"the data of rank {self._worker.rank} has ended in {self._gate.page.step_text(step)}"
            self._worker.notice(NoticeKind.DATA_ENDED, text, step=step)

    def _refuse_end_of_data(self, error: BaseException) -> None:
        """Raises DataEndedError if ``error`` is that a stream has ended."""
        ended = any(stream.ended for stream in self._registry.streams)
        if ended and (isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)):
            raise DataEndedError(
                f"recovery.data() of rank {self._worker.rank} has ended in step {self._gate.version}, and the script "
                "asks it for more: give it a loader, which begins its next epoch by itself, or have all ranks agree "
                "on the end (all_reduce a flag in the block) and leave the loop in the same step"
            ) from error

    def _commit(self) -> None:
        """Commit the step. What belongs to the new version may still change until it is yielded; see
        :meth:`settle`."""
        for rules in self._rules:
            rules.check_step(self._gate.version)
        self._step.commit(outside=not self._own_calls)
        self._termination.look()
        self._unsettled = self._committed = True
        self._published = False
        if not self._own_calls:
            self._between(True)
        if not self._told_modules:
            self._tell_modules()
            self._gate.page.set_grown_bytes(max(0, self._registry.host_bytes() - self._bytes_at_join))

    # -- between two steps ------------------------------------------------------------------------

    @undisturbed
    def finished(self, num_steps: int, *, goes_back: bool = False) -> bool:
        """True when all steps are committed on all ranks (waits for the others, and recovers if one of them fails).
        ``goes_back``: False after a recovery, too, since the script then goes to the place of its version."""
        generation = self._gate.generation
        while True:
            self.settle()
            if self._gate.stopped:
                self.recover()
            elif goes_back and self._gate.generation != generation:
                return False
            elif self._gate.paused:
                self._recoverer.pause()
            elif self._gate.version < num_steps:
                if not self._all_have_come():
                    continue
                self._gate.step_yielded()
                if self._own_calls:
                    self._outside.watch(True)
                else:
                    groups.between_steps(True)
                return False
            elif not self._agree_at_the_end():
                continue
            elif self._recoverer.wait_for_release():
                self._close()
                return True

    def _all_have_come(self) -> bool:
        """After a recovery no rank begins a step before all have come to it. A script may leave its loop below a void
        attempt (a replacement's has no ``loss`` yet): then no attempt of its peers is cut short, whose scripts would
        leave theirs in turn. False if a rank has failed meanwhile."""
        if self._together or self._own_calls or not self._proving.due:
            return True
        group = groups.control_group()
        if group is not None:
            try:
                group.barrier().wait()
            except RuntimeError as e:
                if not self._stops.explain(e):
                    raise
                return False
        self._together = True
        return True

    def _between(self, on: bool) -> None:
        """The script's own code below a block begins, or is over."""
        self._outside.watch(on)
        groups.between_steps(on)

    def _agree_at_the_end(self) -> bool:
        """Compare the ranks after the last step. False if another rank has failed meanwhile."""
        if not self._own_calls:
            self._proving.after_the_last_step(self._gate.version)
        return not self._gate.stopped

    def settle(self) -> None:
        """Called before the yield of a step, by which its version becomes complete.

        Plain state is captured here, and what no other rank holds is sent from here. If a collective of the script has
        been answered by a stand-in since the commit, what it has led to belongs to no version.
        """
        if self._discarded_run is not None:
            self._take_back(self._discarded_run)
        below.attempt_is_over()
        if not self._unsettled:
            return
        gate = self._gate
        with gate.overhead:
            if not self._own_calls:
                self._worker.faults.hit("below", gate.version - 1)
            self._between(False)
            gate.leave_outside()
            groups.stand_in(False)
            if self._cut_short_below:
                gate.torn()
            elif self._committed:
                self._complete(gate.version)
            self._unsettled = False
            self._published = not gate.stopped
            if self._published:
                self._yield_version(gate.version)
            self._touches.begin()

    def _complete(self, version: int) -> None:
        """Everything of ``version`` is as it will be yielded."""
        shown = self.sealing.shown(version)
        self._learn(version - 1, late=shown.late, changed=shown.changed)
        self._registry.common.keep(version, self._registry.capture_common(version))
        self.sealing.complete(version, shown)

    def _learn(self, step: int, *, late: bool, changed: bool) -> None:
        quiet = self._step.quiet and not (self._outside.told and not self._own_calls)
        for reason in self._registry.habits.learn(step, quiet=quiet, late=late, changed=changed):
            where = self._gate.page.step_text(step)
            if reason == IN_ALL_STEPS:
                when = "below its block" if self._step.quiet else "after its optimizer has begun to change the state"
                why = f"the step communicates {when}"
            elif reason == UNTIL_RESEALED:
                why = f"in {where} this rank's own state has changed after the forward pass"
            else:
                what = "draws random numbers or data, or changes other state of its rank (counters, train or eval mode)"
                why = f"{where} {what}, after its optimizer step has begun"
            self._step.tell_undo(why, reason)

    def _yield_version(self, version: int) -> None:
        """Publish ``version``. A peer may die while it is copied; then it is not yielded, and a recovery follows."""
        try:
            self._publish(version)
        except RuntimeError as e:
            if self._own_calls or not self._stops.explain(e):
                raise
            self._published = False

    def _publish(self, version: int) -> None:
        """The state is ``version`` and does not change before the next mutation: copies of it may be made."""
        if self._committed:
            self.copies.save_checkpoint_if_due(version, self._gate.generation)
        else:
            local_state = self._registry.local_state.at(version)
            if local_state is not None:
                self._gate.page.write_local_state(version, local_state)
        self.copies.start(version)
        habits = self._registry.habits
        if habits.touched or not habits.known:
            # Of the first step nothing is known yet, so its copy, too, is made before the script can change anything.
            self.copies.enable_undo(brief=not habits.touched)
            self.copies.before_mutation(version)

    def leave_early(self) -> None:
        """The loop has been left, by ``break`` or by an exception (the generator cannot tell which).

        So nothing is waited for here: if every rank leaves, the job is through with its steps; if this process ends
        with its exception, it is a failure like any other.
        """
        if self.void or (self._gate.stopped and self._collectives.stood_in_for):
            self._left_in_discarded_run()
        if not self._failing:
            self._recoverer.tell_done()
            atexit.register(self._close)

    def _left_in_discarded_run(self) -> None:
        """Whatever has led the script to leave in a discarded attempt does not count: its peers do the step again, and
        so will a replacement of this rank."""
        self._worker.end_process("the script left its loop below the block of a step that is done again")

    def _close(self) -> None:
        if process_end.is_fork():
            return
        self._optimizers.stop()
        self.copies.close()

    def leave(self) -> NoReturn:
        """The rank leaves the job: the script ends here, as at its end.

        Raises SystemExit.
        """
        self.left = self._failing = True  # no rank waits for this one's last step
        self._close()
        say("this rank leaves the job, which goes on with fewer")
        sys.exit(0)

    def _tell_modules(self) -> None:
        """Tell the agent what a zygote or a standby should import: all that this process has loaded by the end of its
        first step, and which variables of the environment its script has changed."""
        self._told_modules = True
        watch, outcomes = self._worker.connection.environment_watch, self._worker.connection.import_outcomes
        watch.stop()
        outcomes.stop()
        self._worker.send(pb.FromWorker(modules=imported_so_far(watch.changed, outcomes.told())))

    def _first_to_look(self, frameworks: bool) -> Unregistered:
        kept, tell = _comes_back if self._own_loops else None, self._tell_not_registered
        return Unregistered(self._registry.known(), frameworks, tell, calls=self._own_calls, kept=kept)

    def _tell_not_registered(self, text: str) -> None:
        self._worker.notice(NoticeKind.NOT_REGISTERED, text)

    # -- recovery ---------------------------------------------------------------------------------

    def adopt_own(self, names: Collection[str]) -> bool:
        """These shards have turned out to differ between ranks, and all ranks are informed. Returns whether it is
        new."""
        return self._step.adopt_own(names)

    def recover(self) -> None:
        """Carry out the controller's commands, outside a step, until the next resume."""
        self._recoverer.run()

    def pause(self) -> None:
        """No step begins before the controller's commands have been carried out."""
        self._recoverer.pause()

    def let_go(self) -> None:
        """Free what the attempt that was cut short has left in memory; nothing can touch it any more."""
        if self._cut_short_by is not None:
            count = activation_release.release(self._cut_short_by, self._graphs_since)
            self._cut_short_by = None
            log.debug("%d saved tensors of step %d let go", count, self._gate.version)

    @property
    def touched(self) -> bool:
        """Whether tensors of the shards may have changed since the step was yielded."""
        return (self._registry.habits.touched and self._published) or self._touches.seen()

    @property
    def can_go_back_anywhere(self) -> bool:
        """Whether this rank can also go to a version at which this process has never been: its data can be read again,
        and the script makes no calls that would have to be made then and are skipped here."""
        return not self._own_calls and all(stream.can_be_read_again for stream in self._registry.streams)

    def seal_start(self) -> None:
        """Version 0: what the script has set up."""
        self._registry.common.keep(0, self._registry.capture_common(0))
        self.sealing.start()

    def restore_plain(self, version: int, *, fresh: bool) -> None:
        """Schedulers, random numbers, data position and the like, as they were at ``version``. ``fresh``: the data
        sources stand at their beginning. Raises RestoreError if this rank does not hold them."""
        registry = self._registry
        common, local_state = registry.common.at(version), registry.local_state.at(version)
        if common is None or local_state is None:
            raise RestoreError(f"the plain state of version {version} is missing on rank {self._worker.rank}")
        registry.restore_plain(common, local_state, version, fresh=fresh)
        for shard in (registry.common, registry.local_state):
            shard.drop_after(version)

    def resumed(self) -> None:
        """The state of the version that is to be yielded is there: the script's, or what a recovery has brought."""
        self._unsettled, self._committed = True, False
        self._together = False
        self._proving.resumed(self._gate.version, self._gate.generation)

    def replaced(self) -> None:
        """The tensors of the shards have been replaced by others of the version that is live."""
        self._published = False
        self._touches.begin()

    def discard(self) -> None:
        """What the script does from here to the next yield belongs to no version: it goes to where that version
        is."""
        self._discarded_run = DiscardedRun(self._registry.tensor_shards(), self._registry.streams, self._gate.version)

    def _take_back(self, discarded_run: DiscardedRun) -> None:
        """Take back what the script has done from the end of a discarded attempt to the next yield."""
        self._discarded_run = None
        for adapter in self._registry.adapters:
            adapter.reset()
        discarded_run.take_back()
        self.restore_plain(self._gate.version, fresh=False)
        discarded_run.end()
        self._touches.begin()


def _comes_back(value: object, largest: int) -> bool:
    return is_kept(value, largest=largest)


_KEPT_TWICE = 256 << 10
"""Bytes of a rank-local state up to which it is also kept in this process."""


class _LocalStates:
    """Where rank-local states are kept: in this process, and in the page that outlives it."""

    def __init__(self, registry: Registry, gate: Gate) -> None:
        self._registry = registry
        self._page = gate.page
        self._written: Drawn | None = None

    def drawn(self) -> Drawn:
        return self._registry.drawn()

    def write(self, version: int, drawn: Drawn, *, early: bool) -> None:
        registry, page = self._registry, self._page
        registry.mark_data(version)
        encoded = registry.encode_local_state(drawn, version)
        if encoded.nbytes <= _KEPT_TWICE:
            data = encoded.tobytes()
            registry.local_state.keep(version, data, early=early)
            page.write_local_state(version, data, early=early)
        else:  # copied once, straight into the page
            page.write_local_state(version, encoded.parts, early=early)
            registry.local_state.keep(version, page.stored_local_state(version), early=early)
        self._written = drawn

    def finish(self, version: int) -> None:
        if self._registry.learned_sizes.stale and self._written is not None:  # compiled after it was written
            self.write(version, self._written, early=True)
        end = self._registry.witness(version)
        self._registry.local_state.finish(version, end)
        self._page.finish_local_state(version, end)

"""One worker's part in the job: the step transaction, and the hand-over to recovery when a step is stopped.

*Version i is everything as it is when step i is handed out*: what the body of the step before has changed, and what the
script has changed below it. So :meth:`Session.settle` comes before each hand-out, and there a version is complete.

The training thread runs all of this. A step is ``settle``, ``begin`` .. ``end``; the adapter reports the moments in
between (:class:`~flashrecovery.worker.adapter.StepHooks`). When the step is stopped, wherever the training thread is,
it unwinds to ``end``, and :mod:`.recover` carries out the controller's commands until the next ``resume``. Then the
script runs on to the next hand-out, which takes back what it does on the way (:mod:`.void_run`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import xxhash

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.errors import (
    FlashRecoveryError,
    JobFailedError,
    RegistrationError,
    RestoreError,
    StepInterrupted,
    UnsupportedError,
)
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy import checkpoint
from flashrecovery.runtime.channel import Channel
from flashrecovery.runtime.page import CAPSULE_LIMIT, Page
from flashrecovery.state.digest import shard_digest
from flashrecovery.worker import agreement, proof
from flashrecovery.worker.control import Control
from flashrecovery.worker.copies import Copies, anywhere
from flashrecovery.worker.data import DataStream
from flashrecovery.worker.device import DeviceClock
from flashrecovery.worker.faults import Faults
from flashrecovery.worker.gate import Gate
from flashrecovery.worker.outside import OutsideWatch
from flashrecovery.worker.overhead import TimedHooks
from flashrecovery.worker.recover import Recoverer
from flashrecovery.worker.registry import Drawn, Registry
from flashrecovery.worker.void_run import VoidRun

log = logging.getLogger("flashrecovery")

_LONGEST_PAUSE_S = 0.1
"""A thread that sleeps for a millisecond on a busy host is back by then."""

COMPARED_BYTES = 4 << 30
"""Up to so much state is compared by content in the first step."""

IN_ALL_STEPS, UNTIL_RESEALED, TOUCHED = -1, -2, -3
"""Why a peer is to keep own pre-step copies, if not because a certain step was late."""


class Connection:
    """What the bootstrap has set up before the script runs. ``at_script_end``: it calls these when the script has ended
    well."""

    def __init__(self, channel: Channel, page: Page, rank: int, generation: int, detached: bool) -> None:
        self.channel = channel
        self.page = page
        self.rank = rank
        self.generation = generation
        self.detached = detached
        self.at_script_end: list[Callable[[], None]] = []


class Session:
    """Implements StepHooks for the adapters."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        from flashrecovery.torch_native import ModuleAdapter, adapter_for

        self.connection = connection
        self.settings = settings
        self.rank = connection.rank
        self.gate = Gate(connection.page)
        self.gate.generation = connection.generation
        self.registry = Registry(self.rank, _world_size_env(), adapter_for, ModuleAdapter)
        self.faults = Faults(self.notice)
        self.device = DeviceClock()
        self.control = Control(
            connection.channel,
            self.gate,
            settings.timeouts,
            self.device,
            self.faults.arm,
            self._announce_checkpoint,
            self._keep_undo,
        )
        self.copies: Copies | None = None
        self._recoverer: Recoverer | None = None
        self._outside = OutsideWatch(lambda text: self.notice("communication_outside", text))
        self._written: Drawn | None = None  # what the capsule in the page says, of this step
        self._at_seal: Drawn | None = None  # the same at the end of the forward pass ...
        self._at_mutation: Drawn | None = None  # ... and when the mutation begins
        self._ops_at_mutation = 0
        self._abandonments_before = 0
        self._quiet = True  # nothing was communicated after that
        self._failures_before = 0
        self._raised_before = 0
        self._stand_ins_before = 0
        self._published = False  # the version that is handed out; its own pre-step copy, too, where touched
        self._untouched: list[Any] = []  # the adapters' marks of the shards' tensors when the step was handed out
        self._own_calls = False  # the script's own loop makes calls; nothing of it lies between two steps
        self._unsettled = False  # a version has come about and is not complete yet
        self._committed = False  # ... by a step
        self._proof_due = False  # the next step is the first one after a recovery
        self._went_on_at = -1  # the version of that; -1: there was no recovery
        self._void_run: VoidRun | None = None
        self.late_versions: dict[
            int, bool
        ] = {}  # whether the capsule was another one in the end than it had been early
        self._hook_fired = False
        self._explicit_barrier = False
        self._told_modules = False
        self._failing = False
        self.control.start()

    # -- the loop ---------------------------------------------------------------------------------

    def add_stream(self, stream: DataStream) -> None:
        """Raises RegistrationError after the first step: a replacement could not find its place in it."""
        if self._recoverer is not None:
            raise RegistrationError("recovery.data() after the first step; call it before, once for each data source")
        stream.before_fetch = self._at_data
        self.registry.streams.append(stream)

    def open(self, num_steps: int | None) -> None:
        """First step asked for: say what there is, and wait for the word to begin. ``num_steps``: None where the
        script's end is the end of the steps."""
        if self._recoverer is not None:
            raise JobFailedError(
                "recovery.steps() can be run through only once in a process; take the steps of all epochs in one loop: "
                "`for step in recovery.steps(epochs * steps_per_epoch):`, with `epoch = step.index // steps_per_epoch`"
            )
        self._own_calls = num_steps is None
        self.registry.close()
        self._check_world()
        self._compare_objects()
        on_kept = self.connection.page.set_kept
        self.copies = Copies(self.registry, self.settings, self._checkpoint_published, self._checkpoint_failed, on_kept)
        self._explicit_barrier = self._needs_barrier(self.copies)
        self._recoverer = Recoverer(self)
        self._untouched = self._touch_marks()
        for adapter in self.registry.adapters:
            adapter.watch(TimedHooks(self, self.gate.overhead))
        if self.rank == 0 and not self.connection.detached:
            self.notice("redundancy", self.copies.describe())
        self._recoverer.join(num_steps)

    def finished(self, num_steps: int) -> bool:
        """True when all steps are committed on all ranks (waits for the others, and recovers if one of them fails)."""
        assert self._recoverer is not None
        while True:
            self.settle()
            if self.gate.stopped:
                self.recover()
            elif self.gate.version < num_steps:
                self.gate.above = True
                self._outside.watch(True)
                return False
            elif not self._agree_at_the_end():
                continue
            elif self._recoverer.wait_for_release():
                self._close()
                return True

    def _agree_at_the_end(self) -> bool:
        """After the last step. False if another rank has failed meanwhile."""
        if self._went_on_at >= 0 and not self._own_calls:
            self._show_equal(self.gate.version, since=self._went_on_at)
        return not self.gate.stopped

    def recover(self) -> None:
        """Carry out the controller's commands, outside a step, until the next resume."""
        assert self._recoverer is not None
        self._recoverer.run()

    def resumed(self) -> None:
        """The state of the version that is to be handed out is there: the script's, or what a recovery has brought.

        The generation decides whether the next step is proved, for it is equal on all ranks. How a rank came here is
        not: a recovery may find one rank in its first step, and another one still waiting for the word to begin.
        """
        self._unsettled, self._committed, self._proof_due = True, False, self.gate.generation > 0
        self._went_on_at = self.gate.version if self._proof_due else -1

    def settle(self) -> None:
        """Before the hand-out of a step: now its version is complete.

        Plain state is captured here, and what nobody else holds is sent from here. If a collective of the script has
        been answered by a stand-in since the commit, what it has led to is nobody's version.
        """
        if self._void_run is not None:
            self._take_back(self._void_run)
        if not self._unsettled:
            return
        with self.gate.overhead:
            if not self._own_calls:
                self.faults.hit("below", self.gate.version - 1)
            self._outside.watch(False)
            spoiled = self._leave_outside()
            if self._committed and spoiled:
                self.gate.torn()
            elif self._committed:
                self._complete(self.gate.version)
            self._unsettled = False
            self._published = not self.gate.stopped
            if self._published:
                self._publish(self.gate.version)
            self._untouched = self._touch_marks()

    @property
    def can_go_back_anywhere(self) -> bool:
        """Whether also to a version at which this process has never been: its data can be read again, and no call of
        the script is skipped here that would have to be made then."""
        return not self._own_calls and all(stream.can_be_read_again for stream in self.registry.streams)

    @property
    def touched(self) -> bool:
        """Whether tensors of the shards may have changed since the step was handed out."""
        return (self.registry.habits.touched and self._published) or self._marks_moved()

    def _marks_moved(self) -> bool:
        return self._untouched != self._touch_marks()

    def _touch_marks(self) -> list[Any]:
        marks = [a.touch_mark() for a in self.registry.adapters]
        if not self.registry.habits.known:
            # Once also by content: what a script writes by way of `.data` advances no version counter.
            tensors = [t for shard in self.registry.tensor_shards() for t in shard.tensors().values()]
            if sum(t.nbytes for t in tensors) <= COMPARED_BYTES:
                marks.append(shard_digest(tensors))
        return marks

    def _leave_outside(self) -> bool:
        """Whether a stand-in has answered a collective since the commit."""
        self.gate.leave_outside()
        groups.stand_in(False)
        return groups.stand_in_count() != self._stand_ins_before

    def _complete(self, version: int) -> None:
        """Everything of ``version`` is as it will be handed out."""
        registry = self.registry
        now = registry.drawn()
        habits = registry.habits
        before = self._at_mutation if habits.reseal else self._at_seal
        self.late_versions = {v: late for v, late in self.late_versions.items() if v > version - 3}
        self.late_versions[version] = now != before
        self._learn(version - 1, late=now != self._at_mutation, changed=self._at_mutation != self._at_seal)
        registry.common.keep(version, registry.capture_common(version))
        if self._written == now:
            end = registry.witness(version)
            registry.capsule.finish(version, end)
            self.gate.page.finish_capsule(version, end)
        else:
            self._seal(version, now, early=False)

    def _publish(self, version: int) -> None:
        """The state is ``version`` and does not change before the next mutation: copies of it may be made."""
        assert self.copies is not None
        if self._committed:
            self.copies.save_checkpoint_if_due(version, self.gate.generation)
        else:
            capsule = self.registry.capsule.at(version)
            if capsule is not None:
                self.gate.page.write_capsule(version, capsule)
        self.copies.start(version)
        habits = self.registry.habits
        if habits.touched or not habits.known:
            # Of the first step nothing is known yet, so its copy, too, is made before the script can change anything.
            self.copies.enable_undo(brief=not habits.touched)
            self.copies.before_mutation(version)

    def restore_plain(self, version: int, *, fresh: bool) -> None:
        """Schedulers, random numbers, data position and the like, as they were at ``version``. ``fresh``: the data
        sources stand at their beginning. Raises RestoreError if this rank does not hold them."""
        registry = self.registry
        common, capsule = registry.common.at(version), registry.capsule.at(version)
        if common is None or capsule is None:
            raise RestoreError(f"the plain state of version {version} is missing on rank {self.rank}")
        registry.restore_plain(common, capsule, version, fresh=fresh)
        for shard in (registry.common, registry.capsule):
            shard.drop_after(version)

    def _take_back(self, void_run: VoidRun) -> None:
        """The script has run on to the next hand-out after a void attempt; nothing of that counts."""
        self._void_run = None
        for adapter in self.registry.adapters:
            adapter.reset()
        void_run.take_back()
        self.restore_plain(self.gate.version, fresh=False)
        void_run.end()

    def at_script_end(self, callback: Callable[[], None]) -> None:
        """Call it when the script has come to its end, not when it fails."""
        self.connection.at_script_end.append(callback)

    def leave_early(self) -> None:
        """The loop has been left, by ``break`` or by an exception (the generator cannot tell which).

        So nothing is waited for here: if every rank leaves, the job is through with its steps; if this process ends
        with its exception, it is a failure like any other.
        """
        assert self._recoverer is not None
        if self._void_run is not None:
            self._left_in_void_run()
        if not self._failing:
            self._recoverer.tell_done()
            atexit.register(self._close)

    def _left_in_void_run(self) -> None:
        """What has led the script to leave is nobody's result; its peers do the step again. So will a replacement."""
        text = "the script left its loop below the block of a step that is done again; the process is replaced"
        print(f"flashrecovery: {text}", file=sys.stderr, flush=True)
        words = pb.LastWords(exception="flashrecovery.errors.StepInterrupted", message=text)
        self.connection.channel.send(pb.FromWorker(last_words=words))
        os._exit(1)

    def _close(self) -> None:
        if self.copies is not None:
            self.copies.close()

    def begin(self) -> None:
        """Tag i. A stop that comes just before is noticed in the body, at the latest at its commit."""
        self.gate.above = False
        self._outside.watch(False)
        self._written = self._at_seal = self._at_mutation = None
        self._hook_fired = False
        self._failures_before = groups.failure_count()
        self._raised_before = groups.raised_count()
        self.faults.hit("between", self.gate.version)
        self.registry.look_closely(self._looks_closely(self.gate.version))
        self.gate.in_block = True
        self.gate.begin()
        self.faults.begin_step(self.gate.version, self.registry.adapters)

    def _looks_closely(self, version: int) -> bool:
        """Whether rank-only state is compared by content in this step, to learn what of it changes without a sign."""
        learned = self.registry.habits.known and not self._proof_due
        return not learned or proof.is_due(version) or (self.copies is not None and self.copies.saves(version + 1))

    def end(self, error: BaseException | None) -> bool:
        """Commit, or recover. Returns True if ``error`` was only the sign of a stop."""
        try:
            return self._end(error)
        finally:
            self.gate.in_block = False

    def _end(self, error: BaseException | None) -> bool:
        if error is None:
            try:
                self._commit()
                if self._own_calls:
                    self.settle()
                return True
            except StepInterrupted:
                log.debug("step %d was stopped before its mutation", self.gate.version)
            except RuntimeError as e:  # a communication error of the copies; anything else is raised again
                if not self._is_stop(e):
                    self._failing = True
                    raise
            except FlashRecoveryError:
                self._failing = True
                raise
        elif not self._is_stop(error):
            self._failing = True
            return False
        self._failing = True
        self.recover()
        self._failing = False
        if not self._own_calls:
            self._void_run = VoidRun(self.registry.tensor_shards(), self.gate.version)
        return True

    def _is_stop(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a stop (or the first sign of one), and not the script's own."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return False
        return self.gate.stopped or self._stop_follows(error)

    def _stop_follows(self, error: BaseException) -> bool:
        """A failed collective is mostly a dead peer's: the controller is about to say stop."""
        seen: BaseException | None = error
        while seen is not None and not groups.is_communication_error(seen):
            seen = seen.__cause__ or seen.__context__
        if seen is None:
            return False
        self.connection.channel.send(pb.FromWorker(suspect=pb.Suspect(error=str(seen))))
        return self._wait_for_stop()

    def _wait_for_stop(self) -> bool:
        """Whether the stop comes in time. The clock stands while nobody could say it: while the agent hears no
        controller, and while this process is halted with its whole node (which one long pause in here shows). It also
        stands once the controller has said hold: what it waits for until the stop has deadlines of its own."""
        left_s, last = self.settings.timeouts.peer_error_wait_s, time.monotonic()
        while not self.gate.stopped and left_s > 0:
            time.sleep(0.001)
            now = time.monotonic()
            if self.control.controller_heard and not self.gate.held:
                left_s -= min(now - last, _LONGEST_PAUSE_S)
            last = now
        return self.gate.stopped

    # -- StepHooks --------------------------------------------------------------------------------

    def sealed(self, *, recheck: bool = False) -> None:
        """Forward is over: publish the capsule of version i+1, and see that the copies of version i are complete."""
        assert self.copies is not None
        if not self.gate.in_block:
            return  # the script calls its model between two steps
        self.gate.check()
        self.gate.page.beat()
        self._hook_fired = True
        now = self.registry.drawn()
        if recheck and now == self._at_seal:
            return
        self._at_seal = now
        if self.registry.habits.seals_early:
            self._seal(self.gate.version + 1, now, early=True)
        self.copies.wait()

    def mutating(self) -> None:
        """Before the first mutation of a step."""
        assert self.copies is not None
        if self.gate.mutating:
            return
        if not self.gate.in_block:
            raise UnsupportedError("optimizer.step() outside of `with step:`; move it into the block")
        self.gate.overhead.aside(self.device.before_mutation)
        self._refuse_failed_collectives()
        self.gate.check()
        version = self.gate.version
        self.faults.hit("optimizer-start", version)
        self._before_mutation(version, seen_forward=self._hook_fired)
        self._ops_at_mutation = groups.operation_count()
        self._abandonments_before = groups.abandonment_count()
        self.gate.mutate()

    def _before_mutation(self, version: int, *, seen_forward: bool) -> None:
        """Everything that must be in place on all ranks before any of them changes its state."""
        assert self.copies is not None
        habits = self.registry.habits
        if not seen_forward:
            # The adapter has seen no forward pass: nothing yet says that every rank has come this far.
            self.sealed()
        touched = self._marks_moved()
        if touched and not habits.touched:
            habits.touched = True
            self._tell_undo(f"step {version} changes registered tensors before its mutation", TOUCHED)
        now = self._at_mutation = self.registry.drawn()
        sealed = habits.seals_early
        if sealed and self._written != now:
            self._seal(version + 1, now, early=True)
        if self.copies.capsules_only:
            # What is sealed goes to another node, before anybody can need it.
            self.copies.send_capsule(version + 1, sealed=sealed)
        # The step in which all begin to seal again was not sealed itself.
        needs_undo = habits.needs_undo
        if proof.is_due(version):
            if self._compare_habits():
                self._seal_more(version + 1, sealed)
        elif not seen_forward or self._explicit_barrier or habits.reseal:
            self._barrier()
        if needs_undo or habits.needs_undo:
            self.copies.enable_undo(brief=not habits.known)
        else:
            self.copies.disable_undo()
        self.copies.before_mutation(version, touched=touched)

    def _compare_habits(self) -> list[str]:
        """A barrier, too. Returns what belongs to the capsule only from now on, the same on all ranks: objects that are
        each rank's own, buffers that change unseen."""
        known = self.registry.habits.silent
        try:
            with self.gate.in_barrier():
                differing = proof.compare_habits(self.registry)
        except RuntimeError as e:
            if not self._is_stop(e):
                raise
            self.gate.check()
            return []
        self._tell_own(differing)
        silent = sorted({*self.registry.habits.silent} - {*known})
        self._tell_silent(silent)
        return [*differing, *silent]

    def _seal_more(self, version: int, sealed: bool) -> None:
        """More has just turned out to belong to the capsule. What this step has sealed does not have it yet, so it is
        sealed once more, on every rank before any of them changes its state."""
        assert self.copies is not None
        unchanged = self._at_seal == self._at_mutation
        now = self._at_mutation = self.registry.drawn()
        if unchanged:
            self._at_seal = now
        if sealed:
            self._seal(version, now, early=True)
        if self.copies.capsules_only:
            self.copies.send_capsule(version, sealed=sealed)
        else:
            self._barrier()

    def _tell_silent(self, silent: list[str]) -> None:
        if silent and self.rank == 0:
            names = sorted(name.partition("/")[2] for name in silent)
            self.notice("silent_buffers", f"{names} are changed by way of .data; they are compared in every step now")

    def _tell_own(self, names: list[str]) -> None:
        if names and self.rank == 0:
            self.notice("own_objects", f"{names} are not equal on all ranks; each rank's own is protected from now on")

    def mutated(self) -> None:
        """Kept for adapters: the optimizers are done; the commit follows at the end of the step."""

    def _seal(self, version: int, drawn: Drawn, *, early: bool) -> None:
        self.registry.mark_data(version)
        data = self.registry.capture_capsule(drawn)
        self.registry.capsule.keep(version, data, early=early)
        self.gate.page.write_capsule(version, data, early=early)
        self._written = drawn

    def seal_start(self) -> None:
        """Version 0: what the script has set up."""
        self.registry.common.keep(0, self.registry.capture_common(0))
        self._seal(0, self.registry.drawn(), early=False)

    def _compare_objects(self) -> None:
        """Which registered objects differ between the ranks from the start; a collective.

        Raises:
            RegistrationError: they are too large to be each rank's own; or the ranks' optimizers are set differently,
                and a replacement would be given another rank's settings.
        """
        registry = self.registry
        states = registry.shared_states()
        settings = {f"model {number}": state for number, state in enumerate(registry.adapter_states())}
        everything = [*states.items(), *settings.items()]
        differing = agreement.unequal({name: xxhash.xxh3_128_hexdigest(state) for name, state in everything})
        if unlike := [name for name in differing if name in settings]:
            raise RegistrationError(
                f"the hyper-parameters (learning rate, weight decay, ...) and other settings of {', '.join(unlike)} "
                "(counted by register()) are not equal on all ranks, and a replacement is given another rank's. Make "
                "them equal: the same parameter groups with the same settings everywhere"
            )
        size = sum(len(states[name]) for name in differing)
        if size > CAPSULE_LIMIT // 2:
            raise RegistrationError(
                f"the registered objects {differing} are not equal on all ranks and take {size:,} bytes; at most "
                f"{CAPSULE_LIMIT // 2:,} bytes of a rank's own can be kept. Make them equal, or keep large parts out "
                "of their state_dict()"
            )
        registry.habits.own = sorted({*registry.habits.own, *differing})
        self._tell_own(differing)

    def _needs_barrier(self, copies: Copies) -> bool:
        """Whether the gradient synchronisation is not enough before the first mutation. A collective.

        Who leaves it knows that all ranks have sealed, not that all can leave it: what the dead rank still had to send
        to one of them is lost. That rank then stays a version behind, which is harmless only if whoever is ahead has
        all of its shards, or can go back.
        """
        registry = self.registry
        everywhere = all(len(s.holders) == registry.world_size for s in registry.tensor_shards())
        apart = anywhere(not everywhere) and not copies.keeps_undo
        # Who passes it knows that every rank's capsule has arrived.
        apart = apart or copies.capsules_only
        return registry.world_size > 1 and (apart or not all(a.sync_spans_world() for a in registry.adapters))

    def _barrier(self) -> None:
        """Nobody passes it before all have come. If a peer dies in it and another rank has passed it, so may this one.

        Raises what says that the step is void.
        """
        group = groups.control_group()
        if group is None:
            return
        try:
            with self.gate.in_barrier():
                group.barrier().wait()
        except RuntimeError as e:
            if not self._is_stop(e):
                raise
            self.gate.check()

    def _commit(self) -> None:
        """Tag i+1. What belongs to version i+1 may still change until it is handed out; see :meth:`settle`."""
        assert self.copies is not None
        version = self.gate.version
        self.faults.hit("commit", version)
        self.gate.check()
        if self.gate.mutating:
            self._quiet = groups.operation_count() == self._ops_at_mutation
            if not self._quiet:
                self.gate.overhead.aside(self.device.before_commit)
            self._refuse_torn()
        else:
            # Nothing in such a step says that all ranks have come this far, with the copies of its version.
            self._refuse_failed_collectives()
            self.copies.wait()
            self._before_mutation(version, seen_forward=False)
            self._quiet = True
        if self._proof_due:
            self._show_equal(version + 1)
        elif self._went_on_at >= 0 and proof.goes_on(version + 1, self._went_on_at):
            self._show_equal(version + 1, since=self._went_on_at)
        with self.gate.lock:
            go_on = self.gate.commit(outside=not self._own_calls)
            self._stand_ins_before = groups.stand_in_count()
            if not go_on:
                groups.stand_in(not self._own_calls)
        self._unsettled = self._committed = True
        self._published = False
        self._proof_due = False
        if not self._own_calls:
            self._outside.watch(True)
        if not self._told_modules:
            self._tell_modules()

    def _show_equal(self, version: int, since: int | None = None) -> None:
        """Do all ranks agree, in the first step after a recovery, and later (``since``)? If another dies meanwhile, the
        next recovery asks."""
        try:
            proof.show_equal(self.registry, version, tensors=self.settings.verify, since=since)
        except RuntimeError as e:
            if not self._is_stop(e):
                raise

    def _refuse_torn(self) -> None:
        """A collective has failed while the state was changing, and the step's body has not heard of it: it has
        swallowed the error, or the collective has been aborted on a device."""
        abandoned = groups.abandonment_count() != self._abandonments_before
        cut_short = self.device.runs_behind and abandoned and not self._quiet
        if groups.raised_count() == self._raised_before and not cut_short:
            return
        if not self.gate.stopped and not self._wait_for_stop():
            raise JobFailedError(
                f"a collective failed in step {self.gate.version} after its mutation had begun, and the step's body "
                "swallowed the error"
            )
        self.gate.torn()
        raise StepInterrupted

    def _refuse_failed_collectives(self) -> None:
        """A step in which a collective failed is void, also if its body has swallowed the error."""
        if groups.failure_count() == self._failures_before or self.gate.stopped:
            return
        if not self._wait_for_stop():
            raise JobFailedError(
                f"a collective failed in step {self.gate.version}, and the step's body swallowed the error"
            )
        self.gate.check()

    def _learn(self, step: int, *, late: bool, changed: bool) -> None:
        """What ``step`` has shown.

        Args:
            late: this rank's own state has changed after the mutation had begun.
            changed: it has changed between the forward pass and the mutation. Until all ranks seal again there (see
                :func:`~flashrecovery.worker.proof.compare_habits`), such steps are late, too.
        """
        habits = self.registry.habits
        habits.known = True
        if not self._quiet and not habits.undo:
            habits.undo = True
            self._tell_undo("the step communicates after its mutation has begun", IN_ALL_STEPS)
        if changed and not habits.reseal and not habits.changed:
            habits.changed = True
            self._tell_undo(f"in step {step} this rank's own state has changed after the forward pass", UNTIL_RESEALED)
        if late and not habits.late:
            habits.late = True
            self._tell_undo(
                f"step {step} draws random numbers or data, or changes other state of its own rank, late", step
            )

    def _tell_undo(self, why: str, step: int) -> None:
        self.notice("undo_enabled", f"{why}; an own pre-step copy is kept from now on", step=step)

    def _keep_undo(self, step: int) -> None:
        """From the control thread: another rank's steps need it."""
        habits = self.registry.habits
        if step == IN_ALL_STEPS:
            habits.undo = True
        elif step == UNTIL_RESEALED:
            habits.changed = True
        elif step == TOUCHED:
            habits.touched = True
        else:
            habits.late = True

    # -- messages ---------------------------------------------------------------------------------

    def notice(self, kind: str, text: str, fault: pb.Fault | None = None, *, step: int = -1) -> None:
        """Something that belongs into the events."""
        message = pb.Notice(rank=self.rank, kind=kind, text=text, fault=fault, step=step)
        self.connection.channel.send(pb.FromWorker(notice=message))

    def _announce_checkpoint(self, version: int) -> None:
        """From the control thread."""
        if self.copies is not None and self.copies.checkpoint is not None:
            self.copies.checkpoint.announce(version)

    def _checkpoint_published(self, saved: checkpoint.Published) -> None:
        message = pb.CheckpointSaved(
            version=saved.version, path=str(saved.path), seconds=saved.seconds, k0_s=saved.k0_s
        )
        self.connection.channel.send(pb.FromWorker(checkpoint=message))

    def _checkpoint_failed(self, error: BaseException) -> None:
        self.notice("checkpoint_failed", f"{type(error).__name__}: {error}")

    def _tell_modules(self) -> None:
        """What a standby should import: all that this process has loaded by the end of its first step."""
        self._told_modules = True
        names = [n for n, m in list(sys.modules.items()) if m is not None and not n.startswith("__")]
        self.connection.channel.send(pb.FromWorker(modules=pb.Modules(names=names)))

    def next_command(self) -> pb.Command:
        """Waits for the next command that the training thread has to carry out."""
        return self.control.inbox.get()

    def _at_data(self) -> None:
        self.gate.check()
        self.gate.page.beat()
        self.faults.hit("data", self.gate.version)

    def _check_world(self) -> None:
        """The process group must be the world that the launcher started. Raises JobFailedError."""
        if not dist.is_initialized():
            if self.registry.world_size > 1:
                raise JobFailedError(
                    f"WORLD_SIZE is {self.registry.world_size} but torch.distributed is not initialised; "
                    "call init_process_group() before recovery.steps()"
                )
            return
        if dist.get_rank() != self.rank or dist.get_world_size() != self.registry.world_size:
            raise JobFailedError(
                f"the process group says rank {dist.get_rank()} of {dist.get_world_size()}, the launcher rank "
                f"{self.rank} of {self.registry.world_size}; use init_process_group() with the launcher's environment"
            )


def _world_size_env() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))

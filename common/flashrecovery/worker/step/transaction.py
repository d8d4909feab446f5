"""One step, from its begin to its commit: what must be in place on all ranks before any of them changes its state, and
what makes a step void.

The adapter reports the moments in between (:class:`~flashrecovery.contract.adapter.StepHooks`). All of this runs in the
training thread.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch.optim import Optimizer

from flashrecovery import groups
from flashrecovery.contract.adapter import StepHooks
from flashrecovery.errors import JobFailedError, StepInterrupted, UnsupportedError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.device_barrier import StepFacts, step_needs_host
from flashrecovery.plan.words import shortened
from flashrecovery.worker.consistency import divergence_check
from flashrecovery.worker.consistency.divergence_check import DivergenceCheck
from flashrecovery.worker.consistency.early_writes import EarlyWriteDetector
from flashrecovery.worker.context import Worker
from flashrecovery.worker.control.interruption import InterruptionClassifier
from flashrecovery.worker.local_state.step_profile import TOUCHED
from flashrecovery.worker.registry import Drawn, in_words
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.replication.policy import anywhere
from flashrecovery.worker.reshard.elastic_checks import refuse_unequal
from flashrecovery.worker.step.collectives import CollectiveWatch
from flashrecovery.worker.step.device_barrier import DeviceBarrier
from flashrecovery.worker.step.sealing import Sealing

_SHOWN = 3
_UNDO = "from now on each rank copies its state before a step, so that it can go back (memory for one more copy of it)"


class Transaction(StepHooks):
    """The step that is under way, one after another.

    Attributes:
        quiet: nothing was communicated after the last mutation had begun.
    """

    def __init__(
        self,
        worker: Worker,
        copies: Copies,
        sealing: Sealing[Drawn],
        touches: EarlyWriteDetector,
        collectives: CollectiveWatch,
        proving: DivergenceCheck,
        stops: InterruptionClassifier,
        barrier: DeviceBarrier,
    ) -> None:
        self.quiet = True
        self._worker = worker
        self._gate = worker.gate
        self._registry = worker.registry
        self._habits = worker.registry.habits
        self._copies = copies
        self._sealing = sealing
        self._touches = touches
        self._collectives = collectives
        self._proving = proving
        self._stops = stops
        self._on_device = barrier
        self._hook_fired = self._copied = False
        everywhere = all(len(s.holders) == self._registry.world_size for s in self._registry.tensor_shards())
        self._explicit_barrier = self._needs_barrier(apart=anywhere(not everywhere))

    def begin(self) -> None:
        """Tag i. A stop that comes just before is noticed in the body, at the latest at its commit."""
        version = self._gate.version
        self._sealing.step_begins()
        self._collectives.step_begins()
        self._hook_fired = self._copied = False
        self._worker.faults.hit("between", version)
        self._registry.look_closely(self.looks_closely(version))
        self._gate.enter_block()
        self._gate.begin()
        self._worker.faults.begin_step(version, self._registry.adapters)

    def looks_closely(self, version: int) -> bool:
        """Whether rank-only state is compared by content in this step, to learn what of it changes without a sign."""
        learned = self._habits.known and not self._proving.due
        return not learned or divergence_check.is_due(version) or self._copies.saves(version + 1)

    # -- StepHooks --------------------------------------------------------------------------------

    def sealed(self, *, recheck: bool = False) -> None:
        """The forward pass is over: publish the rank-local state of version i+1."""
        self._gate.forward_ended()
        if not self._gate.in_block:
            return  # the script calls its model between two steps
        self._gate.check()
        self._hook_fired = True
        self._sealing.forward_ends(self._gate.version + 1, recheck=recheck)

    def evaluated(self) -> None:
        """That is progress: an evaluation of many batches is no hang."""
        self._gate.forward_ended()

    def synchronising(self) -> None:
        """The copies of version i are complete before anybody can know that all ranks have come this far."""
        if self._gate.in_block and not self._copied:
            self._copies.wait()
            self._copied = True

    def mutating(self, by: Optimizer | None = None) -> None:
        """Before the first mutation of a step. That of ``by`` may be launched before the gradients are whole."""
        if self._gate.mutating:
            return
        if not self._gate.in_block:
            raise UnsupportedError("optimizer.step() outside of `with step:`; move it into the block")
        if self._on_device.holding:
            self.launched()
            return
        if by is not None and self._on_device.guards(by) and not step_needs_host(self._facts()):
            self._hold_back(by)
            return
        self._gate.overhead.aside(self._worker.device.before_mutation)
        self._refuse_void()
        version = self._gate.version
        self._worker.faults.hit("optimizer-start", version)
        self._before_mutation(version, seen_forward=self._hook_fired)
        self._collectives.mutation_begins()
        self._gate.mutate()

    def _facts(self) -> StepFacts:
        """What there is to do before the state of this step may change."""
        habits = self._habits
        told = divergence_check.is_due(self._gate.version) or self._proving.due or self._copies.local_states_only
        return StepFacts(
            communicates=told or self._barrier_is_due(seen_forward=self._hook_fired, copied=self._copied),
            touched=habits.touched or self._touches.seen(),
            known=habits.known,
        )

    def _hold_back(self, optimizer: Optimizer) -> None:
        """What follows of the step of ``optimizer`` is queued, and happens when :meth:`launched` says so."""
        self._refuse_void()
        version = self._gate.version
        self._worker.faults.hit("optimizer-start", version)
        self._before_mutation(version, seen_forward=True, untouched=True)
        self._on_device.begin(optimizer)

    def launched(self) -> None:
        """Behind the launches of what is held back: the gradients are whole, and the state changes from here on; or the
        step does not count, and nothing has changed."""
        if not self._on_device.holding:
            return
        try:
            self._gate.overhead.aside(lambda: self._worker.device.until(self._on_device.wait))
            self._refuse_void()
            self._collectives.mutation_begins()
            self._gate.mutate()
        except BaseException:
            self.unwound()
            raise
        self._on_device.end(void=False)

    def unwound(self) -> None:
        """The body of the step is over, in whichever way. What is still held back does nothing: the tensors have been
        written to, as their version counters say, and hold what they held."""
        if self._on_device.holding:
            self._on_device.end(void=True)
            self._touches.begin()

    def mutated(self) -> None:
        """The optimizers are done; the commit follows at the end of the step."""

    # -- before the mutation ----------------------------------------------------------------------

    def _before_mutation(self, version: int, *, seen_forward: bool, untouched: bool = False) -> None:
        """Everything that must be in place on all ranks before any of them changes its state. ``untouched``: this
        rank's tensors have just been looked at."""
        copies, habits = self._copies, self._habits
        if not seen_forward:
            # The adapter has seen no forward pass: nothing yet says that every rank has come this far.
            self.sealed()
        copied = self._copied
        self.synchronising()
        touched = not untouched and self._touches.seen()
        if touched and not habits.touched:
            habits.hear(TOUCHED)
            where = self._gate.page.step_text(version)
            self.tell_undo(f"{where} changes registered tensors before its optimizer step", TOUCHED)
        sealed = self._sealing.mutation_begins(version + 1)
        if copies.local_states_only:
            # What is sealed goes to another node, before anybody can need it.
            copies.send_local_state(version + 1, sealed=sealed)
        # The step in which all begin to seal again was not sealed itself.
        needs_undo = habits.needs_undo
        if divergence_check.is_due(version):
            if self._compare_habits():
                self._seal_more(version + 1, sealed)
        elif self._barrier_is_due(seen_forward=seen_forward, copied=copied):
            self._barrier()
        if needs_undo or habits.needs_undo:
            copies.enable_undo(brief=not habits.known)
        else:
            copies.disable_undo()
        copies.before_mutation(version, touched=touched)

    def _barrier_is_due(self, *, seen_forward: bool, copied: bool) -> bool:
        """``copied``: the gradient synchronisation has begun when the copies were complete."""
        late = self._copies.in_every_step and not copied
        return not seen_forward or self._explicit_barrier or self._habits.reseal or late

    def _compare_habits(self) -> bool:
        """Compare what the ranks have learned of their steps, which is a barrier, too. Returns whether something
        belongs to the rank-local state only from now on (objects that are each rank's own, buffers that change unseen);
        the same on all ranks."""
        known = self._habits.silent
        try:
            with self._gate.in_barrier():
                differing, more_silent = divergence_check.compare_habits(self._registry)
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            self._gate.check()
            return False
        self._worker.tell_own(differing)
        silent = sorted({*self._habits.silent} - {*known})
        if silent and self._worker.rank == 0:
            names = sorted(name.partition("/")[2] for name in silent)
            text = f"{names} are changed through .data; from now on they are compared in every step"
            self._worker.notice(NoticeKind.SILENT_BUFFERS, text)
        return bool(differing or more_silent)

    def _seal_more(self, version: int, sealed: bool) -> None:
        """Write the rank-local state again, because more has just turned out to belong to it. Every rank does so before
        any of them changes its state."""
        self._sealing.more_belongs(version, sealed=sealed)
        if self._copies.local_states_only:
            self._copies.send_local_state(version, sealed=sealed)
        else:
            self._barrier()

    def _needs_barrier(self, *, apart: bool) -> bool:
        """Whether a barrier is needed before the first mutation, because the gradient synchronisation is not enough.
        ``apart``: a rank exists that does not have all shards.

        A rank that completes the synchronisation knows that all ranks have sealed, but not that all can complete it: a
        dead rank's last messages to one of them may be lost. That rank then stays a version behind. This is harmless
        only if a rank that is ahead has all of its shards, or can go back.
        """
        registry, copies = self._registry, self._copies
        # A rank that passes it knows that every rank's rank-local state has arrived.
        behind = (apart and not copies.keeps_undo) or copies.local_states_only
        return registry.world_size > 1 and (behind or not all(a.sync_spans_world() for a in registry.adapters))

    def _barrier(self) -> None:
        """A barrier of all ranks. If a peer dies in it and another rank has passed it, this one may pass it, too.

        Raises what says that the step is void.
        """
        group = groups.control_group()
        if group is None:
            return
        try:
            with self._gate.in_barrier():
                group.barrier().wait()
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            self._gate.check()

    # -- the commit -------------------------------------------------------------------------------

    def commit(self, *, outside: bool) -> None:
        """Tag i+1. ``outside``: the script's own code follows. Raises StepInterrupted if the step is void."""
        gate = self._gate
        version = gate.version
        self.launched()  # if the script has caught an error of its optimizer
        self._worker.faults.hit("commit", version)
        gate.check()
        if gate.mutating:
            self.quiet = self._collectives.quiet
            if not self.quiet:
                gate.overhead.aside(self._worker.device.before_commit)
            self._refuse_torn()
        else:
            # Nothing in such a step says that all ranks have come this far, with the copies of its version.
            self._refuse_failed_collectives()
            self._copies.wait()
            self._before_mutation(version, seen_forward=False)
            self.quiet = True
        self._prove(version + 1)
        with gate.lock:
            go_on = gate.commit(outside=outside)
            self._collectives.step_is_committed()
            if not go_on:
                groups.stand_in(outside)
        self._proving.committed()

    def _prove(self, version: int) -> None:
        """Before ``version`` is committed: what is said to be replicated is, or is each rank's own from it on."""
        unequal = self._proving.before_commit(version)
        if unequal is None:
            if version == 1 and self._copies.keeps_undo:
                # It is not known yet which state is rank-local: the first step is repeated from the equal state before.
                self._gate.torn()
                raise StepInterrupted
            return
        if not unequal:
            return
        settings = self._worker.settings
        named = [in_words(name) for name in unequal.settings]
        if settings.elastic is not None or settings.parallelism is not None:
            refuse_unequal([*unequal.shards, *named])
        self._habits.add_own_settings(unequal.settings)
        self._worker.tell_own(named)
        if not unequal.shards:
            return
        self.adopt_own(unequal.shards, version)
        if self._worker.rank == 0:
            text = f"{shortened([*map(repr, unequal.shards)], _SHOWN)} at version {version}"
            self._worker.notice(
                NoticeKind.REDUNDANCY,
                f"not equal on the ranks that were said to hold the same: {text}; each rank's own is protected from "
                f"now on: {self._copies.describe_own()}",
            )

    def adopt_own(self, names: Collection[str], version: int = -1) -> bool:
        """These shards are each rank's own from ``version`` on, which is about to be committed; -1: they have been for
        some time. Does the same on all ranks, also on those that hold none of them. Returns whether it is new."""
        if {*names} <= {*self._habits.own_shards}:
            return False
        self._copies.adopt_own(self._registry.adopt_own(names), version)
        self._explicit_barrier = self._needs_barrier(apart=True)
        return True

    def _refuse_torn(self) -> None:
        """A collective has failed while the state was changing, and the step's body has not heard of it: it has
        swallowed the error, or the collective has been aborted on a device."""
        cut_short = self._worker.device.runs_behind and self._collectives.abandoned and not self.quiet
        if not self._collectives.raised and not cut_short:
            return
        if not self._gate.stopped and not self._stops.wait():
            raise self._unheard("after its mutation had begun, and the step's body swallowed the error")
        self._gate.torn()
        raise StepInterrupted

    def _refuse_void(self) -> None:
        """The state may change only if the step counts still."""
        self._refuse_failed_collectives()
        self._gate.check()

    def _refuse_failed_collectives(self) -> None:
        """A step in which a collective failed is void, also if its body has swallowed the error."""
        if not self._collectives.failed or self._gate.stopped:
            return
        if not self._stops.wait():
            raise self._unheard("and the step's body swallowed the error")
        self._gate.check()

    def _unheard(self, how: str) -> Exception:
        """The error for a void step for which no stop has come, and whose body has raised no error."""
        if self._collectives.given_up:  # by this process itself; on a device the script is not told
            return dist.DistBackendError(groups.last_abandonment())
        return JobFailedError(f"a collective failed in {self._gate.page.step_text(self._gate.version)} {how}")

    def tell_undo(self, why: str, reason: int) -> None:
        """Tell that own pre-step copies are kept from now on. ``reason``: what peers hear
        (:meth:`.StepProfile.hear`)."""
        self._worker.notice(NoticeKind.PRE_STEP_COPY_ENABLED, f"{why}; {_UNDO}", step=reason)

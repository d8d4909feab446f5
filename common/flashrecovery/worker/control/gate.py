"""Synchronises the training thread and the control thread: the step tag, and whether the step has been stopped.

Stopping takes two moves, because only the controller knows where the other ranks are. After ``hold`` no rank begins to
change its state. After ``stop(finish_to)`` a rank at that version stops at once. A rank below it may still finish its
step: another rank has begun to change its state, so every gradient has been synchronised. So all ranks stop with
complete states of one version, unless a dead peer keeps one of them from finishing. The tag changes only under the
gate's lock, and so does what the control thread sets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashrecovery.errors import StepInterrupted
from flashrecovery.groups import device_own_ns, device_restart, underway_ns
from flashrecovery.plan.hang import Work
from flashrecovery.runtime.page import TAG_MUTATING, Page
from flashrecovery.worker.control.overhead import Overhead, Pace

_LOOK_S = 0.01
"""How often a waiting thread checks the page's lease; everything else wakes it."""


class Gate:
    """Step tag, generation and stop flag of one worker. Its state changes only through its methods.

    Attributes:
        overhead: what recovery takes of each step.

    Args:
        generation: the one in which the worker begins.
        on_interrupt: called in the training thread before StepInterrupted is raised there.
    """

    def __init__(self, page: Page, generation: int = 0, on_interrupt: Callable[[], None] = lambda: None) -> None:
        self.page = page
        self._on_interrupt = on_interrupt
        self.lock = threading.Condition()
        self._version = 0
        self._live = -1
        self._generation = generation
        self._in_block = False
        self._above = False
        self._of_calls = False
        self._pause_at = -1
        self._pause_with_copies = False
        self._called_off_by = 0  # the newest generation that a hold or a stop has announced
        self._stopped = False
        self._finish_to = -1
        self._held = False
        self._stepping = False
        self._done = False
        self._mutating = False
        self._in_barrier = False
        self._outside = False
        self._step_began = 0
        self._step_ns = 0
        self._pace = Pace()
        self.overhead = Overhead()

    @property
    def version(self) -> int:
        """The newest committed version of this rank's state."""
        return self._version

    @property
    def live(self) -> int:
        """The version of the live state, -1 while it is torn or empty."""
        return self._live

    @property
    def generation(self) -> int:
        """The generation that this worker trains in."""
        return self._generation

    # -- training thread --------------------------------------------------------------------------

    def initialised(self) -> None:
        """The script has made the state of version 0."""
        self._live = 0

    def steps_are_calls(self) -> None:
        """Steps are a framework's calls; the script's code between two of them runs only once."""
        self._of_calls = True

    def step_yielded(self) -> None:
        """The script's own code follows, between the yield of a step and its body."""
        self._above = True

    def body_reached(self) -> None:
        """The script has reached the body of the step. Call under the lock."""
        self._above = False

    def enter_block(self) -> None:
        """The training thread is in the body of a step from here on, where an interruption is caught."""
        self._in_block = True

    def leave_block(self) -> None:
        """The body of the step is over."""
        self._in_block = False

    @property
    def in_block(self) -> bool:
        """The training thread is in the body of a step, where an interruption is caught."""
        return self._in_block

    @property
    def above_call(self) -> bool:
        """The training thread is in the script's own code before a framework's call; nothing protects that code. Ask
        under the lock."""
        return self._above and self._of_calls

    def begin(self) -> None:
        """Tag i: this rank is in forward/backward of step i (no tag if the step has been stopped already)."""
        with self.lock:
            if self._stopped:
                return
            self._step_began = time.monotonic_ns()
            self._in_step()
            self.page.set_entered(self.version)

    def fetches(self) -> None:
        """The training thread fetches a batch; that is progress."""
        self._in_step()
        self.page.beat()

    def has_fetched(self) -> None:
        """The fetch is over, perhaps with the end of the data. Above its step the script's own code follows."""
        if self._step_ns and not self._in_block:
            self.page.set_work(Work.EVALUATION)

    def forward_ended(self) -> None:
        """The model has been called, in a step, between two or behind the last one; that is progress."""
        if not self.page.closed:
            self.page.beat()

    def _in_step(self) -> None:
        self.page.set_work(Work.STEP if self._step_ns else Work.FIRST_STEP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this block the training thread writes a checkpoint of the script's. Its end is progress."""
        before = self.page.work
        self.page.set_work(Work.SAVE)
        self.page.beat()
        try:
            yield
        finally:
            self.page.set_work(before)
            self.page.beat()

    def mutate(self) -> None:
        """Tag -1: the state changes from here on. Waits while held, and while this node may have been declared dead.

        Raises StepInterrupted if stopped."""
        with self.lock:
            while (self._held or self.page.lease_over()) and not self._stopped:
                self.lock.wait(_LOOK_S)
            if self._void():
                self._on_interrupt()
                raise StepInterrupted
            if not self._mutating:
                self._mutating = True
                self._live = -1
                self.page.set_tag(TAG_MUTATING)

    @contextmanager
    def in_barrier(self) -> Iterator[None]:
        """Within this block the training thread waits in the barrier before its mutation."""
        self._in_barrier = True
        try:
            yield
        finally:
            self._in_barrier = False

    def commit(self, *, outside: bool = False) -> bool:
        """Tag i+1, even when stopped meanwhile: the mutation was complete. Returns whether the rank may continue.
        ``outside``: the script's own code follows, until :meth:`leave_outside`.

        Raises StepInterrupted if the stop came before the mutation: such a step is void.
        """
        with self.lock:
            if self._void():
                raise StepInterrupted
            assert self._live in (-1, self._version), f"version {self._version + 1} is made of version {self._live}"
            self._mutating = False
            self._outside = outside
            self._version += 1
            self._live = self._version
            now = time.monotonic_ns()
            last = now - self._step_began
            self._step_ns = last if self._step_ns == 0 else (4 * self._step_ns + last) // 5
            self._pace.committed(now, underway_ns(), device_own_ns())
            overhead_ns = self.overhead.committed(now)
            self.page.set_work(Work.EVALUATION)
            self.page.set_committed(self.version, self._step_ns, self._pace.own_ns, self._pace.least_ns, overhead_ns)
            return not self._stopped

    def leave_outside(self) -> None:
        """The script has reached its next step."""
        with self.lock:
            self._outside = False

    @property
    def outside(self) -> bool:
        """A step has been committed, and the training thread is in its post-step code. Ask under the lock."""
        return self._outside

    @property
    def stands_in(self) -> bool:
        """The training thread is in the script's own code between two steps, which is repeated as a whole if it is
        interrupted. Ask under the lock."""
        return self._outside or (self._above and not self._of_calls)

    @property
    def between(self) -> bool:
        """The training thread is in the script's own code between two steps, repeated or not."""
        return self._outside or (self._stepping and not self._in_block)

    def check(self) -> None:
        """Raises StepInterrupted if the step has been stopped; not outside of its body, where no ``with step:`` would
        catch it."""
        if self._in_block and self._void():
            self._on_interrupt()
            raise StepInterrupted

    def torn(self) -> None:
        """The live state is being overwritten."""
        with self.lock:
            self._mutating = False
            self._live = -1

    def placed(self, version: int) -> None:
        """The whole live state has been replaced by that of ``version``."""
        with self.lock:
            self._mutating = False
            self._version = self._live = version

    def resume(self, version: int, generation: int) -> bool:
        """Continue at ``version``. False if a newer hold or stop has come meanwhile: then this rank has reported that
        it takes no step, and waits for the stop."""
        with self.lock:
            assert generation >= self._generation, f"generation {generation} after generation {self._generation}"
            self._version = self._live = version
            self._mutating = False
            if self.outdated(generation):
                return False
            self._stopped = self._held = False
            self._finish_to = -1
            self._stepping = True
            self._generation = generation
            self._pace.restart()
            device_restart()
            self.overhead.restart()
            self.page.set_work(Work.EVALUATION if self._step_ns else Work.FIRST_STEP)
            self.page.resume(version, generation, self._step_ns)
            return True

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def paused(self) -> bool:
        """Whether the next step must not begin yet."""
        return 0 <= self._pause_at <= self._version

    @property
    def pause_with_copies(self) -> bool:
        """Whether the pause waits for the copies of its version."""
        return self._pause_with_copies

    def order_pause(self, step: int, *, copies: bool) -> None:
        """No step from ``step`` on begins before commands have been carried out (-1: all may begin). ``copies``: wait
        for the copies of the version."""
        self._pause_at, self._pause_with_copies = step, copies

    def outdated(self, generation: int) -> bool:
        """True if a newer generation has been announced than ``generation``."""
        return generation < self._called_off_by

    def stale(self, generation: int) -> bool:
        """True if a hold or a stop of ``generation`` comes too late: this rank has a newer order, or already trains in
        that generation."""
        return generation <= self._generation or self.outdated(generation)

    def leave_step(self, *, done: bool = False) -> None:
        """The training thread carries out commands from now on. ``done``: because it has taken all its steps."""
        with self.lock:
            self._stepping, self._done = False, done

    def _void(self) -> bool:
        """The current step must not change anything any more."""
        return self._stopped and not self._mutating and self._version >= self._finish_to

    # -- control thread ---------------------------------------------------------------------------

    def hold(self, generation: int) -> tuple[bool, bool, int]:
        """Let no mutation begin until the stop. Returns whether this rank is in a step or done with all steps (and not
        in a recovery), whether it is mutating, and its newest complete version. An outdated hold has no effect."""
        with self.lock:
            if not self.stale(generation):
                self._called_off_by = generation
                self._held = True
            return self._stepping or self._done, self._mutating, self._version

    def stop(self, generation: int, finish_to: int) -> bool:
        """Void the current step, unless this rank is below ``finish_to``. Returns whether it may still finish. An
        outdated stop has no effect."""
        with self.lock:
            if self.stale(generation):
                return self.finishing
            self._stopped = True
            self._called_off_by = generation
            self._finish_to = finish_to
            self.lock.notify_all()
            return self.finishing

    def give_up(self) -> None:
        """Do not wait any longer for this rank to finish its step."""
        with self.lock:
            self._finish_to = -1

    @property
    def finishing(self) -> bool:
        """Whether the step may continue to its commit."""
        return self._stepping and (self._mutating or self._version < self._finish_to)

    @property
    def step_s(self) -> float:
        """Seconds per step, averaged over the latest ones; 0 before the first one."""
        return self._step_ns / 1e9

    @property
    def held(self) -> bool:
        """The controller has ordered a hold, so a stop will follow."""
        return self._held

    @property
    def waits_in_barrier(self) -> bool:
        """Whether the training thread waits in the barrier before its mutation. A rank that may finish its step need
        not wait any longer: another rank has passed the barrier."""
        return self._in_barrier

    @property
    def mutating(self) -> bool:
        return self._mutating

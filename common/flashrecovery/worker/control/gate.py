"""Where the training thread and the control thread meet: the step tag, and whether the step has been stopped.

Stopping is done in two moves, because only the controller knows where the others are. ``hold``: no rank begins to
change its state any more. ``stop(finish_to)``: a rank below that version may still finish its step, since another
rank has begun to change its state, so every gradient has been synchronised; a rank at that version stops at once. So
all ranks stop with whole states of one version, unless a dead peer keeps one of them from finishing. The tag changes
only under the gate's lock, and so do the control thread's moves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashrecovery.errors import StepInterrupted
from flashrecovery.groups import underway_ns
from flashrecovery.runtime.page import TAG_MUTATING, Page
from flashrecovery.worker.control.overhead import Overhead, Pace

_LOOK_S = 0.01
"""How often a waiting thread looks whether the lease of the page goes on; all else wakes it."""


class Gate:
    """Step tag, generation and stop flag of one worker.

    Attributes:
        version: the newest committed version of this rank's state.
        live: the version that the live state has as a whole, -1 while it is torn or empty.
        generation: the generation that this worker trains in.
        overhead: what recovery takes of each step.
        in_block: the training thread is in the body of a step, where an interruption is caught.
        above: it is in the script's own code between the yield of a step and its body.
        of_calls: steps are a framework's calls, and what the script does between two of them is done once.
        pause_with_copies: there, the copies of the version are waited for.
        pause_at: no step is begun from this one on, before commands have been carried out; -1: all may begin.

    Args:
        generation: in which the worker begins.
        on_interrupt: called in the training thread before StepInterrupted is raised there.
    """

    def __init__(self, page: Page, generation: int = 0, on_interrupt: Callable[[], None] = lambda: None) -> None:
        self.page = page
        self._on_interrupt = on_interrupt
        self.lock = threading.Condition()
        self.version = 0
        self.live = -1
        self.generation = generation
        self.in_block = False
        self.above = False
        self.of_calls = False
        self.pause_at = -1
        self.pause_with_copies = False
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

    # -- training thread --------------------------------------------------------------------------

    def begin(self) -> None:
        """Tag i: this rank is in forward/backward of step i (no tag if the step has been stopped already)."""
        with self.lock:
            if self._stopped:
                return
            self._step_began = time.monotonic_ns()
            self.page.set_entered(self.version)

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
                self.live = -1
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
        """Tag i+1, even when stopped meanwhile: the mutation was complete. Returns whether the rank may go on.
        ``outside``: the script's own code follows, until :meth:`leave_outside`.

        Raises StepInterrupted if the stop came before the mutation: such a step is void.
        """
        with self.lock:
            if self._void():
                raise StepInterrupted
            assert self.live in (-1, self.version), f"version {self.version + 1} is made of version {self.live}"
            self._mutating = False
            self._outside = outside
            self.version += 1
            self.live = self.version
            now = time.monotonic_ns()
            last = now - self._step_began
            self._step_ns = last if self._step_ns == 0 else (4 * self._step_ns + last) // 5
            self._pace.committed(now, underway_ns())
            overhead_ns = self.overhead.committed(now)
            self.page.set_committed(self.version, self._step_ns, self._pace.own_ns, self._pace.least_ns, overhead_ns)
            return not self._stopped

    def leave_outside(self) -> None:
        """The script has come to its next step."""
        with self.lock:
            self._outside = False

    @property
    def outside(self) -> bool:
        """A step has been committed and the training thread is in the script's own code that belongs to it. Ask under
        the lock."""
        return self._outside

    @property
    def stands_in(self) -> bool:
        """The training thread is in the script's own code between two steps, all of which is done again if it is cut
        short. Ask under the lock."""
        return self._outside or (self.above and not self.of_calls)

    @property
    def between(self) -> bool:
        """The training thread is in the script's own code between two steps, whatever comes of that."""
        return self._outside or (self._stepping and not self.in_block)

    def check(self) -> None:
        """Raises StepInterrupted if the step has been stopped; not outside of its body, where no ``with step:`` would
        catch it."""
        if self.in_block and self._void():
            self._on_interrupt()
            raise StepInterrupted

    def torn(self) -> None:
        """The live state is being overwritten."""
        with self.lock:
            self._mutating = False
            self.live = -1

    def placed(self, version: int) -> None:
        """The live state has been replaced, as a whole, by another one of ``version``."""
        with self.lock:
            self._mutating = False
            self.version = self.live = version

    def resume(self, version: int, generation: int) -> bool:
        """Continue at ``version``. False if a newer hold or stop has come meanwhile: then this rank has said that it
        takes no step, and waits for the stop."""
        with self.lock:
            assert generation >= self.generation, f"generation {generation} after generation {self.generation}"
            self.version = self.live = version
            self._mutating = False
            if self.outdated(generation):
                return False
            self._stopped = self._held = False
            self._finish_to = -1
            self._stepping = True
            self.generation = generation
            self._pace.restart()
            self.overhead.restart()
            self.page.resume(version, generation, self._step_ns)
            return True

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def paused(self) -> bool:
        """Whether the next step is not to begin yet."""
        return 0 <= self.pause_at <= self.version

    def order_pause(self, step: int, *, copies: bool) -> None:
        """No step from ``step`` on is to begin (-1: all may). ``copies``: see ``pause_with_copies``."""
        self.pause_at, self.pause_with_copies = step, copies

    def outdated(self, generation: int) -> bool:
        """True if a newer generation has been announced than ``generation``."""
        return generation < self._called_off_by

    def stale(self, generation: int) -> bool:
        """True if a hold or a stop of ``generation`` comes too late: this rank has been told something newer, or trains
        in that generation already."""
        return generation <= self.generation or self.outdated(generation)

    def leave_step(self, *, done: bool = False) -> None:
        """The training thread carries out commands now; ``done``: because it has taken all its steps."""
        with self.lock:
            self._stepping, self._done = False, done

    def _void(self) -> bool:
        """The current step must not change anything any more."""
        return self._stopped and not self._mutating and self.version >= self._finish_to

    # -- control thread ---------------------------------------------------------------------------

    def hold(self, generation: int) -> tuple[bool, bool, int]:
        """Let no mutation begin until the stop. Returns whether this rank is in a step or done with all (and not in a
        recovery), whether it is mutating, and its newest complete version. A hold that is older than what this rank
        has been told since holds nothing."""
        with self.lock:
            if not self.stale(generation):
                self._called_off_by = generation
                self._held = True
            return self._stepping or self._done, self._mutating, self.version

    def stop(self, generation: int, finish_to: int) -> bool:
        """Void the current step, unless this rank is below ``finish_to``. Returns whether it may still finish. A stop
        that is older than what this rank has been told since stops nothing."""
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
        """Whether the step may go on to its commit."""
        return self._stepping and (self._mutating or self.version < self._finish_to)

    @property
    def step_s(self) -> float:
        """How many seconds a step has taken lately; 0 before the first one."""
        return self._step_ns / 1e9

    @property
    def held(self) -> bool:
        """The controller has said hold, so a stop will follow."""
        return self._held

    @property
    def waits_in_barrier(self) -> bool:
        """Whether the training thread waits in that barrier. A rank that may finish its step need not wait any longer:
        another rank has passed the barrier."""
        return self._in_barrier

    @property
    def mutating(self) -> bool:
        return self._mutating

"""What recovery costs each step, as far as the training thread can tell: the time that it spends in our hooks.

From the beginning of a step to its commit these publish tags, capture random numbers and data positions, wait until the
copies of the version before are complete and, where there is one, in the barrier before the mutation; that others come
late to it counts, too, though some of that would be waited for in the next collective. Not counted is what threads do
beside (making and sending copies), what an exchangeable process group adds to each operation, and waiting for the
device, which has the step's own work to do. So this is neither a lower nor an upper bound, but what grows when copies
do not keep up; ``benchmarks/overhead.py`` measures a job with and without us.

:class:`Pace` says how much of a step is this rank's own work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from torch.optim import Optimizer

from flashrecovery.contract.adapter import StepHooks


class Overhead:
    """Measures what recovery takes of a step in one worker: ``with overhead:`` stands around all that is ours. All
    times are nanoseconds."""

    def __init__(self) -> None:
        self._depth = 0
        self._since = 0
        self._spent = 0
        self._mean_ns = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = time.monotonic_ns()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.monotonic_ns() - self._since

    def aside(self, wait: Callable[[], None]) -> None:
        """Call ``wait``, whose time is not ours, in the middle of what is."""
        began = time.monotonic_ns()
        wait()
        if self._depth:
            self._since += time.monotonic_ns() - began

    def committed(self, now_ns: int) -> int:
        """A step is over, in the middle of a hook; what is left of that counts for the next one. Returns the mean of
        the last steps."""
        spent = self._spent
        if self._depth:
            spent += now_ns - self._since
            self._since = now_ns
        self._spent = 0
        self._mean_ns = spent if self._mean_ns == 0 else (4 * self._mean_ns + spent) // 5
        return self._mean_ns

    def restart(self) -> None:
        """Start measuring again after a recovery, which is no part of a step."""
        self._since, self._spent, self._mean_ns = time.monotonic_ns(), 0, 0


class TimedHooks(StepHooks):
    """The ``hooks`` that an adapter gets."""

    def __init__(self, hooks: StepHooks, overhead: Overhead) -> None:
        self._hooks = hooks
        self._overhead = overhead

    def sealed(self, *, recheck: bool = False) -> None:
        with self._overhead:
            self._hooks.sealed(recheck=recheck)

    def evaluated(self) -> None:
        self._hooks.evaluated()

    def synchronising(self) -> None:
        with self._overhead:
            self._hooks.synchronising()

    def mutating(self, by: Optimizer | None = None) -> None:
        with self._overhead:
            self._hooks.mutating(by)

    def launched(self) -> None:
        with self._overhead:
            self._hooks.launched()

    def mutated(self) -> None:
        with self._overhead:
            self._hooks.mutated()


STEPS = 10
"""The shortest of this number of measured steps is what a rank certainly needs."""


class Pace:
    """Measures the own work of one worker. All times are nanoseconds."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._newest: deque[int] = deque(maxlen=STEPS)
        self.own_ns = 0

    def restart(self) -> None:
        """What comes next is not a step like the others."""
        self._last = None
        self._newest.clear()
        self.own_ns = 0

    def committed(self, now_ns: int, underway_ns: int, device_ns: int | None = None) -> None:
        """A step is over. ``underway_ns``: time with an operation under way, since whenever. ``device_ns``: where the
        device's clock tells instead, own work in a step that it has measured; 0: in none."""
        if device_ns is not None:
            if self._last is not None:  # what the host's clock has told is none
                self.restart()
            if device_ns > 0:
                self._add(device_ns)
            return
        if self._last is not None:
            self._add(max(now_ns - self._last[0] - (underway_ns - self._last[1]), 1))
        self._last = (now_ns, underway_ns)

    def _add(self, own_ns: int) -> None:
        self.own_ns = own_ns if self.own_ns == 0 else (4 * self.own_ns + own_ns) // 5
        self._newest.append(own_ns)

    @property
    def least_ns(self) -> int:
        """The least own work of the last steps; 0 while there are too few."""
        return min(self._newest) if len(self._newest) == STEPS else 0

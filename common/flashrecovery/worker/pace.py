"""How much of a step is this rank's own work.

From commit to commit, without the time in which the training thread had an operation under way. Ranks that wait for a
slow one have their operations under way meanwhile; the slow one has not. Where communication overlaps with computation
the overlap does not count, on any rank, so this is a lower bound, made for comparing ranks.
"""

from __future__ import annotations

from collections import deque

STEPS = 10
"""The least of so many steps is what a rank certainly needs."""


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

    def committed(self, now_ns: int, underway_ns: int) -> None:
        """A step is over. ``underway_ns``: time with an operation under way, since whenever."""
        if self._last is not None:
            own = max(now_ns - self._last[0] - (underway_ns - self._last[1]), 1)
            self.own_ns = own if self.own_ns == 0 else (4 * self.own_ns + own) // 5
            self._newest.append(own)
        self._last = (now_ns, underway_ns)

    @property
    def least_ns(self) -> int:
        """The least own work of the last steps; 0 while there are too few."""
        return min(self._newest) if len(self._newest) == STEPS else 0

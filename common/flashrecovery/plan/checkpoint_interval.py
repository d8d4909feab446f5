"""When to write the fallback checkpoint: FlashRecovery's equation (3), and which ranks write which version.

Writing costs ``k0`` seconds of training each time and saves, on average, half an interval of work per failure
that needs the checkpoint. Over ``d`` seconds with ``m`` such failures the sum is least at ``sqrt(2 d k0 /
m)`` seconds.

A checkpoint needs every rank's part of one and the same version, but the steady state has no message on which
ranks could agree. So one place (the controller) *announces* a version that no rank has reached yet. A rank
that hears too late has no part of that version; the checkpoint then stays incomplete and is never published,
and the next one is announced with a larger margin. Nothing waits for it.
"""

from __future__ import annotations

import math
from typing import Literal

DAY_S = 86_400.0
FIRST_AUTO_S = 60.0
"""With ``auto``, the first checkpoint is taken this early: it measures k0."""
MARGIN_S = 0.5
"""An announcement reaches every rank within this time, else the margin is doubled for the next one."""
_MAX_MARGIN_S = 8.0
_WRITES = 10
"""With ``auto``, the storage is written to for a tenth of the time at most: where training is not held up at all, the
equation alone would have it written to always."""
_LOST_AFTER_S = 3.0
"""A checkpoint that is not published this long after its version was committed will never be."""


def checkpoint_interval(d_seconds: float, k0_seconds: float, failures: float) -> float:
    """Seconds between checkpoints that lose least time, equation (3): ``sqrt(2 * d * k0 / m)``.

    Args:
        d_seconds: the period looked at, > 0.
        k0_seconds: time that one checkpoint holds training up (not what overlaps with it), >= 0.
        failures: failures within the period that need the checkpoint, > 0 (may be a fraction).

    Raises ValueError for values outside these ranges.
    """
    if not (d_seconds > 0 and k0_seconds >= 0 and failures > 0):
        raise ValueError(
            f"checkpoint interval: d={d_seconds} s and m={failures} must be positive, k0={k0_seconds} s not negative"
        )
    return math.sqrt(2 * d_seconds * k0_seconds / failures)


def version_ahead(newest_tag: int, step_s: float, margin_s: float) -> int:
    """The first version that no rank reaches within ``margin_s`` seconds, nor in the step that it is in.

    Args:
        newest_tag: the highest step any rank is in.
        step_s: the usual time of a step; 0: unknown.
    """
    ahead = math.ceil(margin_s / step_s) if step_s > 0 else 2
    return newest_tag + 1 + max(1, ahead)


class CheckpointSchedule:
    """Decides when the next checkpoint is due, and for which version. Times are seconds of one monotonic
    clock.
    """

    def __init__(self, interval_s: float | Literal["auto"], failures_per_day: float, *, now: float) -> None:
        self._interval_s = interval_s
        self._failures_per_day = failures_per_day
        self._k0_s: float | None = None
        self._writing_s = 0.0
        self._last = now
        self._margin_s = MARGIN_S
        self._announced: int | None = None
        self._hurried = False

    def interval_s(self) -> float:
        """The interval in force."""
        if self._interval_s != "auto":
            return self._interval_s
        if self._k0_s is None:
            return FIRST_AUTO_S
        return max(
            checkpoint_interval(DAY_S, self._k0_s, self._failures_per_day), _WRITES * self._writing_s, FIRST_AUTO_S
        )

    def is_due(self, now: float) -> bool:
        """Whether :meth:`announce` has anything to decide."""
        return self._hurried or now - self._last >= self.interval_s()

    def hurry(self) -> None:
        """The next one is due now."""
        self._hurried = True

    def announce(self, newest_tag: int, step_s: float, *, now: float) -> int | None:
        """The version to announce now, or None if nothing is due.

        ``newest_tag`` is the highest step any rank is in, ``step_s`` the usual time of a step (0: unknown).
        """
        if not self.is_due(now):
            return None
        if self._announced is not None:
            if newest_tag <= self._announced or now - self._last < _LOST_AFTER_S:
                return None  # still on its way: announcing another one would only put it off
            # It was never published: some rank heard of it too late, or was still writing the one before.
            self._margin_s = min(2 * self._margin_s, _MAX_MARGIN_S)
        self._last, self._hurried = now, False
        self._announced = version_ahead(newest_tag, step_s, self._margin_s)
        return self._announced

    def published(self, k0_s: float, writing_s: float) -> None:
        """The announced checkpoint is complete on disk, ``writing_s`` after its commit; it held training up for
        ``k0_s`` on the slowest rank."""
        self._k0_s, self._writing_s = k0_s, writing_s
        self._announced = None
        self._margin_s = MARGIN_S

    def recovered(self) -> None:
        """A recovery has taken place: what was announced before it is void, and no reason for a larger
        margin.
        """
        self._announced = None

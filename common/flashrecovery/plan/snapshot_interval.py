"""When to take a snapshot where no step makes copies anyway: REFT's section 4.2, and its razor (appendix A): a copy is
made as often as training does not notice it.

As for checkpoints (:mod:`flashrecovery.plan.checkpoint_interval`), the controller names a version that no rank has
reached yet, and each rank copies its part when it commits that. A rank that hears too late has no part of it. So the
margin is large: it costs nothing but that the snapshot is of a version a little later.
"""

from __future__ import annotations

from flashrecovery.plan.checkpoint_interval import version_ahead

MARGIN_S = 2.0
"""An announcement reaches every rank within this time."""
_WORTH = 500
"""Training is held up for a five-hundredth of the time at most."""


class SnapshotSchedule:
    """Decides which versions are snapshots. Times are seconds of one monotonic clock.

    Args:
        max_age_s: how old a snapshot may become, > 0.
    """

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._waited_s = 0.0
        self._last: float | None = None
        self._announced = -1

    def interval_s(self) -> float:
        """From one announcement to the next. One that a rank missed makes no snapshot older than ``max_age_s``."""
        return max(self._max_age_s / 2, _WORTH * self._waited_s)

    def is_due(self, now: float) -> bool:
        """Whether :meth:`announce` has anything to decide."""
        return self._last is None or now - self._last >= self.interval_s()

    def announce(self, newest_tag: int, step_s: float, *, now: float) -> int | None:
        """The version to announce now; None: nothing is due, or the one announced last has not come yet.

        Args:
            newest_tag: the highest step any rank is in.
            step_s: the usual time of a step; 0: unknown.
        """
        if not self.is_due(now) or newest_tag <= self._announced:
            return None
        self._last, self._announced = now, version_ahead(newest_tag, step_s, MARGIN_S)
        return self._announced

    def taken(self, waited_s: float) -> None:
        """Training has waited for so long for the newest one."""
        self._waited_s = waited_s

    def recovered(self) -> None:
        """What was announced is void, and a rank may have come to a node that has nothing of it: the next
        one is due now."""
        self._last, self._announced = None, -1

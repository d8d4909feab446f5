"""Slow ranks: they are reported, and nothing else is done about them.

Ranks that synchronise take equally long for a step; a slow one has more work of its own in it, and the others more
waiting. A rank is slow if each of its last steps (the worker reports their least) had ``FACTOR`` times the median of
all ranks, and the difference is worth speaking of. It counts as slow until it is below ``CLEAR`` times.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from flashrecovery.controller.records import RankRecord

FACTOR = 1.5
CLEAR = 1.25
SHARE = 0.1
"""Less than this part of a step is not worth speaking of."""
_PERIOD_S = 2.0


@dataclass(frozen=True)
class OwnWork:
    """Own work of one rank in a step: usual, and the least of its last steps (0: too few steps yet)."""

    rank: int
    own_s: float
    least_s: float
    step_s: float


def usual_of(paces: Collection[OwnWork]) -> float:
    """The usual own work: the median; of two middle ranks the faster one, so that one of two ranks can be slow. 0 if
    too few are known."""
    known = [p.own_s for p in paces if p.least_s > 0]
    return statistics.median_low(known) if len(known) > 1 and 2 * len(known) > len(paces) else 0.0


def slow(pace: OwnWork, usual_s: float, factor: float = FACTOR) -> bool:
    """Whether the rank is slow where ``usual_s`` is usual."""
    return usual_s > 0 and pace.least_s > factor * usual_s and pace.least_s - usual_s > SHARE * pace.step_s


class Stragglers:
    """Which ranks are slow now; each one is told once. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self.slow: frozenset[int] = frozenset()
        self._next_at = 0.0

    def forget(self) -> None:
        """The job is not in its loop; its steps are counted from zero again."""
        self.slow = frozenset()

    def due(self, now: float) -> bool:
        """Whether it is time for the next :meth:`check`."""
        return now >= self._next_at

    def check(self, ranks: Collection[RankRecord], now: float) -> list[tuple[int, str]]:
        """Ranks that have become slow, each with what to say of it."""
        if not self.due(now):
            return []
        self._next_at = now + _PERIOD_S
        paces = [OwnWork(r.rank, r.own_s, r.own_least_s, r.step_s) for r in ranks]
        usual_s = usual_of(paces)
        found = {p.rank: p for p in paces if slow(p, usual_s, CLEAR if p.rank in self.slow else FACTOR)}
        new = [p for rank, p in found.items() if rank not in self.slow]
        self.slow = frozenset(found)
        return [(p.rank, _words(p, usual_s)) for p in new]


def _words(pace: OwnWork, usual_s: float) -> str:
    own_ms, usual_ms = 1e3 * pace.own_s, 1e3 * usual_s
    return f"rank {pace.rank} is slow: {own_ms:.0f} ms of own work a step, the median of all ranks is {usual_ms:.0f} ms"

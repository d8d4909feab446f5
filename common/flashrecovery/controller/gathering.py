"""Members of a job that is to change have come to the step before which they wait, one after the other: are all there,
and for how long has the first one been waiting?"""

from __future__ import annotations

from collections.abc import Set


class Gathering:
    """Of one pause. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self.since: float | None = None
        """When the first one has come; None: nobody has."""

    def come(self, rank: int, now: float) -> None:
        """This one waits from now on."""
        if self.since is None:
            self.since = now
        self._there.add(rank)

    def has(self, rank: int) -> bool:
        """Whether this one waits."""
        return rank in self._there

    def complete(self, members: Set[int]) -> bool:
        """Whether all of them wait."""
        return self._there >= members

    def overdue(self, now: float, patience_s: float) -> bool:
        """Whether the others have been waited for as long as that."""
        return self.since is not None and now - self.since >= patience_s

    def dissolve(self) -> None:
        """Nobody waits any more."""
        self._there.clear()
        self.since = None

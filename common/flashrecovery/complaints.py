"""What strangers do is logged, but they shall not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0


class Complaints:
    """At most one line in ``every_s`` seconds, with the number of those that were left out."""

    def __init__(
        self, log: logging.Logger, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._said_at = float("-inf")
        self._unsaid = 0

    def add(self, text: str, *values: object) -> None:
        """Log it (as ``Logger.warning`` does), or count it only."""
        now = self._clock()
        if now - self._said_at < self._every_s:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._log.warning(text + "%s", *values, more)
        self._said_at, self._unsaid = now, 0

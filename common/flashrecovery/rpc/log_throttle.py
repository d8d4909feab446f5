"""Log lines that strangers can cause, limited in number, so that they do not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
_KIND_CHARS = 100
_MOST_KINDS = 100
"""Further kinds are counted together, because a stranger could invent any number of them."""


class Complaints:
    """Logs at most one line in ``every_s`` seconds, with the number of lines that were left out."""

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


class Seldom(logging.Filter):
    """A filter for another library's logger that repeats itself: it lets one line of a kind through in ``every_s``
    seconds, with the number of those that were left out. Lines are of one kind if they have the same text (before
    arguments are put into it) and the same type of exception."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when the last one was, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        said = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        error = record.exc_info[0] if record.exc_info else None
        kind = (said.partition("\n")[0][:_KIND_CHARS], error.__name__ if error is not None else "")
        if kind not in self._said and len(self._said) >= _MOST_KINDS:
            kind = ("", "")
        now = self._clock()
        at, unsaid = self._said.get(kind, (float("-inf"), 0))
        if now - at < self._every_s:
            self._said[kind] = at, unsaid + 1
            return False
        self._said[kind] = now, 0
        if unsaid:
            record.msg = f"{record.msg} ({unsaid} more since the last such line)"
        return True

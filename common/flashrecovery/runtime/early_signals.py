"""Signals that come to a launcher before it can act on them: while it is being imported, and its controller starts.

Python's own answer to Ctrl-C is an exception in whatever is being done just then. In the middle of a start that is a
library, which prints its own traceback, and half a launch is left behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What ends a job, in order. They would end its launcher at once, and all ranks with it."""
_held: list[int] = []


def hold(numbers: Iterable[int] = ENDING) -> None:
    """From now on the first of each of these is kept for :func:`release`; the second one has its own effect. What is
    ignored stays so, but not Ctrl-C, which shells ignore for what is in the background."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, _keep)


def release() -> list[int]:
    """Those that have come, in order. Handlers have been set meanwhile."""
    held = _held[:]
    _held.clear()
    return held


def _keep(number: int, _: FrameType | None) -> None:
    if number in _held:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _held.append(number)

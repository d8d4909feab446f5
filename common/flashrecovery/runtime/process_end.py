"""The end of a training process, and the ends of those that its script forks off.

What must be done last is done after the script's own exit handlers, also after those that it has registered before it
imported torch. Handlers are called last in, first out; so the place is taken before the script's first line.

A process that the script has forked (:func:`os.fork`, a data loader's worker) is no rank: nothing of ours is done in
it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

_last: list[Callable[[], None]] = []
_reserved = False
_forked = False


def reserve() -> None:
    """Here is the place of :func:`at_last`. From now on a fork of this process counts as the script's."""
    global _reserved
    _reserved = True
    atexit.register(_run)
    os.register_at_fork(after_in_child=_note_fork)


def at_last(callback: Callable[[], None]) -> None:
    """Call it at the end of this process, and not of its forks. Without :func:`reserve` its place is here."""
    if _reserved:
        _last.append(callback)
    else:
        atexit.register(_unless_forked, callback)


def is_fork() -> bool:
    """Whether the script has forked this process."""
    return _forked


def _note_fork() -> None:
    global _forked
    _forked = True


def _unless_forked(callback: Callable[[], None]) -> None:
    if not _forked:
        callback()


def _run() -> None:
    for callback in reversed(_last):
        _unless_forked(callback)

"""Collectives that a script makes outside of its ``with step:`` blocks are named the first time, with file and line."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from flashrecovery import groups

ADVICE = (
    "a collective outside of `with step:` is cut off when a rank dies, and nothing can catch its error there: move it "
    "into the block, before optimizer.step()"
)


def _folder(file: str | Path) -> tuple[str, ...]:
    """The folder of ``file`` as the interpreter writes it in frames, and without symbolic links."""
    return tuple(f"{p.parent}{os.sep}" for p in (Path(file), Path(file).resolve()))


_LIBRARIES = _folder(torch.__file__) + _folder(Path(__file__).parent)
_DECORATORS = frozenset(("typing_extensions", "functools", "contextlib"))
"""Modules whose functions are around others: no place of a call's own."""


class OutsideWatch:
    """Tells of the first operation that the training thread makes while it is watched.

    Args:
        notify: gets the text.
        handled: whether the operation is one that a rank's death does not end with an error in the script.
    """

    def __init__(self, notify: Callable[[str], None], handled: Callable[[], bool]) -> None:
        self._notify = notify
        self._handled = handled
        self._told = False
        self._hooked = False

    def watch(self, on: bool) -> None:
        """The script is between two steps from now on, or not any more."""
        if self._told:
            return
        if on and not self._hooked:
            groups.set_outside_hook(self._called)
            self._hooked = True
        groups.watch_outside(on)

    def _called(self, group: str, operation: str) -> None:
        if self._told or self._handled() or threading.current_thread() is not threading.main_thread():
            return
        self._told = True
        groups.watch_outside(False)
        self._notify(f"{operation} at {script_line(sys._getframe(1))}: {ADVICE}")


def script_line(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        around = frame.f_globals.get("__name__") in _DECORATORS
        if not around and not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"

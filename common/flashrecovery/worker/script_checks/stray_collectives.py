"""Collectives that a script makes below its ``with step:`` block, or between two calls that are its steps, are named
the first time, with file and line."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from flashrecovery import groups
from flashrecovery.worker.script_text.script_frames import frames

BETWEEN_CALLS = (
    "a collective between two steps is cut off when a rank dies, and nothing can catch its error there: make it in the "
    "step, before optimizer.step()"
)
BELOW = (
    "a collective below `with step:` belongs to its step, which is done again if a rank dies until then, from a copy "
    "of the state before it; move it into the block, before optimizer.step(), and none is kept"
)


def _folder(file: str | Path) -> tuple[str, ...]:
    """The folder of ``file`` as the interpreter writes it in frames, and without symbolic links."""
    return tuple(f"{p.parent}{os.sep}" for p in (Path(file), Path(file).resolve()))


_LIBRARIES = _folder(torch.__file__) + _folder(Path(__file__).parent)
_DECORATORS = frozenset(("typing_extensions", "functools", "contextlib"))
"""Modules whose functions are around others: no place of a call's own."""


class StrayCollectiveWatch:
    """Tells of the first operation that the training thread makes while it is watched.

    Args:
        notify: gets the text.
        harmless: whether the operation is one that a rank's death costs nothing.
        check: raises StepInterrupted in the body of a step that has been stopped. (That collectives fail there is an
            Exception, which a script may catch.)
        calls: steps are a framework's calls.
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        harmless: Callable[[], bool],
        check: Callable[[], None],
        *,
        calls: bool,
    ) -> None:
        self._notify = notify
        self._harmless = harmless
        self._check = check
        self._advice = BETWEEN_CALLS if calls else BELOW
        self._told = False
        self._watches = False

    @property
    def told(self) -> bool:
        """The script communicates there."""
        return self._told

    def start(self) -> None:
        groups.set_outside_hook(self._called)

    def watch(self, on: bool) -> None:
        """The script is between two steps from now on, or not any more."""
        if self._told:
            return
        self._watches = on
        groups.watch_outside(on)

    def _called(self, group: str, operation: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._check()
        if self._told or not self._watches or self._harmless():
            return
        self._told = True
        groups.watch_outside(False)
        self._notify(f"{operation} at {line_of_script(sys._getframe(1))}: {self._advice}")


def line_of_script(frame: FrameType | None) -> str:
    """File and line of the innermost frame of the script's own, also where a framework has made the call for it;
    without one, as :func:`script_line`."""
    own = next(frames(frame), None)
    return script_line(frame) if own is None else f"{own.f_code.co_filename}:{own.f_lineno}"


def script_line(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        around = frame.f_globals.get("__name__") in _DECORATORS
        if not around and not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"

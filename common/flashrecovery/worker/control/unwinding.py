"""What helps a step that has been stopped out of a script that catches its interruption and begins again.

``except BaseException: continue`` (or ``except:``) in a loop of the script's own around its forward pass would go on
for ever. So from a certain number of interruptions on, the next one is raised within the handler itself, where the
``try`` that it belongs to does not catch it. Where that does not help, the process ends, with the line of the script.
"""

from __future__ import annotations

import ast
import functools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from flashrecovery.errors import StepInterrupted
from flashrecovery.worker.script_checks.stray_collectives import line_of_script
from flashrecovery.worker.script_text.script_frames import frames, tree_of

PATIENCE = 5
"""Interruptions of one attempt that may be caught: handlers and `finally` may call a model, too."""
_MOST, _LONGEST_S = 200, 3.0
"""With more of them, and over a longer time, an attempt never ends."""


class Unwinding:
    """Counts the interruptions of one attempt of a step.

    Args:
        give_up: called with a text in the place of an interruption that would be caught as all before it.
    """

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._count = 0
        self._began = 0.0
        self._traced: list[FrameType] = []

    def interrupts(self) -> None:
        """Called in the training thread before StepInterrupted is raised there."""
        self._count += 1
        if self._count == 1:
            self._began = time.monotonic()
        if self._count % PATIENCE == 0 and sys.gettrace() is None:
            self._trace()
        if self._count > _MOST and time.monotonic() - self._began > _LONGEST_S:
            self._give_up(
                f"{line_of_script(sys._getframe(1))} has caught {self._count} interruptions of a step that is to be "
                "done again, and starts it again each time: catch Exception there, or re-raise everything else"
            )

    def over(self) -> None:
        """The attempt has been left."""
        self._count = 0
        if self._traced:
            sys.settrace(None)
            for frame in self._traced:
                frame.f_trace = None
            self._traced.clear()

    def _trace(self) -> None:
        for frame in frames(sys._getframe(1)):
            frame.f_trace = self._at_line
            self._traced.append(frame)
        sys.settrace(_no_calls)

    def _at_line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line" and frame.f_lineno in _handlers(frame.f_code.co_filename):
            raise StepInterrupted
        return self._at_line


def _no_calls(*_: Any) -> None:
    """A function that is called meanwhile is not looked into."""


@functools.lru_cache(maxsize=64)
def _handlers(file: str) -> frozenset[int]:
    """The lines of a file that are in an ``except`` clause."""
    tree = tree_of(file)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)] if tree is not None else []
    return frozenset(line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))

"""What a script gets for each step: ``with step:``."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Protocol

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.consumers import step_entered
from flashrecovery.worker.overhead import Overhead


class Protected(Protocol):
    """What a step needs of the loop."""

    @property
    def overhead(self) -> Overhead:
        """What recovery takes of each step."""

    def entered(self, frame: FrameType) -> None:
        """The script has come to ``with step:``, in ``frame``."""

    def begin(self) -> None:
        """The body of a step begins."""

    def end(self, error: BaseException | None) -> bool:
        """The body of a step is over. Returns True if ``error`` was only the consequence of a stop."""


class Step:
    """One optimizer step, as a context. Its body may be handed out again after a failure."""

    def __init__(self, index: int, loop: Protected | None) -> None:
        self.index = index
        self._loop = loop
        self._entered = False

    def __enter__(self) -> Step:
        if self._entered:
            raise RegistrationError(
                f"step {self.index} is entered twice; use `with step:` once for each step handed out"
            )
        self._entered = True
        if self._loop is not None:
            frame = sys._getframe(1)
            step_entered(frame)
            with self._loop.overhead:
                self._loop.entered(frame)
                self._loop.begin()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if self._loop is None:
            return False
        with self._loop.overhead:
            return self._loop.end(exc)

    def __index__(self) -> int:
        return self.index

    def __repr__(self) -> str:
        return f"Step({self.index})"

    @property
    def entered(self) -> bool:
        return self._entered

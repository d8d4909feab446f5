"""What a script gets for each step: ``with step:``."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Protocol

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.control.overhead import Overhead
from flashrecovery.worker.data.consumers import step_entered
from flashrecovery.worker.exit.undisturbed import undisturbed


class Protected(Protocol):
    """What a step needs of the loop. A protocol, as it lies above, and yields the step."""

    @property
    def overhead(self) -> Overhead:
        """What recovery takes of each step."""

    def entered(self, frame: FrameType) -> None:
        """The script has come to ``with step:``, in ``frame``."""

    def begin(self) -> None:
        """The body of a step begins."""

    def end(self, error: BaseException | None) -> bool:
        """The body of a step is over. Returns True if ``error`` was only the consequence of a stop."""

    @property
    def void(self) -> bool:
        """Whether what the script does now belongs to no version."""


class Step:
    """One optimizer step, as a context. Its body may be yielded again after a failure."""

    def __init__(self, index: int, loop: Protected | None) -> None:
        self.index = index
        self._loop = loop
        self._entered = False
        self._left = False
        self._counted: bool | None = None  # once the script has asked for its next step

    def __enter__(self) -> Step:
        if self._entered:
            raise RegistrationError(f"step {self.index} is entered twice; use `with step:` once for each step yielded")
        self._entered = True
        if self._loop is not None:
            frame = sys._getframe(1)
            step_entered(frame)
            with self._loop.overhead:
                self._loop.entered(frame)
                self._loop.begin()
        return self

    @undisturbed
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if self._loop is None:
            self._left = exc_type is None
            return False
        with self._loop.overhead:
            goes_on = self._loop.end(exc)
        self._left = goes_on
        return goes_on

    def __index__(self) -> int:
        return self.index

    def __repr__(self) -> str:
        return f"Step({self.index})"

    @property
    def entered(self) -> bool:
        return self._entered

    @property
    def committed(self) -> bool:
        """Whether this attempt of the step counts, for what the script does below the block: logs, files, a registry.

        False in the block and above it, and below the block of an attempt that was stopped: its values are half-made,
        and the step is yielded again. Also from the first collective below the block on that no peer has answered.
        True below any other block, and always there without recovery. (A step that counts here is still done again,
        with the same bits, if another rank has died before it had completed the step.)
        """
        if self._counted is not None:
            return self._counted
        return self._left and (self._loop is None or not self._loop.void)

    def over(self) -> None:
        """The script has asked for its next step."""
        self._counted = self.committed

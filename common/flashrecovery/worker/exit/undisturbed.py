"""What may not be interrupted by an error of a data loader's worker."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_undisturbed: set[CodeType] = set()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def undisturbed(method: _Method) -> _Method:
    """While this is being done in the training thread, no handler of the data loader's raises."""
    _undisturbed.add(method.__code__)
    return method


class Outside:
    """A handler of SIGCHLD. torch's raises for each data loader's worker that has been killed, wherever the training
    thread is just then, perhaps where it deals with the error to which the death of the first one has led.

    Args:
        quiet: whether none is to raise now.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any], quiet: Callable[[], bool]) -> None:
        self._handler = handler
        self._quiet = quiet

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._quiet():
            return
        at = frame
        while at is not None:
            if at.f_code in _undisturbed:
                return  # the loader finds out itself when it is asked for the next batch
            at = at.f_back
        self._handler(number, frame)

"""What is shown of an error that ends a script: where in the script, without the frames around that."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from flashrecovery.errors import FlashRecoveryError

_PACKAGE = Path(__file__).resolve().parents[1]
_OURS = tuple({f"{_PACKAGE}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}"})


def text_of(error: BaseException) -> str:
    """As :func:`traceback.format_exception` has it, without frames of this package around and within the script's. Of
    an error that this package raises on purpose what matters is the line of the script that has led to it: the frames
    of libraries inside of it and the errors that it was made of are left out, too."""
    shown = traceback.TracebackException.from_exception(error)
    purpose = isinstance(error, FlashRecoveryError)
    if purpose:
        shown.__cause__ = shown.__context__ = None
    one: traceback.TracebackException | None = shown
    while one is not None:
        one.stack = _of_script(one.stack, to_ours=purpose)
        one = one.__cause__ or one.__context__
    return "".join(shown.format())


def place_of(error: BaseException) -> str:
    """``file.py:line`` of the innermost frame of the script; "" if there is none."""
    from flashrecovery.worker.preimport.own_files import is_own_file

    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _of_script(stack: traceback.StackSummary, *, to_ours: bool) -> traceback.StackSummary:
    if not stack:
        return stack
    ours = [frame.filename.startswith(_OURS) for frame in stack]
    if all(ours) or (ours[-1] and not to_ours):  # an error of this package's own: all of it is needed
        first = 0 if all(ours) else ours.index(False)
        return traceback.StackSummary.from_list(stack[first:])
    if to_ours and ours[-1]:  # and what has called it from a library, as torch calls hooks
        last = max((i for i, f in enumerate(stack) if not (ours[i] or _is_torch(f.filename))), default=len(stack))
        stack, ours = traceback.StackSummary.from_list(stack[: last + 1]), ours[: last + 1]
    kept = [frame for frame, own in zip(stack, ours, strict=True) if not own]
    return traceback.StackSummary.from_list(kept)


def _is_torch(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" in file

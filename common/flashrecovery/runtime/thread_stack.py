"""Where another thread is, without holding references to any of its objects.

``sys._current_frames()`` returns the frames themselves. If the thread returns from one of them meanwhile, the
function's local variables are destroyed when the *observing* thread drops the frame, and in that thread. They can
include guards of torch (``torch._tensor_str`` keeps one in a variable). Each guard resets the state of the thread that
made it, through a pointer, whichever thread destroys it, and in the middle of that thread's next operation. torch 2.13
then raises "the tensor already had autograd metadata", or silently goes wrong. :mod:`faulthandler` writes files, lines
and names with the GIL held, and creates no frame object.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FILE, _LINE = '  File "', '", line '
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
"""How :mod:`faulthandler` writes what is not ASCII."""


@dataclass(frozen=True)
class StackPlace:
    """One frame of a stack.

    Attributes:
        line: None where what is executed belongs to no line.
    """

    file: str
    line: int | None
    function: str


def thread_stack(thread_id: int) -> list[StackPlace]:
    """Where the thread with this :func:`threading.get_ident` is, innermost first, at most 100 frames. Empty if there is
    none such among the newest 100 threads. Takes 0.1 to 0.4 ms, in which no Python code runs."""
    return places_in(stack_text(thread_id))


def stack_text(thread_id: int) -> str:
    """The same as text. Makes nothing that Python's garbage collector counts (texts and numbers only): the thread that
    makes the object that is one too many collects, and destroys what is the training thread's."""
    fd = os.memfd_create("flashrecovery-stack", os.MFD_CLOEXEC)
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        text = os.pread(fd, os.lseek(fd, 0, os.SEEK_CUR), 0).decode("ascii", "replace")
    finally:
        os.close(fd)
    begin = text.find("hread 0x%016x " % thread_id)  # noqa: UP031 - "Thread" or "Current thread"; a format is an object
    if begin < 0:
        return ""
    end = text.find("\n\n", begin)
    return text[begin:] if end < 0 else text[begin:end]


def places_in(text: str) -> list[StackPlace]:
    """What :func:`stack_text` has written down."""
    places = []
    for line in text.splitlines():
        if frame := _FRAME.match(line):
            number = None if frame[2] == "???" else int(frame[2])
            places.append(StackPlace(_unescaped(frame[1]), number, _unescaped(frame[3])))
    return places


def first_line(text: str, passed_by: Callable[[str], bool]) -> tuple[str, int] | None:
    """From the text of :func:`stack_text`: the innermost file and line, except skipped files, and
    what is executed there and belongs to no line. As careful with objects as that."""
    end = 0
    while (begin := text.find(_FILE, end)) >= 0:
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        quote = text.rfind(_LINE, begin, end)
        number = text[quote + len(_LINE) : text.find(" ", quote + len(_LINE), end)]
        file = text[begin + len(_FILE) : quote]
        if "\\" in file:
            file = _unescaped(file)
        if number != "???" and not passed_by(file):
            return file, int(number)
    return None


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(next(filter(None, found.groups())), 16)), text)

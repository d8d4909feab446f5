"""What can be seen of the training thread's tensors while it is *between two operations*.

A copy that is made beside the script counts only if the script has changed nothing meanwhile, which the tensors'
version counters tell. But an operation writes first and counts afterwards, without the interpreter's lock: a thread
that looks in that moment sees memory that has been written, and a counter that has not moved. So the look itself is
made by the training thread, where no operation of its can be under way: from the interpreter's queue of pending calls,
which the main thread serves between two bytecodes, or wherever the training thread waits for the copies anyway.

The main thread may also be held up in a single call, even by a peer that waits for this very copy. So there is a bound,
after which the look is made all the same: no operation of a script writes to its weights for so long. One that is
itself written in Python is not waited for at all.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [_CALLBACK, ctypes.py_object]
_add_pending_call.restype = ctypes.c_int


class _Question:
    """One look that is wanted. Answered once; nothing in it may wait, for it is answered in the midst of anything."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self._answers: SimpleQueue[int | BaseException] = SimpleQueue()
        self._asked = True

    def answer(self) -> None:
        """In the training thread."""
        if self._asked:
            self._asked = False
            try:
                self._answers.put(self._look())
            except Exception as e:  # noqa: BLE001 - kept for the thread that has asked
                self._answers.put(e)

    def wait(self, bound_s: float) -> int:
        try:
            found = self._answers.get(timeout=bound_s)
        except Empty:
            return self._look()
        if isinstance(found, BaseException):
            raise found
        return found


class Between:
    """Safe points of one training thread."""

    def __init__(self) -> None:
        self._question: _Question | None = None
        self._resting = 0

    def ask(self, look: Callable[[], int], bound_s: float) -> int:
        """Call ``look()`` between two operations of the training thread, or after ``bound_s`` seconds, and return its
        result. To be called by another thread."""
        question = _Question(look)
        self._question = question
        if self._resting:  # the training thread looks for a question when it begins to rest
            question.answer()
        else:
            _pend(question)
        found = question.wait(bound_s)
        self._question = None
        return found

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """The training thread waits for copies, or makes one itself, and changes nothing meanwhile."""
        self._resting += 1
        question = self._question
        if question is not None:
            question.answer()
        try:
            yield
        finally:
            self._resting -= 1


def _pend(question: _Question) -> None:
    """Have the main thread answer as soon as it is between two bytecodes. If its queue is full, the training thread
    answers when it waits for copies."""
    _pending.append(question)
    _add_pending_call(_answer_all, None)


def _answer(_nothing: object) -> int:
    while _pending:
        _pending.pop().answer()
    return 0


_pending: list[_Question] = []
_answer_all = _CALLBACK(_answer)

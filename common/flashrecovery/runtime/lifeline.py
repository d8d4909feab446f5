"""Notice the death of a process at once, without polling: a robust mutex in its page, held for life by its main thread.

When a thread ends, however it ends, the kernel hands its robust mutexes to the threads that wait for them, *before* it
frees the process's memory. A big killed process stays visible to pidfd and to its sockets for 50 ms to 2 s after that
moment. (``exit_mm_release`` comes before ``mmput`` in the kernel's ``do_exit``; "robust futexes" in its documentation.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

LIFELINE_OFFSET = 2048
"""The offset of the mutex in the page's header."""
_HEADER = 4096
_PROCESS_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Lifeline:
    """One mapping of the mutex in the page ``fd``. The one process holds it, the other waits for its end."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _HEADER)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map, LIFELINE_OFFSET)
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def make(self) -> None:
        """Make the mutex in a new page, before any process uses it."""
        attributes = ctypes.create_string_buffer(64)  # pthread_mutexattr_t has 4 bytes on glibc
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._mutex, attributes))

    def hold(self) -> None:
        """The calling thread holds it from now on, to its end; a process calls it in its main thread."""
        # Never unmapped, not even by the interpreter's own end: the kernel walks to it when the thread is gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._anchor))
        if _libc.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD:
            _check(_libc.pthread_mutex_consistent(self._mutex))

    def held(self) -> bool:
        """Whether the other process holds it by now, or did until it ended."""
        code = _libc.pthread_mutex_trylock(self._mutex)
        if code in (0, errno.EOWNERDEAD):  # after an owner's death this leaves it cut for ever
            _check(_libc.pthread_mutex_unlock(self._mutex))
        return bool(code)

    def cut(self, timeout_s: float) -> bool:
        """Waits until the holder has ended; False if it lives after ``timeout_s``."""
        until = time.time() + timeout_s
        limit = _Timespec(int(until), int(until % 1 * 1e9))
        code: int = _libc.pthread_mutex_timedlock(self._mutex, ctypes.byref(limit))
        if code in (0, errno.EOWNERDEAD):
            # Let go of it (it stays cut for ever): this thread's list of robust mutexes must not lead into the mapping
            # that is about to be closed.
            _check(_libc.pthread_mutex_unlock(self._mutex))
        return code != errno.ETIMEDOUT

    def close(self) -> None:
        self._anchor = None
        self._map.close()


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))

"""Memory for a replacement's optimizer state, whose pages exist before they are needed.

A new page costs the kernel three times what it costs to copy a peer's bytes into it. How many bytes a rank's first step
has added is in its page (:meth:`.page.Page.set_grown_bytes`). The process that takes the rank over has the kernel make
as many pages, in a thread, while its script builds the model. In the restore they are moved (``mremap``) into tensors
that have just been allocated: these remain the allocator's, like any others. What is not needed is given back when the
job goes on.

Nothing is kept where memory is short: then pages are made when they are written, as always.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from functools import cache

from flashrecovery.runtime.host_memory import available_memory

LEAST = 1 << 20
"""Bytes of a tensor that is worth a separate mapping."""
WORTH_IT = 16 << 20
"""Bytes of a reserve that is worth a thread."""
_AT_ONCE = 64 << 20
_MOST_MOVES = 8192  # each makes a separate mapping; a process may have 65,530
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MREMAP_MAYMOVE_FIXED = 3
_MAP_FIXED_NOREPLACE = 0x100000
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mremap.restype, libc.mremap.argtypes = pointer, [pointer, size, size, ctypes.c_int, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc


def _map(address: int | None, nbytes: int, flags: int = 0) -> int:
    """New private memory without pages. Raises OSError."""
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found: int = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


class PageReserve:
    """The page reserve of one process. Its thread makes pages until there are ``nbytes``, or memory becomes short."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self._nbytes = nbytes // _PAGE * _PAGE
        self._begin = _map(None, self._nbytes)
        self._lock = threading.Lock()
        self._ready = self._taken = self._moves = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="flashrecovery-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def filled(self) -> int:
        """Bytes that are there, once no more will come."""
        self._thread.join()
        return self._ready

    def _fill(self) -> None:
        while self._ready < self._nbytes and not self._stop.is_set():
            left = self._nbytes - self._ready
            nbytes = min(_AT_ONCE, left)
            if available_memory() < 2 * left:
                return
            if _libc().madvise(self._begin + self._ready, nbytes, _MADV_POPULATE_WRITE) != 0:
                return
            with self._lock:
                self._ready += nbytes

    def back(self, address: int, nbytes: int) -> range:
        """Have these bytes of this process's private memory backed by pages of the reserve, as far as they go. Returns
        which of them, counted from ``address``: their content is lost, and they are zero."""
        begin = -(-address // _PAGE) * _PAGE
        with self._lock:
            length = min((address + nbytes) // _PAGE * _PAGE - begin, self._ready - self._taken)
            if length < LEAST // 2 or self._moves == _MOST_MOVES:
                return range(0)
            source = self._begin + self._taken
            if _libc().mremap(source, length, length, _MREMAP_MAYMOVE_FIXED, begin) == _FAILED:
                self._moves = _MOST_MOVES
                _map_if_unmapped(begin, length)
                return range(0)
            self._taken += length
            self._moves += 1
            return range(begin - address, begin - address + length)

    def close(self) -> None:
        """Give the rest back."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            if self._taken < self._nbytes:
                _libc().munmap(self._begin + self._taken, self._nbytes - self._taken)
            self._taken = self._ready = self._nbytes


def _map_if_unmapped(begin: int, nbytes: int) -> None:
    """The kernel takes away what was there before it moves pages. Raises OSError."""
    try:
        _map(begin, nbytes, _MAP_FIXED_NOREPLACE)
    except OSError as e:
        if e.errno != errno.EEXIST:
            raise


_reserve: PageReserve | None = None


def begin(nbytes: int) -> None:
    """Make a reserve for this process, if that is worth it and there is memory."""
    global _reserve
    if nbytes < WORTH_IT or _reserve is not None:
        return
    try:
        reserve = PageReserve(nbytes)
    except OSError:
        return
    _reserve = reserve
    reserve.start()


def back(address: int, nbytes: int) -> range:
    """:meth:`PageReserve.back` of this process's reserve; none without one."""
    return range(0) if _reserve is None else _reserve.back(address, nbytes)


def end() -> None:
    """The job goes on: what is left is given back."""
    global _reserve
    if _reserve is not None:
        _reserve.close()
        _reserve = None

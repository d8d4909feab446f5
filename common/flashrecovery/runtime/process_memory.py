"""Memory of another process of this host, read without its doing (``process_vm_readv``, Linux 3.2).

The kernel asks for what a debugger needs: the same user, and with Yama's ``ptrace_scope`` 1 (Ubuntu's default) that the
process read from has declared its reader. Containers may refuse the call. All of these are an OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

_PR_SET_PTRACER = 0x59616D61
_MADV_POPULATE_WRITE = 23
_WORTH_IT = 64 << 10
_AT_ONCE = 1024  # ranges of one call (UIO_MAXIOV)

_declaring = threading.Lock()


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def read(pid: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Copy ``ranges``, each (address here, address in process ``pid``, bytes).

    Raises OSError: then parts of it may have been copied.
    """
    left = [r for r in ranges if r[2]]
    while left:
        now = left[:_AT_ONCE]
        here = (_Range * len(now))(*(_Range(to, n) for to, _, n in now))
        there = (_Range * len(now))(*(_Range(source, n) for _, source, n in now))
        got = _libc().process_vm_readv(pid, here, len(now), there, len(now), 0)
        if got <= 0:
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, f"process_vm_readv of process {pid}: {os.strerror(code)}")
        left = _behind(left, got)


def _behind(ranges: Sequence[tuple[int, int, int]], done: int) -> list[tuple[int, int, int]]:
    """The rest of ``ranges`` after that many bytes."""
    for number, (to, source, nbytes) in enumerate(ranges):
        if done < nbytes:
            return [(to + done, source + done, nbytes - done), *ranges[number + 1 :]]
        done -= nbytes
    return []


@contextmanager
def declared(pid: int) -> Iterator[bool]:
    """Let process ``pid`` read this one's memory, with Yama. False: another one is declared at the moment.

    What had been declared before is lost, so this is for where ``pid`` has been refused.
    """
    if not _declaring.acquire(blocking=False):
        yield False
        return
    try:
        done = _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0  # EINVAL without Yama
        yield done
        if done:
            _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    finally:
        _declaring.release()


def make_present(address: int, nbytes: int) -> None:
    """Have the kernel back these bytes with memory at once (Linux 5.14), which is cheaper than one fault a page.

    Content stays. Where all of it is there already, or it cannot be done, nothing happens.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    begin = -(-address // page) * page
    length = (address + nbytes) // page * page - begin
    if length >= _WORTH_IT and not _is_present(begin, length, page):
        _libc().madvise(begin, length, _MADV_POPULATE_WRITE)


def _is_present(begin: int, length: int, page: int) -> bool:
    """Whether all of these pages are present: asking costs a fraction of making them present again."""
    pages = length // page
    found = ctypes.create_string_buffer(pages)
    return _libc().mincore(begin, length, found) == 0 and b"\0" not in found.raw

"""Keeps the kernel from swapping out what the snapshot process holds. Only of use where there is swap space.

A copy that has been swapped out is read from disk page by page when a recovery needs it, or when the next version is
written over it. Memory that processes share stays in memory as long as one of them has it locked; ranks come and go, so
this one does it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path

from flashrecovery.snapshot.memory import HEADER, SharedMemory

PIECE = 16 << 20
"""Bytes that are locked at a time: some milliseconds, in which no request is answered."""
_CAP_IPC_LOCK = 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def has_swap(swaps: Path = Path("/proc/swaps")) -> bool:
    """Whether this host has swap space."""
    return swaps.exists() and len(swaps.read_text().splitlines()) > 1


def lock_limit() -> int | None:
    """Bytes that a process like this one may lock; None: as many as there are."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


class Locking:
    """Locks one memory after another, piece by piece.

    Args: wanted: whether a memory is held still. say: what to do with an error; nothing is locked after it.
    """

    def __init__(self, wanted: Callable[[SharedMemory], bool], say: Callable[[str], None]) -> None:
        self._wanted, self._say = wanted, say
        self._waiting: deque[SharedMemory] = deque()
        self._done = 0  # of the first one, bytes

    @property
    def busy(self) -> bool:
        """Whether something is left to be locked."""
        return bool(self._waiting)

    def add(self, memory: SharedMemory) -> None:
        """Lock its content soon. It stays locked until this process has closed it."""
        self._waiting.append(memory)

    def step(self) -> None:
        """Lock one piece more."""
        memory = self._waiting[0]
        left = HEADER + memory.nbytes - self._done
        if left <= 0 or not self._wanted(memory):
            self._waiting.popleft()
            self._done = 0
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory.map)) + self._done
        if _libc.mlock(address, min(left, PIECE)):
            why = os.strerror(ctypes.get_errno())
            self._say(f"snapshots may be swapped out: {self._done} of {HEADER + memory.nbytes} bytes are locked: {why}")
            self._waiting.clear()
            self._done = 0
            return
        self._done += PIECE

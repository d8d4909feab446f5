"""Host memory that another process of the same host can map, and that outlives the process that made it.

A memfd has no name, so nothing can be left behind; another process opens it through ``/proc/<pid>/fd`` while its maker
lives, and keeps it from then on. The first bytes say which version the content is, so that a process that maps the
memory of a dead process knows whether that had begun to overwrite it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import xxhash

_HEADER = 64
"""Bytes before the content: the version (int64), and padding to a cache line."""


@cache
def host_id() -> int:
    """63 bits, equal for processes that see each other in /proc and share one network (hence one failure domain)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return xxhash.xxh3_64_intdigest(f"{boot}{spaces}".encode()) >> 1


@dataclass(frozen=True)
class MemoryAddress:
    """Where a :class:`SharedMemory` can be found: process, file descriptor there, inode, size in bytes, host."""

    pid: int
    fd: int
    inode: int
    size: int
    host: int


class SharedMemory:
    """``nbytes`` of memory with a version word.

    Attributes:
        content: uint8 tensor of shape (nbytes,).
        address: where its maker has it.
    """

    def __init__(self, fd: int, address: MemoryAddress) -> None:
        """Takes ``fd`` over."""
        self._fd = fd
        self._map = mmap.mmap(fd, address.size)
        self._word = memoryview(self._map)[:8].cast("q")
        self.content = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER)
        self.address = address

    @staticmethod
    def create(nbytes: int) -> SharedMemory:
        """New memory, version 0. Raises OSError. ``nbytes`` > 0."""
        fd = os.memfd_create("flashrecovery-copy", os.MFD_CLOEXEC)
        size = _HEADER + nbytes
        os.ftruncate(fd, size)
        return SharedMemory(fd, MemoryAddress(os.getpid(), fd, os.fstat(fd).st_ino, size, host_id()))

    @staticmethod
    def open(address: MemoryAddress) -> SharedMemory | None:
        """The memory that another process has made; None if it cannot be reached from here."""
        if address.host != host_id():
            return None
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone, or not permitted
            return None
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (address.inode, address.size):
            os.close(fd)
            return None
        return SharedMemory(fd, address)

    @property
    def version(self) -> int:
        """The version of the content; -1 while it is being overwritten."""
        return self._word[0]

    @version.setter
    def version(self, value: int) -> None:
        self._word[0] = value

    def __del__(self) -> None:
        # The mapping ends with the last tensor that uses it.
        os.close(self._fd)

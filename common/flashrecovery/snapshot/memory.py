"""Host memory that another process can map, and that outlives the process that made it.

A memfd has no name, so nothing can be left behind. Another process of the host opens it through ``/proc/<pid>/fd``
while its maker lives, or is given its file descriptor, and keeps it from then on. The first words say which version the
content is, so that a process that maps the memory of a dead one knows whether that had begun to overwrite it.

The content may be followed by *notes*: a few bytes that change with every version and are needed to use it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xxhash

HEADER = 64
"""Bytes before the content: version, bytes of content, bytes of notes, their digest (int64), and padding."""
NOTES_LIMIT = 1280 << 20
"""Bytes that notes can take. Only what is written takes memory."""
_VERSION, _CONTENT, _NOTES, _DIGEST = range(4)
_ALIGN = mmap.PAGESIZE


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
    """Memory with a version word.

    Attributes:
        fd: this process's file descriptor of it, which belongs to this object.
        map: all of it; the content begins at :data:`HEADER`.
        nbytes: of the content.
        address: where its maker has it.
    """

    def __init__(self, fd: int, address: MemoryAddress) -> None:
        """Takes ``fd`` over."""
        self.fd = fd
        self.map = mmap.mmap(fd, address.size)
        self._words = memoryview(self.map)[:HEADER].cast("q")
        self.nbytes = self._words[_CONTENT]
        self.address = address

    @staticmethod
    def create(nbytes: int, *, notes: bool = False) -> SharedMemory:
        """New memory, version 0, with room for ``nbytes`` (>= 0) of content, and for notes. Raises OSError."""
        fd = os.memfd_create("flashrecovery-copy", os.MFD_CLOEXEC)
        size = _notes_at(nbytes) + NOTES_LIMIT if notes else HEADER + nbytes
        os.ftruncate(fd, size)
        os.pwrite(fd, nbytes.to_bytes(8, "little"), 8 * _CONTENT)
        return SharedMemory(fd, _address(fd))

    @staticmethod
    def of(fd: int) -> SharedMemory | None:
        """What another process has made and given. Takes ``fd`` over. None if it is no memory of this kind."""
        address = _address(fd)
        content = int.from_bytes(os.pread(fd, 8, 8 * _CONTENT), "little", signed=True)
        if address.size < HEADER or not 0 <= content <= address.size - HEADER:
            os.close(fd)
            return None
        return SharedMemory(fd, address)

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
        return self._words[_VERSION]

    @version.setter
    def version(self, value: int) -> None:
        self._words[_VERSION] = value

    def write_notes(self, data: bytes) -> bool:
        """False, and no notes, if they are too long. To be called while the version is -1."""
        self._words[_NOTES] = 0
        if len(data) > NOTES_LIMIT:
            return False
        at = _notes_at(self.nbytes)
        self.map[at : at + len(data)] = data
        self._words[_DIGEST] = xxhash.xxh3_64_intdigest(data) >> 1
        self._words[_NOTES] = len(data)
        return True

    def read_notes(self) -> bytes | None:
        """None if there are none, or they are not what was written."""
        at, length = _notes_at(self.nbytes), self._words[_NOTES]
        if not 0 < length <= self.address.size - at:
            return None
        data = self.map[at : at + length]
        return data if xxhash.xxh3_64_intdigest(data) >> 1 == self._words[_DIGEST] else None

    def parts(self) -> tuple[tuple[int, int], ...]:
        """Where something has been written: (beginning, bytes) of header and content, and of the notes."""
        return (0, HEADER + self.nbytes), (_notes_at(self.nbytes), self._words[_NOTES])

    def __del__(self) -> None:
        # The mapping ends with the last view of it.
        os.close(self.fd)


def _address(fd: int) -> MemoryAddress:
    status = os.fstat(fd)
    return MemoryAddress(os.getpid(), fd, status.st_ino, status.st_size, host_id())


def _notes_at(nbytes: int) -> int:
    return -(-(HEADER + nbytes) // _ALIGN) * _ALIGN

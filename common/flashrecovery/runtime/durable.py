"""Files and folders that are whole or not there, also after a power cut."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What file systems answer that cannot exchange two names (NFS, for one)."""


def write_durably(path: Path, data: bytes) -> None:
    """Atomically: the file is either absent (or old) or whole, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.rename(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """What has been made, renamed and removed in this folder is durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def put_folder_in_place(new: Path, path: Path, aside: Path) -> Path | None:
    """The folder ``new`` becomes ``path``; returns where the folder is that was there, None if none was.

    The two names are exchanged in one operation, where the file system can do that. Where it cannot, what was there
    goes to ``aside`` first. A process that is killed right then leaves ``new`` and ``aside``, both whole, and no
    ``path``. Raises OSError.
    """
    if not path.exists():
        os.rename(new, path)
        return None
    if _exchange(new, path):
        return new
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except FileNotFoundError:
        if not path.exists():  # else a reader has finished this
            raise
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """False if that cannot be done here."""
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """Linux's system call, from glibc 2.28 on; None if there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        found.restype = ctypes.c_int
    return found

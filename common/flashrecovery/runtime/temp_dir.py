"""Where a rank's processes have the sockets of ``multiprocessing``: in one directory, which its agent removes.

A worker of a data loader sends tensors by a socket in its own directory, and removes that at its end. One that is
killed together with its rank does not come to its end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing import util


def path_of(number: int) -> str:
    """As long as Python's own: the path of a socket may have 107 bytes."""
    return os.path.join(tempfile.gettempdir(), f"pymp-{number:08x}")


def use(path: str) -> None:
    """In this process, and in those that it forks. The directory is made with the first socket."""

    def get_temp_dir() -> str:
        os.makedirs(path, 0o700, exist_ok=True)
        return path

    util.get_temp_dir = get_temp_dir


def remove(path: str) -> None:
    """With what is in it. Nothing happens if it is not there."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)

"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


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

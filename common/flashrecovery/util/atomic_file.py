"""A file's content is exchanged as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str, mode: int | None = None) -> None:
    """A reader sees the old content or the new one, also after a crash of the machine. ``mode``: permissions; None:
    those of any new file. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
    with open(descriptor, "w") as f:
        if mode is not None:
            os.fchmod(f.fileno(), mode)
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)

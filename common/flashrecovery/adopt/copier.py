"""Copies what a rank's processes print into their logs to this process's standard output, byte for byte."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PERIOD_S = 0.1
_LAST_LOOKS = 10
"""How often a log is still read after its process was replaced: what that one wrote before it was killed may come
late."""
_LAST_S = 10.0
"""Longest wait, at the end, for a reader of the standard output that is slow."""
_CHUNK = 1 << 20


@dataclass
class _Followed:
    file: BinaryIO
    looks: int | None = None
    """How many more; None: it is the present one."""


class Copier:
    """A thread of its own: a launcher that reads slowly holds up nothing else."""

    def __init__(self) -> None:
        self._files: list[_Followed] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrecovery-copier", daemon=True)
        self._thread.start()

    def follow(self, path: Path) -> None:
        """From now on this log is copied, and those before are on their last lines."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)  # a standby has not made it yet
        followed = _Followed(open(descriptor, "rb"))  # noqa: SIM115 - see _look()
        with self._lock:
            for before in self._files:
                if before.looks is None:
                    before.looks = _LAST_LOOKS
            self._files.append(followed)

    def close(self) -> None:
        """Copy everything written so far, then stop. If the reader is gone, nothing more is copied."""
        self._over.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        try:
            while not self._over.wait(_PERIOD_S):
                self._look()
            self._look()
        except OSError:
            pass  # the reader is gone; the log files themselves are complete

    def _look(self) -> None:
        with self._lock:
            files = [*self._files]
        for followed in files:
            while data := followed.file.read(_CHUNK):
                _write(data)
            if followed.looks is not None:
                followed.looks -= 1
                if followed.looks < 0:
                    followed.file.close()
                    with self._lock:
                        self._files.remove(followed)


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]

"""Show the log files of chosen ranks live on the terminal, each line behind its rank."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PERIOD_S = 0.2
_LAST_LOOKS = 5
"""How often a log is still read after its process was replaced: what the process wrote before it was killed may come
late."""


@dataclass
class _Followed:
    label: str
    file: BinaryIO | None = None
    rest: bytes = b""
    looks: int | None = None
    """How many more; None: for as long as the job runs."""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class LogTail:
    """Follows files that training processes write themselves (so nothing is lost when the agent dies).

    Made before any process is started: what is in ``folder`` by then is an earlier launch's, and not shown again.
    """

    def __init__(self, folder: Path) -> None:
        self._before = {path: path.stat().st_size for path in folder.glob("*.log")}
        self._files: dict[Path, _Followed] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self, path: Path, label: str) -> None:
        """Print what this launch writes to ``path``. A file that had the same label so far is not followed any
        more."""
        if path in self._files:
            return
        for followed in self._files.values():
            if followed.label == label and followed.looks is None:
                followed.looks = _LAST_LOOKS
        self._files[path] = _Followed(label)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.flush()
            self._drop_ended()
            await asyncio.sleep(_PERIOD_S)

    def _drop_ended(self) -> None:
        for path, followed in list(self._files.items()):
            if followed.looks is not None:
                followed.looks -= 1
                if followed.looks < 0:
                    followed.close()
                    del self._files[path]

    def flush(self) -> None:
        """Print what is new."""
        for path, followed in self._files.items():
            if followed.file is None:
                try:
                    followed.file = open(path, "rb")  # noqa: SIM115 - see close()
                    followed.file.seek(self._before.get(path, 0))
                except FileNotFoundError:
                    continue
            data = followed.file.read()
            if not data:
                continue
            *lines, followed.rest = (followed.rest + data).split(b"\n")
            for line in lines:
                print(f"{followed.label} {line.decode(errors='replace')}")
            sys.stdout.flush()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.flush()
        for followed in self._files.values():
            followed.close()

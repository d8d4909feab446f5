"""Show the log files of chosen ranks live on the terminal, each line behind its rank."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PERIOD_S = 0.2


@dataclass
class _Followed:
    label: str
    file: BinaryIO | None = None
    rest: bytes = b""


class LogTail:
    """Follows files that training processes write themselves (so nothing is lost when the agent dies)."""

    def __init__(self) -> None:
        self._files: dict[Path, _Followed] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self, path: Path, label: str) -> None:
        self._files.setdefault(path, _Followed(label))
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.flush()
            await asyncio.sleep(_PERIOD_S)

    def flush(self) -> None:
        """Print what is new."""
        for path, followed in self._files.items():
            if followed.file is None:
                try:
                    followed.file = open(path, "rb")  # noqa: SIM115 - closed in close()
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
            if followed.file is not None:
                followed.file.close()

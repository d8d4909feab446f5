"""Show the log files of chosen ranks live on the terminal, each line behind its rank."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path


class LogTail:
    """Follows files that training processes write themselves (so nothing is lost when the agent dies)."""

    def __init__(self, period_s: float = 0.1) -> None:
        self._period = period_s
        self._files: dict[Path, tuple[str, int, bytes]] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self, path: Path, label: str) -> None:
        self._files.setdefault(path, (label, 0, b""))
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.flush()
            await asyncio.sleep(self._period)

    def flush(self) -> None:
        """Print what is new."""
        for path, (label, offset, rest) in list(self._files.items()):
            try:
                with open(path, "rb") as f:
                    f.seek(offset)
                    data = f.read()
            except FileNotFoundError:
                continue
            if not data:
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                print(f"{label} {line.decode(errors='replace')}")
            sys.stdout.flush()
            self._files[path] = (label, offset + len(data), rest)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.flush()

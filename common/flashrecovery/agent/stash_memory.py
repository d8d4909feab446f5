"""The directory in a node's memory for state that outlives its workers while the job is laid out in another way.

It is named after this process, and goes with it. If this process is killed, the next agent on the machine that may need
such a directory removes what was left: whose process is no more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flashrecovery.errors import ConfigError
from flashrecovery.runtime.environment import STASH_ENV

ROOT = Path("/dev/shm")
_PREFIX = "flashrecovery-stash"


class StashMemory:
    """Of one agent. ``root``: in memory."""

    def __init__(self, root: Path = ROOT) -> None:
        """Raises ConfigError if there is no such memory."""
        if not os.access(root, os.W_OK):
            raise ConfigError(f"replan: {root}, where the state is kept while the layout changes, cannot be written")
        self.path = root / f"{_PREFIX}-{os.getuid()}-{os.getpid()}-{_started(os.getpid())}"
        for left in root.glob(f"{_PREFIX}-{os.getuid()}-*-*"):
            pid, _, started = left.name.removeprefix(f"{_PREFIX}-{os.getuid()}-").partition("-")
            if pid.isdecimal() and _started(int(pid)) != started:
                shutil.rmtree(left, ignore_errors=True)
        try:
            self.path.mkdir(mode=0o700)
        except OSError as e:
            raise ConfigError(f"replan: {self.path} cannot be made: {e.strerror}") from e

    def env(self) -> Mapping[str, str]:
        """For the workers."""
        return {STASH_ENV: str(self.path)}

    def drop(self) -> None:
        """What is there is of no use any more."""
        for old in self.path.glob("*"):
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """The agent ends."""
        shutil.rmtree(self.path, ignore_errors=True)


def _started(pid: int) -> str:
    """When a process has started, in the kernel's ticks; "" if it is no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

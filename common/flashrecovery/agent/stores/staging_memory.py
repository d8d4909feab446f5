"""The directory in a node's memory for state that outlives its workers while the job changes its parallelism.

It is named after this process, which keeps it locked and removes it at exit. If this process is killed, the next agent
on the machine that may need such a directory removes the leftovers: unlocked directories. (A pid would not tell:
containers may share this memory but not their pids.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flashrecovery.errors import ConfigError
from flashrecovery.runtime.environment import STAGING_ENV

ROOT = Path("/dev/shm")
_PREFIX = "flashrecovery-staging"


class StagingMemory:
    """The staging memory of one agent. ``root``: in memory."""

    def __init__(self, root: Path = ROOT) -> None:
        """Raises ConfigError if there is no such memory."""
        if not os.access(root, os.W_OK):
            raise ConfigError(
                f"parallelism: {root}, where the state is kept while the layout changes, cannot be written"
            )
        self.path = root / f"{_PREFIX}-{os.getuid()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        making = root / f".{self.path.name}"
        for left in root.glob(f"{_PREFIX}-{os.getuid()}-*-*"):
            _remove_if_left(left)
        try:
            making.mkdir(mode=0o700)
            self._lock = os.open(making, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            making.rename(self.path)  # others look at it only from here on
        except OSError as e:
            raise ConfigError(f"parallelism: {self.path} cannot be made: {e.strerror}") from e

    def env(self) -> Mapping[str, str]:
        """For the workers."""
        return {STAGING_ENV: str(self.path)}

    def drop(self) -> Callable[[], None]:
        """Hide the contents, which are no longer needed. Returns a function that frees the memory. It takes a second
        for each few GB, so call it on a thread that nothing waits for."""
        gone = self.path / f".dropped-{uuid.uuid4().hex[:8]}"
        for old in self.path.glob("[!.]*"):
            gone.mkdir(mode=0o700, exist_ok=True)
            old.rename(gone / old.name)
        return partial(shutil.rmtree, gone, ignore_errors=True)

    def close(self) -> None:
        """The agent ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_if_left(path: Path) -> None:
    """Its agent is no more."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # it has just gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its agent lives
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)

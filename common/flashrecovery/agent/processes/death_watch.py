"""Notice the death of a process within a millisecond, whatever its size, and without polling.

One thread for each process waits for the end of its lifeline (:mod:`flashrecovery.runtime.lifeline`); the pidfd is the
second, slower witness, for a process that dies before it holds its lifeline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flashrecovery.agent.processes.procfs import is_exiting
from flashrecovery.runtime.lifeline import Lifeline

_UNHELD_S = 0.02
"""Pace of the look whether a starting process holds its lifeline."""
_WAIT_S = 1.0
"""Longest single wait, so that a watch that is closed ends its threads."""

log = logging.getLogger("flashrecovery")


@dataclass
class _Watched:
    pid: int
    lifeline: Lifeline
    pidfd: int
    callback: Callable[[float], None]
    over: threading.Event


class DeathWatch:
    """Calls back on the event loop, once a process, with the seconds since the kernel told of its death."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, _Watched] = {}

    def add(self, pid: int, page_fd: int, callback: Callable[[float], None]) -> None:
        """Watch the child ``pid``, which holds the lifeline in the page ``page_fd``."""
        watched = _Watched(pid, Lifeline(page_fd), os.pidfd_open(pid), callback, threading.Event())
        self._watched[pid] = watched
        self._loop.add_reader(watched.pidfd, self._dead, watched, None)
        threading.Thread(target=self._wait, args=(watched,), name=f"flashrecovery-lifeline-{pid}", daemon=True).start()

    def _wait(self, watched: _Watched) -> None:
        lifeline = watched.lifeline
        while not watched.over.is_set() and not lifeline.held():
            watched.over.wait(_UNHELD_S)
        while not watched.over.is_set():
            if lifeline.cut(_WAIT_S):
                if is_exiting(watched.pid):
                    self._tell(watched)
                else:
                    log.warning("process %d has replaced its program; its end is seen by its pidfd only", watched.pid)
                break
        lifeline.close()

    def _tell(self, watched: _Watched) -> None:
        if not watched.over.is_set():
            self._loop.call_soon_threadsafe(self._dead, watched, time.monotonic())

    def _dead(self, watched: _Watched, since: float | None) -> None:
        """Runs on the loop. A death has two witnesses; for the second one there is nothing left to do."""
        if self._watched.pop(watched.pid, None) is None:
            return
        self._forget(watched)
        watched.callback(0.0 if since is None else time.monotonic() - since)

    def _forget(self, watched: _Watched) -> None:
        watched.over.set()
        self._loop.remove_reader(watched.pidfd)
        os.close(watched.pidfd)

    def close(self) -> None:
        """No callback is made any more. Threads end with their process, or after at most a second."""
        while self._watched:
            self._forget(self._watched.popitem()[1])

"""Notice the death of a process within milliseconds, whatever its size.

One thread looks at the open ``/proc/<pid>/statm`` of every watched process each few milliseconds (about 2 us a look);
pidfd is the second, slower witness for what /proc may miss.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flashrecovery.agent.procfs import Statm


@dataclass
class _Watched:
    pid: int
    statm: Statm
    pidfd: int
    seen_alive: float
    callback: Callable[[float], None]


class DeathWatch:
    """Calls back on the event loop, once a process, with the seconds between its last sign of life and now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        self._loop = loop
        self._period = period_s
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrecovery-deathwatch", daemon=True)
        self._thread.start()

    def add(self, pid: int, callback: Callable[[float], None]) -> None:
        pidfd = os.pidfd_open(pid)
        watched = _Watched(pid, Statm(pid), pidfd, time.monotonic(), callback)
        with self._lock:
            self._watched[pid] = watched
        self._loop.add_reader(pidfd, self._dead, watched)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            with self._lock:
                for watched in self._watched.values():
                    if watched.statm.dead():
                        self._loop.call_soon_threadsafe(self._dead, watched)
                    else:
                        watched.seen_alive = time.monotonic()

    def _dead(self, watched: _Watched) -> None:
        """On the loop; the second witness finds nothing left to do."""
        with self._lock:
            if self._watched.pop(watched.pid, None) is None:
                return
            watched.statm.close()
        self._loop.remove_reader(watched.pidfd)
        os.close(watched.pidfd)
        watched.callback(time.monotonic() - watched.seen_alive)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        with self._lock:
            left, self._watched = list(self._watched.values()), {}
        for watched in left:
            watched.statm.close()
            self._loop.remove_reader(watched.pidfd)
            os.close(watched.pidfd)

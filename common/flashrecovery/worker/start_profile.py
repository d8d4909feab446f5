"""Where a replacement's time goes before its first step: which lines of the script take how long.

Recovery waits for a replacement's way to its first step, which the script's author can make faster, once it is known
what takes the time. A thread looks at the training thread's stack every few milliseconds, and counts for the innermost
line of the script's own code; what libraries do there counts for the line that called them.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.ahead import Installed

PERIOD_S = 0.01
LEAST_S = 0.03
"""A line that took less is not worth a look."""
MOST = 5
_TEXT = 80


class StartProfile:
    """Of the thread that makes it, from :meth:`start` to :meth:`stop`."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        self._thread_id = threading.get_ident()
        self._seconds: dict[tuple[str, int], float] = defaultdict(float)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="flashrecovery-start-profile", daemon=True)
        self._thread.start()

    def stop(self) -> list[pb.StartLine]:
        """The lines that took longest, longest first. Idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])[:MOST]
        return [
            pb.StartLine(
                where=f"{Path(file).name}:{line}",
                text=linecache.getline(file, line).strip()[:_TEXT],
                seconds=seconds,
            )
            for (file, line), seconds in longest
            if seconds >= LEAST_S
        ]

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(PERIOD_S):
            frame = sys._current_frames().get(self._thread_id)
            now = time.monotonic()
            place = self._own_line(frame)
            if place is not None:
                self._seconds[place] += now - before
            before = now

    def _own_line(self, frame: FrameType | None) -> tuple[str, int] | None:
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith("<") and not self._installed.has_file(name):
                return name, frame.f_lineno
            frame = frame.f_back
        return None

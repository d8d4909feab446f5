"""A sampling profile of the time before the end of the first step: which lines of the script take how long.

The launch, and every recovery, waits for this time. The script's author can make it shorter once its cause is known,
and a user looking at a job that does not train yet wants to know what it waits for. A thread samples the stack of the
training thread and attributes each sample to the innermost line of the script's own code; time in libraries counts for
the line that called them. The first step is included: that is where models are compiled.

A sample keeps no reference to objects of the training thread (:mod:`flashrecovery.runtime.thread_stack`), and allocates
next to nothing that the garbage collector counts. Otherwise collections would start in the sampling thread whenever the
training thread waits, and that thread would destroy the script's reference cycles, some of which hold objects that
belong to their thread.
"""

from __future__ import annotations

import linecache
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import TAG_NONE, Page
from flashrecovery.runtime.thread_stack import first_line, places_in, stack_text
from flashrecovery.worker.preimport.preimport import Installed

PERIOD_S = 0.01
"""The period in a replacement, for which all others wait; longer if a look takes more than a hundredth of it."""
LAUNCH_PERIOD_S = 0.1
FIRST_STEP_PERIOD_S = 0.25
LEAST_S = 0.03
"""A line that took less is not worth a look."""
MOST = 5
TELL_S = 10.0
"""A line that takes this long is reported while it runs, and again whenever it has taken :data:`_MORE` times as
long."""
_MORE = 6
_SELDOM, _LONGEST_PERIOD_S = 1e-4, 1.0
_AT_MOST = 0.01
"""The part of its time for which a thread may be kept waiting by looks at it."""
_TEXT = 80

Tell = Callable[[str, float], None]
"""Takes the line and what is called there, and for how many seconds the thread has been there."""


class StartProfile:
    """The profile of the thread that makes it, from :meth:`start` to :meth:`joined`, and if ``tell`` is given, on to
    its first commit on ``page``."""

    def __init__(
        self, installed: Installed, page: Page | None = None, tell: Tell | None = None, period_s: float = PERIOD_S
    ) -> None:
        self._installed = installed
        self._page = page
        self._tell = tell
        self._period_s = period_s
        self._thread_id = threading.get_ident()
        self._seconds: dict[tuple[str, int], float] = defaultdict(float)
        self._over = False
        self._wake = threading.Lock()  # held until it is over; an Event's wait makes objects that are counted
        self._thread: threading.Thread | None = None
        self._there: tuple[tuple[str, int] | None, float, float] = (None, 0.0, 0.0)  # place, since, told next after

    def start(self) -> None:
        self._wake.acquire()
        self._thread = threading.Thread(target=self._run, name="flashrecovery-start-profile", daemon=True)
        self._thread.start()

    def joined(self) -> list[pb.StartLine]:
        """The process has come to its first step. The lines that took longest, longest first. Idempotent."""
        if not self._over and self._thread is not None:
            self._over = True
            self._wake.release()
            self._thread.join()
            self._thread = None
            if self._tell is not None and self._page is not None:
                name, page = "flashrecovery-first-step", self._page
                threading.Thread(target=self._first_step, args=(page,), name=name, daemon=True).start()
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])[:MOST]
        return [
            pb.StartLine(where=_where(place), text=_line(place), seconds=seconds)
            for place, seconds in longest
            if seconds >= LEAST_S
        ]

    def _run(self) -> None:
        before = began = time.monotonic()
        period_s, passed_by = self._period_s, self._passed_by
        wait_s = period_s
        while not self._wake.acquire(timeout=wait_s):
            busy = time.thread_time()
            stack = stack_text(self._thread_id)
            period_s = _larger(self._period_s, (time.thread_time() - busy) / _AT_MOST)
            now = time.monotonic()
            line = first_line(stack, passed_by)
            if line is not None:
                self._seconds[line] += now - before
            self._look(line, stack, now)
            before = now
            # a script that never reaches a protected step is sampled more and more rarely
            seldom_s = (now - began) * _SELDOM
            wait_s = _larger(period_s, seldom_s if seldom_s < _LONGEST_PERIOD_S else _LONGEST_PERIOD_S)

    def _first_step(self, page: Page) -> None:
        """While it lasts; before it, this process waits for the others."""
        while page.tag == TAG_NONE:
            time.sleep(FIRST_STEP_PERIOD_S)
        began_at, passed_by = page.committed, self._passed_by
        self._there = (None, 0.0, 0.0)
        while page.committed == began_at:
            time.sleep(FIRST_STEP_PERIOD_S)
            stack = stack_text(self._thread_id)
            self._look(first_line(stack, passed_by), stack, time.monotonic())

    def _look(self, place: tuple[str, int] | None, stack: str, now: float) -> None:
        """Tell of a line that takes long."""
        there, since, told_after = self._there
        if place != there:
            self._there = (place, now, TELL_S)
        elif place is not None and now - since >= told_after and self._tell is not None:
            self._there = (place, since, told_after * _MORE)
            innermost = places_in(stack)[0]
            inside = f", in {innermost.function} of {_short(innermost.file)}"
            self._tell(f"{_where(place)} {_line(place)}{inside}", now - since)

    def _passed_by(self, file: str) -> bool:
        return file.startswith("<") or self._installed.has_file(file)


def _larger(one: float, other: float) -> float:
    """``max`` makes an object that counts."""
    return one if one > other else other


def _where(place: tuple[str, int]) -> str:
    return f"{Path(place[0]).name}:{place[1]}"


def _line(place: tuple[str, int]) -> str:
    return linecache.getline(*place).strip()[:_TEXT]


def _short(file: str) -> str:
    """``torch/nn/functional.py``: the last folders of a long path."""
    return "/".join(Path(file).parts[-3:])

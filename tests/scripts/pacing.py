"""How long a step of a test's script takes: that many milliseconds longer, and until the test lets it end
(:meth:`tests.support.jobs.RunningJob.hold`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_FILE = os.environ.get("FLASHRECOVERY_TEST_PACE")


def take_time(milliseconds: float, step: int) -> None:
    """To be called in each step, within what is made again when a rank is lost."""
    time.sleep(milliseconds / 1e3)
    while step >= _held_at():
        time.sleep(0.02)


def _held_at() -> float:
    """The first step that may not end yet."""
    if _FILE is None:
        return float("inf")
    try:
        return float(Path(_FILE).read_text())
    except FileNotFoundError:
        return float("inf")

"""Forks one child after the other, and ends this process where one of them is stuck."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NoReturn

CHILD_S = 20.0


def fork_until(deadline: float, child: Callable[[], NoReturn]) -> int:
    """Until then (CLOCK_MONOTONIC seconds); how many ``child`` has run in, to its end with code 0. The first one that
    does not come so far is named, and ends everything with code 1."""
    forks = 0
    while time.monotonic() < deadline:
        pid = os.fork()
        if pid == 0:
            child()
        forks += 1
        until = time.monotonic() + CHILD_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                os.write(1, f"stuck: child {forks}\n".encode())
                os._exit(1)
            time.sleep(0.001)
        if ended[1] != 0:
            os.write(1, f"child {forks} ended with {ended[1]}\n".encode())
            os._exit(1)
    return forks

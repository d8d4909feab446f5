"""Processes that SIGKILL does not end: frozen by the kernel's first freezer, they are in state D, as one is that waits
for a mount or a driver."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")


def available() -> bool:
    """Whether this process may make a group there."""
    return (FREEZER / "cgroup.procs").exists() and os.access(FREEZER, os.W_OK)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process stands still within this block, whatever it is sent; behind it, it takes what it was sent."""
    group = FREEZER / f"flashrecovery-test-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        _become(group, "FROZEN")
        yield
    finally:
        _become(group, "THAWED")
        deadline = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            for left in (group / "cgroup.procs").read_text().split():  # of those that live on
                (FREEZER / "cgroup.procs").write_text(left)
            time.sleep(0.01)
        group.rmdir()


def _become(group: Path, state: str) -> None:
    deadline = time.monotonic() + 30
    while (group / "freezer.state").read_text().strip() != state:
        (group / "freezer.state").write_text(state)
        assert time.monotonic() < deadline, f"{group} does not become {state}"
        time.sleep(0.001)

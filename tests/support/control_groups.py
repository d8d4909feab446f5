"""Control groups that limit memory, for tests; version 1 or 2, whichever may be made here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashrecovery.runtime.host_memory import memory_groups

_ROOT = Path("/sys/fs/cgroup")
_WHERE = (_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Path]:
    """The directory of a group whose processes get so much memory; without processes again at the end. Skips the test
    where no group can be made."""
    group = _made(nbytes)
    if group is None:
        pytest.skip("no control group that limits memory can be made here")
    try:
        yield group
    finally:
        group.rmdir()


def _made(nbytes: int) -> Path | None:
    for top, limit in _WHERE:
        group = top / f"flashrecovery-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(nbytes))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


@contextmanager
def inside(group: Path) -> Iterator[None]:
    """Whatever this process starts is in the group."""
    before = [g for g in memory_groups(Path("/proc/self/cgroup").read_text(), _ROOT) if g.is_relative_to(group.parent)]
    back = next(g for g in [*before, group.parent] if g.exists())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (back / "cgroup.procs").write_text(str(os.getpid()))

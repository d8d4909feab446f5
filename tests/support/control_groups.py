"""Control groups that limit memory, for tests; version 1 or 2, whichever may be made here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_WHERE = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Path]:
    """The directory of a group whose processes get so much memory; without processes again at the end. Skips the test
    where no group can be made."""
    for top, limit in _WHERE:
        group = Path(top) / f"flashrecovery-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(nbytes))
        except OSError:
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no control group can be made here")


@contextmanager
def inside(group: Path) -> Iterator[None]:
    """Whatever this process starts is in the group."""
    top = group.parent
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (top / "cgroup.procs").write_text(str(os.getpid()))

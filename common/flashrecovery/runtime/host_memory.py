"""How much host memory there is, and whether the system may take it away again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Limit and use in control groups of version 2 and 1."""
_GIVEN_BACK = ("inactive_file", "active_file")
"""Pages of files, which the kernel gives back before anybody is refused memory."""


def available_memory() -> int:
    """Bytes that new allocations can have: the machine's, or what this process's control groups leave."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for group in memory_groups(Path("/proc/self/cgroup").read_text(), _CONTROL_GROUPS):
        for limit, current in _FILES:
            files = [group / name for name in (limit, current, "memory.stat")]
            if all(file.exists() for file in files):
                left = left_by_control_group(*(file.read_text() for file in files))
                free = free if left is None else min(free, left)
    return free


def memory_groups(membership: str, root: Path) -> Iterator[Path]:
    """The directories of a process's control groups that may limit its memory, with those above them.

    Args:
        membership: what stands in ``/proc/<pid>/cgroup``. A container may see itself at the top, whatever stands there.
        root: where the control groups are mounted.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.strip("/")
        while group != top:
            yield group
            group = group.parent
        yield top


def left_by_control_group(limit: str, current: str, stat: str) -> int | None:
    """Bytes; None without a limit. The arguments: what stands in ``memory.max``, ``memory.current`` and ``memory.stat``
    of version 2 of control groups, or in the files that version 1 has for them."""
    if not limit.strip().isdigit():
        return None
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines())
    # Version 1 counts the groups below apart: `total_` is with them, as the other numbers are.
    given_back = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in _GIVEN_BACK)
    return int(limit) - int(current) + given_back

"""How much host memory there is."""

from __future__ import annotations

from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_GIVEN_BACK = ("inactive_file", "active_file")
"""Pages of files, which the kernel gives back before anybody is refused memory."""


def available_memory() -> int:
    """Bytes that new allocations can have: the machine's, or what the control group leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    files = [_CONTROL_GROUP / name for name in ("memory.max", "memory.current", "memory.stat")]
    if all(file.exists() for file in files):
        left = left_by_control_group(*(file.read_text() for file in files))
        free = free if left is None else min(free, left)
    return free


def left_by_control_group(limit: str, current: str, stat: str) -> int | None:
    """Bytes, from what stands in ``memory.max``, ``memory.current`` and ``memory.stat`` (control groups, version 2);
    None without a limit."""
    if not limit.strip().isdigit():
        return None
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines())
    return int(limit) - int(current) + sum(int(counts.get(name, 0)) for name in _GIVEN_BACK)

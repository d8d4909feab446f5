"""NVSwitches of the node, by the kernel's log: NVML does not report their errors. :mod:`.sxid` says what they mean."""

from __future__ import annotations

import os
from pathlib import Path

from flashrecovery.health.findings import HealthFinding
from flashrecovery.health.sxid import judge, parse

LOG = Path("/dev/kmsg")
SWITCHES = "nvidia-nvswitch[0-9]*"
"""The driver's device files."""
_RECORD = 8192
_MOST_RECORDS = 1000
"""Of one look; a storm must not keep the look from its end."""


class NvSwitches:
    """Reads what the kernel has logged since the last look. ``log``: opened, without waiting."""

    def __init__(self, log: int) -> None:
        self._log = log

    def look(self) -> list[HealthFinding]:
        """What has happened since the last one."""
        found = [judge(sxid) for line in self._lines() if (sxid := parse(line)) is not None]
        return [finding for finding in found if finding is not None]

    def close(self) -> None:
        """Give the log back."""
        os.close(self._log)

    def _lines(self) -> list[str]:
        """Each read gives one record; EPIPE: some were overwritten before they were read."""
        lines: list[str] = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._log, _RECORD)
            except BrokenPipeError:
                continue
            except BlockingIOError:
                break
            if not record:
                break
            lines.append(record.decode("utf-8", "replace"))
        return lines


def find() -> NvSwitches | None:
    """None without switches, or where this process may not read the log (``kernel.dmesg_restrict`` without
    CAP_SYSLOG, a container without the device)."""
    return open_log(LOG) if any(Path("/dev").glob(SWITCHES)) else None


def open_log(path: Path) -> NvSwitches | None:
    """From its end on: what the node had before this job is none of its findings."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (PermissionError, FileNotFoundError):
        return None
    os.lseek(log, 0, os.SEEK_END)
    return NvSwitches(log)

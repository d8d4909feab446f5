"""The host, read from /proc, /sys and the clocks. :mod:`.node` says what the values mean.

A file that is not there (no PSI in the kernel, no control group) leaves its value unknown; a look takes about a
millisecond.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from flashrecovery.health.findings import HealthContext, HealthFinding
from flashrecovery.health.node import Disk, Interface, NodeReading, judge

_STA_UNSYNC = 0x40
_TIME_ERROR = 5
_ERROR_COUNTERS = ("rx_errors", "tx_errors")
_PORT_COUNTERS = ("symbol_error", "port_rcv_errors", "link_downed")


class HostPlugin:
    """Watches memory, disk, clock and network of this node. ``proc`` and ``sys``: where the kernel's trees are."""

    name = "host"

    def __init__(self, run_dir: Path, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._run_dir = run_dir
        self._proc = proc
        self._sys = sys
        self._start: NodeReading | None = None
        self._before: NodeReading | None = None

    def health(self) -> list[HealthFinding]:
        now = self.read()
        self._start = self._start or now
        findings = judge(self._start, self._before or now, now)
        self._before = now
        return findings

    def close(self) -> None:
        """Nothing is held."""

    def read(self) -> NodeReading:
        """One look."""
        return NodeReading(
            at=time.monotonic(),
            pressure=parse_pressure(_text(self._proc / "pressure" / "memory")),
            oom_kills=tuple(self._oom_kills()),
            disk=_disk(self._run_dir),
            synchronised=clock_synchronised(),
            wall_offset=time.time() - time.monotonic(),
            interfaces=(*self._interfaces(), *self._ports()),
        )

    def _oom_kills(self) -> list[tuple[str, int]]:
        """Processes that the kernel has killed for want of memory: on the machine, and in this process's control group
        (version 2, and the memory controller of version 1)."""
        files = [("vmstat", self._proc / "vmstat")]
        for line in _text(self._proc / "self" / "cgroup").splitlines():
            _, controllers, group = line.split(":", 2)
            below = group.lstrip("/")
            if not controllers:
                files.append(("memory.events", self._sys / "fs" / "cgroup" / below / "memory.events"))
            elif "memory" in controllers.split(","):
                files.append(
                    ("memory.oom_control", self._sys / "fs" / "cgroup" / "memory" / below / "memory.oom_control")
                )
        counts = ((name, parse_count(_text(path), "oom_kill")) for name, path in files)
        return [(name, count) for name, count in counts if count is not None]

    def _interfaces(self) -> list[Interface]:
        """All but loopback (ARPHRD 772)."""
        found = []
        for folder in _folders(self._sys / "class" / "net"):
            if _text(folder / "type").strip() != "772":
                up = _text(folder / "operstate").strip() == "up"
                found.append(Interface(folder.name, up, _sum(folder / "statistics", _ERROR_COUNTERS)))
        return found

    def _ports(self) -> list[Interface]:
        """InfiniBand and RoCE ports."""
        found = []
        for device in _folders(self._sys / "class" / "infiniband"):
            for port in _folders(device / "ports"):
                up = _text(port / "state").partition(":")[0].strip() == "4"  # "4: ACTIVE"
                found.append(Interface(f"{device.name}/{port.name}", up, _sum(port / "counters", _PORT_COUNTERS)))
        return found


def create(context: HealthContext) -> HostPlugin:
    return HostPlugin(context.run_dir)


def parse_pressure(text: str) -> float | None:
    """The 10 s average of the line ``full`` of a PSI file, in percent."""
    for line in text.splitlines():
        kind, *pairs = line.split()
        if kind == "full":
            values = dict(pair.split("=", 1) for pair in pairs)
            return float(values["avg10"])
    return None


def parse_count(text: str, key: str) -> int | None:
    """The value of a line ``key value``."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


class _Timex(ctypes.Structure):
    """struct timex up to ``status``; the rest only has its size."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 24),
    )


def clock_synchronised() -> bool | None:
    """Does the kernel's clock follow a time source? None if the kernel does not say."""
    timex = _Timex()  # modes = 0: only read
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    return state != _TIME_ERROR and not timex.status & _STA_UNSYNC


def _disk(path: Path) -> Disk | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Disk(found.f_bavail * found.f_frsize, bool(found.f_flag & os.ST_RDONLY))


def _text(path: Path) -> str:
    """ "" for a file that is not there, or gives an error (as ``carrier`` does of an interface that is off)."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _sum(folder: Path, names: tuple[str, ...]) -> int:
    texts = (_text(folder / name).strip() for name in names)
    return sum(int(text) for text in texts if text.isdigit())

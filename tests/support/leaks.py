"""What the processes of a job use after each recovery, and whether it grows with the number of recoveries.

The slope over all recoveries counts, not the two ends: a descriptor every tenth recovery is nothing in a short job and
the end of a long one. The first recoveries of a process do not count (caches fill, arenas are made). Resident memory
takes much longer than all else to settle: three survivors of 196 recoveries grew by 6 MiB in the first 20, by 1 to 2
MiB in the next 100, and by nothing that can be told from noise in the last 80.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression

LEAST = 40
"""So many recoveries must a process have survived to be judged, not counting the first ones."""
SETTLING = {"rss_mib": 100}
OTHERS_SETTLING = 10
"""So many recoveries do not count, by what grows."""
LIMITS = {"fds": 0.05, "threads": 0.05, "maps": 0.05, "shared": 0.05, "rss_mib": 0.05, "files": 0.05, "keys": 0.05}
"""Growth in one recovery that is not allowed any more."""
LOOKS = 3


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment. ``shared``: descriptors and mappings of memory with a name (memfd, /dev/shm)."""

    fds: int
    threads: int
    maps: int
    shared: int
    rss_mib: float

    @staticmethod
    def of(pid: int) -> Usage:
        """Raises OSError if there is no such process any more."""
        process = Path(f"/proc/{pid}")
        maps = (process / "maps").read_text().splitlines()
        opened = [_link(fd) for fd in (process / "fd").iterdir()]
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Usage(
            fds=len(opened),
            threads=int(status["Threads"]),
            maps=len(maps),
            shared=sum("/memfd:" in x or "/dev/shm/" in x for x in (*opened, *maps)),
            rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        )

    @staticmethod
    def at_rest(pid: int) -> Usage:
        """The least of several looks: what is only there for a moment is no leak."""
        looks = []
        for _ in range(LOOKS):
            looks.append(asdict(Usage.of(pid)))
            time.sleep(0.02)
        return Usage(**{name: min(look[name] for look in looks) for name in looks[0]})


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def files_of(pids: Iterable[int]) -> int:
    """How many files in /dev/shm have the number of one of these processes in their names, as torch's have."""
    wanted = {str(pid) for pid in pids}
    return sum(not wanted.isdisjoint(name.split("_")) for name in os.listdir("/dev/shm"))


@dataclass
class Growth:
    """What was seen of each subject (a process, or something that all share), by the number of the recovery."""

    seen: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)

    def look(self, subject: str, recovery: int, usage: Usage | Mapping[str, float]) -> None:
        self.seen.setdefault(subject, {})[recovery] = asdict(usage) if isinstance(usage, Usage) else dict(usage)

    def slopes(self, subject: str) -> dict[str, float]:
        """Growth in one recovery, by what grows; without what there were too few recoveries for."""
        looks = sorted(self.seen[subject].items())
        slopes = {}
        for name in looks[0][1]:
            counted = looks[SETTLING.get(name, OTHERS_SETTLING) :]
            if len(counted) >= LEAST:
                slopes[name] = linear_regression([n for n, _ in counted], [look[name] for _, look in counted]).slope
        return slopes

    def judged(self) -> list[str]:
        """The subjects that were there long enough."""
        return [subject for subject in self.seen if self.slopes(subject)]

    def leaks(self) -> list[str]:
        """In words what grows."""
        return [
            f"{subject}: {name} grows by {slope:.3f} in a recovery, more than {LIMITS[name]:g}"
            for subject in self.judged()
            for name, slope in self.slopes(subject).items()
            if slope > LIMITS[name]
        ]

    def table(self) -> str:
        """Of each judged subject what it had first and last, and the slopes."""
        lines = []
        for subject in self.judged():
            looks = sorted(self.seen[subject].items())
            (first, before), (last, after) = looks[0], looks[-1]
            lines.append(f"{subject}, recoveries {first} to {last}")
            for name, slope in self.slopes(subject).items():
                lines.append(f"    {name}: {before[name]:.1f} -> {after[name]:.1f}, {slope:+.4f} in a recovery")
        return "\n".join(lines)

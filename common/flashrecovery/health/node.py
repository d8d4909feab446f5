"""The node around the devices: what was read of it, and what that means. No I/O; :mod:`.host` reads.

Everything here is a warning. The processes that an OOM kill, a full disk or a lost interface hits are seen to die or to
hang anyway, and to kill the others would lose what they hold; but the node has earned its replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashrecovery.health.findings import HealthFinding, Severity

PRESSURE_PERCENT = 20.0
"""Share of the last 10 s in which every process waited for memory (PSI, full): training stands still that long."""
FREE_BYTES = 1 << 30
"""Less free space than this in the run directory: logs and events come to an end."""
CLOCK_JUMP_S = 1.0
"""Wall clock against monotonic clock between two looks; a clock that is slewed drifts by less than 1 ms/s."""
ERRORS_PER_S = 10.0
"""Errors of one network interface that are more than a single bad frame."""


@dataclass(frozen=True)
class Disk:
    """The file system of the run directory, in bytes."""

    free: int
    read_only: bool


@dataclass(frozen=True)
class Interface:
    """A network interface or an InfiniBand port: is it up, and how many receive and transmit errors has it had?"""

    name: str
    up: bool
    errors: int


@dataclass(frozen=True)
class NodeReading:
    """One look at the node. None: the kernel does not say.

    ``at``: monotonic seconds. ``pressure``: percent (PSI memory, full, avg10). ``oom_kills``: by where they were
    counted. ``synchronised``: does the kernel's clock follow a time source? ``wall_offset``: wall clock minus monotonic
    clock, seconds.
    """

    at: float
    pressure: float | None = None
    oom_kills: tuple[tuple[str, int], ...] = ()
    disk: Disk | None = None
    synchronised: bool | None = None
    wall_offset: float | None = None
    interfaces: tuple[Interface, ...] = ()


_Found = tuple[str, str, str, str]


def judge(start: NodeReading, before: NodeReading, now: NodeReading) -> list[HealthFinding]:
    """What is wrong with the node now. ``start``: the first look. ``before``: the last one."""
    found = [*_memory(before, now), *_disk(now), *_clock(start, before, now), *_network(start, before, now)]
    return [
        HealthFinding(Severity.WARNING, "host", subject, None, code, text, evidence)
        for subject, code, text, evidence in found
    ]


def _memory(before: NodeReading, now: NodeReading) -> Iterator[_Found]:
    if now.pressure is not None and now.pressure >= PRESSURE_PERCENT:
        yield "memory", "memory_pressure", "all processes wait for memory", f"PSI full avg10 = {now.pressure:g} %"
    last = dict(before.oom_kills)
    for where, count in now.oom_kills:
        more = count - last.get(where, count)
        if more > 0:
            yield "memory", "oom_kill", f"the kernel has killed {more} process(es) for memory", f"{where}: {count}"


def _disk(now: NodeReading) -> Iterator[_Found]:
    if now.disk is None:
        yield "disk", "disk_unreadable", "the run directory cannot be looked at", "statvfs fails"
    elif now.disk.read_only:
        yield "disk", "disk_read_only", "the run directory's file system is read-only", "ST_RDONLY"
    elif now.disk.free < FREE_BYTES:
        yield "disk", "disk_full", "the run directory's file system is almost full", f"{now.disk.free >> 20} MiB free"


def _clock(start: NodeReading, before: NodeReading, now: NodeReading) -> Iterator[_Found]:
    # A machine that never had a time source is none the worse for it; one that has lost it is.
    if start.synchronised and now.synchronised is False:
        yield "clock", "clock_unsynchronised", "the clock has lost its time source", "adjtimex: STA_UNSYNC"
    if before.wall_offset is not None and now.wall_offset is not None:
        jump = now.wall_offset - before.wall_offset
        if abs(jump) >= CLOCK_JUMP_S:
            yield "clock", "clock_jump", "the wall clock has jumped", f"{jump:+.3f} s against the monotonic clock"


def _network(start: NodeReading, before: NodeReading, now: NodeReading) -> Iterator[_Found]:
    present = {i.name: i for i in now.interfaces}
    last = {i.name: i for i in before.interfaces}
    for name in (i.name for i in start.interfaces if i.up):
        if name not in present:
            yield name, "interface_gone", "the interface is gone", "it was up at the start"
        elif not present[name].up:
            yield name, "interface_down", "the interface is down", "it was up at the start"
    seconds = max(now.at - before.at, 1.0)
    for interface in now.interfaces:
        more = interface.errors - last.get(interface.name, interface).errors
        if more / seconds >= ERRORS_PER_S:
            evidence = f"{more} in {now.at - before.at:.1f} s"
            yield interface.name, "interface_errors", "the interface has receive or transmit errors", evidence

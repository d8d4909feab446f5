"""One GPU: what was read of it, and what that means. No I/O; :mod:`.nvidia` reads.

Counters are judged by their increase since the last look, states by how they were at the start of the job: what a GPU
already had when the job was put on it (a remap failure of last month) is a warning, never fatal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashrecovery.health.findings import HealthFinding, Severity
from flashrecovery.health.xid import xid

LINK_ERRORS = 100
"""NVLink CRC and replay errors between two looks that are too many: single ones are corrected and usual."""
WINDOW_S = 600.0
"""A link that errs seldom but steadily slows every collective: its counters are judged over this time, too."""
WINDOW_ERRORS, WINDOW_RECOVERIES = 1000, 3
"""In a window, for one link."""


@dataclass(frozen=True)
class TemperatureLimits:
    """Temperatures in degrees Celsius; None: the GPU does not say."""

    slowdown: int | None = None
    shutdown: int | None = None


@dataclass(frozen=True)
class NvLink:
    """One NVLink: is it up, how often was it trained again, how many CRC errors and replays has it had?"""

    number: int
    up: bool
    recoveries: int | None = None
    errors: int | None = None


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU. None: the GPU or its driver does not say.

    ``lost`` and ``error``: the name of the NVML code that came in place of values (lost: of those codes that mean that
    the GPU is gone or has to be reset). ``throttle``: names of the hardware's reasons to clock down.
    """

    lost: str = ""
    error: str = ""
    xids: tuple[int, ...] = ()
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    temperature: int | None = None
    limits: TemperatureLimits = TemperatureLimits()
    throttle: tuple[str, ...] = ()
    links: tuple[NvLink, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU: the local rank that uses it, NVML's index of it, and its UUID ("" if it was lost before it said)."""

    device: int
    index: int
    uuid: str = ""

    @property
    def subject(self) -> str:
        return f"gpu {self.index} ({self.uuid or 'UUID unknown'})"


def judge(
    gpu: Gpu, start: GpuReading, before: GpuReading, now: GpuReading, oldest: GpuReading | None = None
) -> list[HealthFinding]:
    """What is wrong with ``gpu`` now. ``start``: the first look. ``before``: the last one."""
    found = [*_xids(now), *_gone(now)]
    if not now.lost and not now.error:
        found += [*_memory(start, before, now), *_heat(now), *_links(start, before, now), *_worn_links(oldest, now)]
    return [
        HealthFinding(severity, "nvidia", gpu.subject, gpu.device, code, text, evidence)
        for severity, code, text, evidence in found
    ]


_Found = tuple[Severity, str, str, str]


def _xids(now: GpuReading) -> Iterator[_Found]:
    for number in dict.fromkeys(now.xids):
        entry = xid(number)
        if entry.level.severity is not None:
            yield entry.level.severity, f"xid_{number}", entry.text, f"NVML event: XID {number}"


def _gone(now: GpuReading) -> Iterator[_Found]:
    if now.lost:
        yield Severity.FATAL, now.lost, "the GPU cannot be reached, or has to be reset", f"NVML error {now.lost}"
    elif now.error:
        yield Severity.WARNING, now.error, "the GPU cannot be read", f"NVML error {now.error}"


def _memory(start: GpuReading, before: GpuReading, now: GpuReading) -> Iterator[_Found]:
    more = _increase(before.uncorrected, now.uncorrected)
    if more:
        evidence = f"volatile counter {before.uncorrected} -> {now.uncorrected}"
        yield Severity.FATAL, "ecc_uncorrected", f"{more} uncorrectable memory error(s)", evidence
    if now.remap_failed:
        severity = Severity.WARNING if start.remap_failed else Severity.FATAL
        yield severity, "row_remap_failed", "a memory row could not be remapped", "remapped rows: failure"
    if now.remap_pending:
        yield Severity.WARNING, "row_remap_pending", "a memory row waits for a reset", "remapped rows: pending"


def _heat(now: GpuReading) -> Iterator[_Found]:
    if now.temperature is not None:
        slow, off = now.limits.slowdown, now.limits.shutdown
        evidence = f"{now.temperature} C; slows down at {slow} C, switches off at {off} C"
        if off is not None and now.temperature >= off:
            yield Severity.FATAL, "too_hot", "the GPU is about to switch itself off", evidence
        elif slow is not None and now.temperature >= slow:
            yield Severity.WARNING, "hot", "the GPU slows down: it is too hot", evidence
    for reason in now.throttle:
        yield Severity.WARNING, f"slowdown_{reason}", "the hardware holds the clocks down", f"reason: {reason}"


def _links(start: GpuReading, before: GpuReading, now: GpuReading) -> Iterator[_Found]:
    # Not fatal by themselves: links also rest to save power. An error that ends their use comes as XID 74.
    were_up = {link.number for link in start.links if link.up}
    last = {link.number: link for link in before.links}
    for link in now.links:
        name = f"NVLink {link.number}"
        if not link.up and link.number in were_up:
            yield Severity.WARNING, f"nvlink_{link.number}_down", f"{name} is down", "it was up at the start"
        if link.number not in last:
            continue
        recoveries = _increase(last[link.number].recoveries, link.recoveries)
        if recoveries:
            code = f"nvlink_{link.number}_recovery"
            yield Severity.WARNING, code, f"{name} had to be trained again", f"{recoveries} time(s)"
        errors = _increase(last[link.number].errors, link.errors)
        if errors >= LINK_ERRORS:
            code = f"nvlink_{link.number}_errors"
            yield Severity.WARNING, code, f"{name} has many transmission errors", f"{errors} since the last look"


def _worn_links(oldest: GpuReading | None, now: GpuReading) -> Iterator[_Found]:
    """``oldest``: of the last :data:`WINDOW_S` seconds."""
    then = {link.number: link for link in (oldest.links if oldest is not None else ())}
    for link in now.links:
        if link.number not in then:
            continue
        errors = _increase(then[link.number].errors, link.errors)
        recoveries = _increase(then[link.number].recoveries, link.recoveries)
        if errors >= WINDOW_ERRORS or recoveries >= WINDOW_RECOVERIES:
            text = f"NVLink {link.number} errs again and again"
            seen = f"{errors} errors, trained again {recoveries} time(s), within {WINDOW_S / 60:.0f} minutes"
            yield Severity.WARNING, f"nvlink_{link.number}_worn", text, seen


def _increase(before: int | None, now: int | None) -> int:
    """0 also if one of them is not known, or if the counter has begun again."""
    return max(0, now - before) if before is not None and now is not None else 0


def visible(setting: str | None, uuids: list[str]) -> list[int]:
    """The NVML indices of the GPUs that CUDA_VISIBLE_DEVICES shows, in CUDA's order.

    ``setting``: the variable's value, None if unset. ``uuids``: of all GPUs, by NVML index. As in CUDA, an entry that
    is no GPU ends the list. MIG instances count as that: they are not watched.
    """
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in shown:
            break
        shown += matches
    return shown

"""What the report of `make gpu-check` says of memory and of steps is right, no matter what plays the GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.gpu_costs import MemoryWatch, Overhead, Sample, lost_per_recovery, rates

GB = 1 << 30


def history(lost: list[int], *, pause_s: float = 1.0) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Recoveries that each lose that many bytes: while a rank is missing, less is taken."""
    samples: list[Sample] = []
    events: list[dict[str, Any]] = []
    now, taken = 100.0, 4 * GB
    for nbytes in lost:
        events.append({"event": "failure_detected", "time": now})
        samples += [(now + 0.1, taken - GB), (now + 0.5, taken - GB // 2)]
        taken += nbytes
        events.append({"event": "recovery_finished", "time": now + 0.6})
        samples += [(now + 0.6 + pause_s / 2, taken), (now + 0.6 + pause_s, taken)]
        now += 1.0 + pause_s
    events.append({"event": "job_finished", "time": now})
    return [*samples, (now + 0.1, 0)], events


def test_memory_that_each_recovery_loses_is_seen_and_what_the_first_one_makes_is_not() -> None:
    assert lost_per_recovery(*history([GB, 0, 0, 0])) == 0
    assert lost_per_recovery(*history([GB, 100, 100, 100])) == 100
    assert lost_per_recovery(*history([0, 0, 0, 300])) == 150


def test_too_few_recoveries_say_nothing() -> None:
    assert lost_per_recovery(*history([GB, GB])) is None
    assert lost_per_recovery(*history([])) is None
    samples, events = history([0, 0, 0])
    assert lost_per_recovery([], events) is None and lost_per_recovery(samples, []) is None


def test_the_watch_looks_until_it_is_left() -> None:
    with MemoryWatch(lambda: 7) as watch:
        deadline = time.monotonic() + 10
        while len(watch.samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(watch.samples)
    time.sleep(0.25)
    assert len(watch.samples) == count >= 2 and {taken for _, taken in watch.samples} == {7}


def test_the_first_steps_do_not_count() -> None:
    lines = [f"[rank0] step={i} loss=5.1 tokens/s={10 if i < 10 else 1000 + i}" for i in range(13)]
    assert rates("\n".join(["flashrecovery: 2 ranks", *lines])) == [1010.0, 1011.0, 1012.0]


def test_a_slower_job_has_longer_steps() -> None:
    assert Overhead(2, off=1010.0, on=1000.0).percent == pytest.approx(1.0)
    assert Overhead(2, off=1000.0, on=1000.0).percent == 0.0

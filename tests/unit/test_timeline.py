"""Steps over time in a bounded number of buckets: nothing is lost in the sums, whatever the length of the job."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flashrecovery.errors import ConfigError
from flashrecovery.observe.course import read_timeline
from flashrecovery.observe.timeline import (
    LIMIT,
    RECENT_LIMIT,
    RECENT_S,
    Band,
    Columns,
    Sample,
    Series,
    Timeline,
    TimelineFile,
    band_of,
)


def sample(at: float, version: int, *, passed: float = 1.0, step_s: float = 0.5, tokens: int = 1000) -> Sample:
    band = band_of({0: step_s, 1: 2 * step_s})
    return Sample(at, passed, version, tokens, band, band, (step_s, 2 * step_s))


def test_a_month_fits_into_the_same_buckets() -> None:
    timeline, seconds = Timeline(), 30 * 86_400
    timeline.went_to(0)
    every = 40  # a large job is looked at less often
    for at in range(0, seconds, every):
        timeline.add(sample(float(at), at // 2, passed=every))
    whole, recent = timeline.whole, timeline.recent
    assert LIMIT // 2 < len(whole.buckets) <= LIMIT and whole.width == 8192.0
    assert len(recent.buckets) <= RECENT_LIMIT and recent.width == RECENT_S
    assert min(recent.buckets) * RECENT_S >= seconds - RECENT_LIMIT * RECENT_S - every
    assert sum(b.steps for b in whole.buckets.values()) == (seconds - every) // 2
    assert sum(b.tokens for b in whole.buckets.values()) == 1000 * ((seconds - every) // 2)
    assert len(timeline.file().model_dump_json()) < 200_000


def test_a_million_steps_are_a_million_steps() -> None:
    timeline, version = Timeline(), 0
    timeline.went_to(0)
    draw = random.Random(0)
    while version < 1_000_000:
        version = min(version + draw.randrange(400), 1_000_000)
        timeline.add(sample(version / 100, version))
    assert sum(b.steps for b in timeline.whole.buckets.values()) == 1_000_000
    assert len(timeline.whole.buckets) <= LIMIT


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5000), st.integers(-1, 9), st.floats(0.01, 9)), max_size=60))
def test_any_history_keeps_its_sums_and_comes_back_from_the_file(history: list[tuple[float, int, float]]) -> None:
    timeline, at, seen = Timeline(), 0.0, 0.0
    for passed, version, step_s in history:
        at += passed
        seen += passed
        timeline.add(sample(at, version, passed=passed, step_s=step_s))
    for series in (timeline.whole, timeline.whole.widened(most=7), timeline.whole.widened(least_s=100.0)):
        buckets = list(series.buckets.values())
        assert sum(b.seconds for b in buckets) == pytest.approx(seen)
        assert sum(b.steps for b in buckets) == sum(b.steps for b in timeline.whole.buckets.values())
        assert list(series.buckets) == sorted(series.buckets)
        assert all(b.step is not None and b.step.low <= b.step.high <= b.step.most for b in buckets)
    assert len(timeline.whole.widened(most=7).buckets) <= 7
    again = Timeline()
    again.load(TimelineFile.model_validate_json(timeline.file().model_dump_json()))
    assert again.file() == timeline.file()


def test_a_rollback_is_not_progress_and_what_is_done_again_is() -> None:
    timeline = Timeline()
    timeline.went_to(0)
    for at, version in enumerate((10, 20, 30)):
        timeline.add(sample(float(at), version))
    timeline.went_to(15)
    timeline.add(sample(3.0, 18))
    timeline.add(sample(4.0, -1))  # in a recovery
    timeline.add(sample(5.0, 40))
    assert [b.steps for b in timeline.whole.buckets.values()] == [10, 10, 10, 3, 0, 22]


def test_another_controller_goes_on_in_the_same_file() -> None:
    first = Timeline()
    first.serve(1000.0, 0.0)
    first.went_to(0)
    first.add(sample(5.0, 10))
    second = Timeline()
    second.load(first.file())
    second.serve(2000.0, 9.0)
    second.add(sample(9.0, 18, passed=0.0))  # eight steps while there was none
    file = second.file()
    assert sum(file.whole.steps) == 18 and [c.controller for c in file.controllers] == [1000.0, 2000.0]
    assert (file.controllers[0].at_s, file.controllers[0].version) == (5.0, 10)
    assert file.controllers[1].version == 18 and file.controllers[1].step_s == 0.5


def test_a_band_of_thousands_of_ranks_is_five_numbers() -> None:
    band = band_of({r: 0.1 + r * 1e-5 for r in range(18_000)} | {77: 0.9, 78: 0.0})
    assert band is not None and (band.most, band.rank) == (0.9, 77)
    assert (band.low, band.middle, band.high) == pytest.approx((0.118, 0.19, 0.262), rel=1e-3)
    assert band_of({0: 0.0}) is None
    together = Band(1, 2, 3, 4, 7).with_(Band(3, 4, 5, 9, 8, count=3))
    assert together == Band(2.5, 3.5, 4.5, 9, 8, count=4)


def test_a_long_gap_neither_fills_memory_nor_loses_what_was() -> None:
    series = Timeline()
    series.add(sample(1.0, 5))
    series.add(sample(1e9, 6))
    assert len(series.whole.buckets) == 2 and len(series.recent.buckets) == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert read_timeline(path).whole.columns().empty
    path.write_text('{"whole": {"width_s": 1.0, "at_s": [0.0]}, "recent": {"width_s": 1.0}}')
    with pytest.raises(ConfigError, match=r"timeline.json is not a timeline: whole: .*not equally long"):
        read_timeline(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not a timeline"):
        read_timeline(path)
    with pytest.raises(ValidationError):
        Columns(width_s=0.0)


def test_buckets_that_slide_are_dropped() -> None:
    series = Series(1.0, 3, slides=True)
    for at in range(10):
        series.add(float(at), Timeline().whole.buckets.get(0) or _bucket())
    assert list(series.buckets) == [7, 8, 9]


def _bucket():  # type: ignore[no-untyped-def]
    timeline = Timeline()
    timeline.add(sample(0.0, 1))
    return timeline.whole.buckets[0]


def test_where_steps_are_calls_iterations_are_counted() -> None:
    """Two calls each: a step and its log. One of a sample is not known, and a recovery goes back to the step."""
    timeline = Timeline()
    timeline.went_to(0)
    for at, version, iteration in ((1.0, 1, 1), (2.0, 5, 3), (3.0, -1, -1), (4.0, 21, 11)):
        timeline.add(Sample(at=at, passed=1.0, version=version, tokens=10, iteration=iteration))
    timeline.went_to(20, 11)
    timeline.add(Sample(at=5.0, passed=1.0, version=23, tokens=10, iteration=12))
    columns = timeline.whole.columns()
    assert sum(columns.steps) == 11 and sum(columns.tokens) == 110, columns

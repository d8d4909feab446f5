"""FlashRecovery's equation (3) in seconds, and when a checkpoint is announced."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.plan.checkpoint_interval import DAY_S, FIRST_AUTO_S, CheckpointSchedule, checkpoint_interval


def cost(t: float, d: float, k0: float, m: float) -> float:
    """Equation (1) without the part that does not depend on the interval."""
    return m * t / 2 + d / t * k0


def test_the_papers_equation() -> None:
    assert checkpoint_interval(86_400, 10, 1) == math.sqrt(2 * 86_400 * 10)
    assert checkpoint_interval(86_400, 0, 1) == 0


@given(st.floats(1, 1e7), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_no_other_interval_costs_less(d: float, k0: float, m: float, factor: float) -> None:
    best = checkpoint_interval(d, k0, m)
    assert cost(best, d, k0, m) <= cost(best * factor, d, k0, m) * (1 + 1e-9)


@pytest.mark.parametrize("args", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_senseless_values_are_refused(args: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        checkpoint_interval(*args)


def test_a_fixed_interval() -> None:
    schedule = CheckpointSchedule(10.0, 0.05, now=100.0)
    assert schedule.announce(5, 0.1, now=109.9) is None
    assert schedule.announce(5, 0.1, now=110.0) == 5 + 1 + 5  # half a second of steps ahead
    schedule.published(0.01, 0.5)
    assert schedule.announce(50, 0.1, now=115.0) is None
    assert schedule.announce(100, 3.0, now=120.0) == 102


def test_auto_measures_early_and_then_follows_the_equation() -> None:
    schedule = CheckpointSchedule("auto", 0.5, now=0.0)
    assert schedule.announce(3, 1.0, now=FIRST_AUTO_S) == 5
    schedule.published(2.0, 0.5)
    assert schedule.interval_s() == checkpoint_interval(DAY_S, 2.0, 0.5)


def test_a_version_that_was_missed_is_announced_earlier_next_time() -> None:
    schedule = CheckpointSchedule(10.0, 1.0, now=0.0)
    first = schedule.announce(0, 0.1, now=10.0)
    second = schedule.announce(100, 0.1, now=20.0)
    assert first == 6 and second == 111
    schedule.recovered()
    assert schedule.announce(200, 0.1, now=30.0) == 211
    schedule.published(0.1, 0.5)
    assert schedule.announce(300, 0.1, now=40.0) == 306


def test_where_training_is_not_held_up_the_storage_is_given_a_rest() -> None:
    schedule = CheckpointSchedule("auto", 0.05, now=0.0)
    schedule.published(0.0, 0.5)
    assert schedule.interval_s() == FIRST_AUTO_S
    schedule.published(0.0, 90.0)
    assert schedule.interval_s() == 900.0
    schedule.published(1.0, 90.0)
    assert schedule.interval_s() == checkpoint_interval(DAY_S, 1.0, 0.05) > 900.0
    fixed = CheckpointSchedule(5.0, 0.05, now=0.0)
    fixed.published(0.0, 90.0)
    assert fixed.interval_s() == 5.0, "who asks for it gets it"

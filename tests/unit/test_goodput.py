"""How much of a job's time led to steps that count."""

from __future__ import annotations

import pytest

from flashrecovery import events as ev
from flashrecovery.cli.goodput import Goodput, goodput
from flashrecovery.cli.history import read_history
from flashrecovery.cli.report import goodput_text
from tests.support.history_samples import FAST, SLOW, at, kill, two_recoveries


def of(events: list[ev.Event]) -> Goodput:
    return goodput(read_history(events), events)


def test_a_launch_and_recoveries_are_lost() -> None:
    found = of(two_recoveries())
    lost = sum(FAST.values()) + sum(SLOW.values())
    assert (found.wall_s, found.launch_s, found.down_s, found.repeated_steps) == (70.0, 5.0, 0.0, 0)
    assert found.recovery_s == pytest.approx(lost)
    assert found.trained_s == pytest.approx(65.0 - lost) and found.share == pytest.approx((65.0 - lost) / 70.0)


def test_so_is_what_lies_between_two_launches() -> None:
    again = [at(100, ev.JobStarted(world_size=4, seconds=8.0)), at(120, ev.JobFinished(step_s=0.5))]
    found = of([*two_recoveries(), *again])
    assert (found.wall_s, found.launch_s, found.down_s) == (120.0, 13.0, 22.0)


@pytest.mark.parametrize("step_s", [0.5, 0.0])
def test_steps_that_a_fallback_does_again(step_s: float) -> None:
    failed, started, *rest = kill(10, 1, 0, 20, FAST)
    events = [
        at(0, ev.JobStarted(world_size=2)),
        at(8, ev.CheckpointSaved(version=20, path="c", step_s=step_s)),
        failed.model_copy(update={"step": 36}),
        started,
        at(10.1, ev.FallbackStarted(version=20, path="c", generation=1)),
        *rest,
        at(60, ev.Notice(kind="fault_fired", rank=0)),
    ]
    found = of(events)
    assert found.repeated_steps == 16 and found.repeated_s == (8.0 if step_s else None)
    assert found.trained_s == pytest.approx(60.0 - sum(FAST.values()) - 16 * step_s)
    assert ("8.00 s for 16 steps done again" if step_s else ", 16 steps done again") in goodput_text(found)


def test_without_events() -> None:
    assert of([]).share == 0.0

"""How much of a job's time led to steps that count: every moment is in exactly one part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery import events as ev
from flashrecovery.cli.course import goodput_words
from flashrecovery.observe.goodput import Goodput, LastSeen, Ledger, goodput, on_one_clock
from tests.support.history_samples import FAST, SLOW, START, at, kill, two_recoveries

LOST = sum(FAST.values()) + sum(SLOW.values())


def seconds(found: Goodput) -> dict[str, float]:
    return {part: found.seconds(part) for part in found.parts if found.parts[part]}


def test_a_launch_and_recoveries_are_lost() -> None:
    found = goodput(two_recoveries())
    assert seconds(found) == {"trained": pytest.approx(65 - LOST), "launch": 5.0, "recovery": pytest.approx(LOST)}
    assert found.wall_us == 70_000_000 and found.share == pytest.approx((65.0 - LOST) / 70.0)


def test_so_is_what_lies_between_two_launches() -> None:
    again = [at(100, ev.JobStarted(world_size=4, seconds=8.0, step=300)), at(120, ev.JobFinished(step_s=0.5))]
    found = goodput([*two_recoveries(), *again])
    assert (found.wall_s, found.seconds("launch"), found.seconds("down")) == (120.0, 13.0, 22.0)
    assert found.repeated_steps == 0


def test_a_second_launch_does_again_what_was_not_saved() -> None:
    first = [
        at(0, ev.ControllerStarted()),
        at(5, ev.JobStarted(seconds=4.0)),
        at(65, ev.JobFailed(reason="", step=60, step_s=1.0)),
    ]
    again = [
        at(80, ev.ControllerStarted()),
        at(90, ev.JobStarted(seconds=9.0, step=40)),
        at(130, ev.JobFinished(step=80)),
    ]
    found = goodput([*first, *again])
    assert seconds(found) == {"trained": 80.0, "launch": 15.0, "repeated": 20.0, "down": 15.0}
    assert found.repeated_steps == 20 and found.wall_s == 130.0


def test_a_launch_that_was_killed_has_gone_on_for_as_long_as_it_was_seen() -> None:
    killed = [at(0, ev.ControllerStarted()), at(5, ev.JobStarted())]
    again = [at(1000, ev.ControllerStarted()), at(1010, ev.JobStarted(step=80)), at(1100, ev.JobFinished())]
    assert seconds(goodput([*killed, *again])) == {"trained": 90.0, "launch": 15.0, "down": 995.0}
    seen = {START: LastSeen(at=905.0, committed=90, step_s=10.0)}
    found = goodput([*killed, *again], seen)
    assert seconds(found) == {"trained": 890.0, "launch": 15.0, "repeated": 100.0, "down": 95.0}
    # nothing has followed yet: it was training when it was seen last
    assert seconds(goodput(killed, seen)) == {"trained": 900.0, "launch": 5.0}
    # the next launch has not come to a step yet
    assert seconds(goodput([*killed, *again[:1]], seen)) == {"trained": 900.0, "launch": 5.0, "down": 95.0}


def test_a_job_that_never_comes_to_a_step_is_all_launch() -> None:
    failed = [
        at(0, ev.ControllerStarted()),
        at(3, ev.FailureDetected(rank=0, kind="exit")),
        at(30, ev.JobFailed(reason="x")),
    ]
    assert seconds(goodput(failed)) == {"launch": 30.0}
    assert goodput(failed).share == 0.0
    again = [at(50, ev.ControllerStarted()), at(60, ev.JobStarted()), at(70, ev.JobFinished())]
    assert seconds(goodput([*failed, *again])) == {"trained": 10.0, "launch": 40.0, "down": 20.0}


def test_a_start_from_the_first_line_is_no_second_launch() -> None:
    events = [
        at(0, ev.ControllerStarted()),
        at(10, ev.JobStarted()),
        at(11, ev.Notice(kind="start_again")),
        at(20, ev.JobStarted()),
        at(30, ev.JobFinished()),
    ]
    assert seconds(goodput(events)) == {"trained": 11.0, "launch": 19.0}


def test_another_controller_goes_on_while_training_does() -> None:
    events = [
        at(0, ev.ControllerStarted()),
        at(5, ev.JobStarted()),
        at(50, ev.ControllerStarted()),
        at(50, ev.Notice(kind="controller_elected")),
        at(52, ev.Notice(kind="taken_over")),
    ]
    # the new controller's host was booted at another time
    moved = [e.model_copy(update={"monotonic": 7.0 + i}) if i > 1 else e for i, e in enumerate(events)]
    end = at(99, ev.JobFinished()).model_copy(update={"monotonic": 9.0 + 47})
    assert seconds(goodput([*moved, end])) == {"trained": 92.0, "launch": 5.0}
    # it writes into its own directory, and has not seen the launch
    assert seconds(goodput([*moved[2:], end])) == {"trained": 47.0}


def test_somebody_sets_the_clock() -> None:
    events = two_recoveries()
    for jump in (3600.0, -86_400.0):
        set_at = [e.model_copy(update={"time": e.time + jump}) if i > 8 else e for i, e in enumerate(events)]
        assert goodput(set_at) == goodput(events)
        assert [e.time for e in on_one_clock(set_at)] == pytest.approx([e.time for e in on_one_clock(events)])


def test_two_recoveries_that_overlap_are_lost_once() -> None:
    one, other = kill(10, 1, 3, 41, SLOW), kill(12, 2, 1, 41, SLOW)
    events = sorted([at(0, ev.JobStarted()), *one, *other, at(40, ev.JobFinished())], key=lambda e: e.time)
    found = goodput(events)
    assert found.seconds("recovery") == pytest.approx(2.0 + sum(SLOW.values())) and found.wall_us == 40_000_000


def test_what_checkpoints_hold_up() -> None:
    saved = [at(10 * i, ev.CheckpointSaved(version=i, path="", k0_s=0.25)) for i in range(1, 4)]
    found = goodput([at(0, ev.JobStarted()), *saved, at(40, ev.JobFinished())])
    assert seconds(found) == {"trained": 39.25, "checkpoint": 0.75}


@pytest.mark.parametrize("step_s", [0.5, 0.0])
def test_steps_that_a_fallback_does_again(step_s: float) -> None:
    failed, started, *rest = kill(10, 1, 0, 20, FAST)
    events = [
        at(0, ev.JobStarted(world_size=2)),
        at(8, ev.CheckpointSaved(version=20, path="c", step_s=step_s)),
        failed.model_copy(update={"step": 36}),
        started,
        at(10.1, ev.FallbackStarted(version=20, path="c", generation=1)),
        *(e.model_copy(update={"resume_step": 20}) if isinstance(e, ev.RecoveryFinished) else e for e in rest),
        at(60, ev.Notice(kind="fault_fired", rank=0)),
    ]
    found = goodput(events)
    assert found.repeated_steps == 16 and found.as_dict()["repeated_s"] == (8.0 if step_s else None)
    assert found.seconds("trained") == pytest.approx(60.0 - sum(FAST.values()) - 16 * step_s)
    assert ("8.00 s for 16 steps done again" if step_s else ", 16 steps done again") in goodput_words(found.as_dict())


def test_without_events() -> None:
    assert goodput([]).share == 0.0 and goodput([]).wall_us == 0


EVENTS = st.one_of(
    st.builds(ev.ControllerStarted),
    st.builds(ev.JobStarted, seconds=st.floats(0, 100), step=st.integers(0, 50)),
    st.builds(ev.FailureDetected, rank=st.integers(0, 3), kind=st.just("killed"), detect_s=st.floats(0, 50)),
    st.builds(ev.RecoveryStarted),
    st.builds(ev.FallbackStarted, version=st.integers(0, 50), path=st.just("")),
    st.builds(ev.RecoveryFinished, resume_step=st.integers(0, 50), total_s=st.floats(0, 100)),
    st.builds(
        ev.CheckpointSaved, version=st.integers(0, 50), path=st.just(""), k0_s=st.floats(0, 9), step_s=st.floats(0, 9)
    ),
    st.builds(ev.JobFinished),
    st.builds(ev.JobFailed, reason=st.just(""), step=st.integers(-1, 50)),
    st.builds(ev.Notice, kind=st.sampled_from(["taken_over", "start_again", "controller_elected", "other"])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 60), st.floats(-1e4, 1e4))), st.floats(0, 100))
def test_whatever_happens_every_moment_is_in_one_part(
    told: Sequence[tuple[ev.Event, float, float]], later: float
) -> None:
    monotonic, ledger, came = 1000.0, Ledger(), 0.0
    for event, after, jump in told:
        monotonic += after
        came = ledger.take(event.model_copy(update={"monotonic": monotonic, "time": START + monotonic + jump}))
        found = ledger.look()
        assert all(part >= 0 for part in found.parts.values()), found
    found = ledger.look(came + later)
    assert all(part >= 0 for part in found.parts.values())
    ended = ledger.doing == "down"
    assert ended or found.wall_us == max(round((came + later) * 1e6), 0)

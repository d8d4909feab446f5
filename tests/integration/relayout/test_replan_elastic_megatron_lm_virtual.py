"""Megatron-LM's unmodified loop with virtual pipeline stages in a job that is elastic, and whose parallel layout may
change, with as many virtual stages or none. In each stage it is, bit for bit, a job that was started so from that
iteration's state, which megatron-core alone has written and read: losses, the whole state, evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S
from tests.support.replan import Saved, Sizes, command
from tests.support.replan_elastic import Stage, both, never, stages
from tests.support.replan_elastic_megatron_lm import (
    SHARDED,
    below_the_least,
    dies_as_a_replica_is_about_to_leave,
    kill,
    leaves_and_then_dies,
    two_losses,
)
from tests.support.replan_megatron_lm import Virtual, check_loop, named

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(6 * TIMEOUT_S), needs_checkout]

TWO = Virtual("vpp2-dp2-distributed", Sizes(pp=2, dp=2), SHARDED)
PLAIN = Virtual("vpp2-dp2", Sizes(pp=2, dp=2), ("--log-params-norm",))
LONG, LONGER = 14, 18


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("both-lm-virtual"))


@pytest.mark.parametrize("last", [0, 1], ids=["its-first", "its-last"])
@pytest.mark.parametrize("leaver", [3, 0], ids=["last", "first"])
@pytest.mark.parametrize("training", [TWO, PLAIN], ids=str)
def test_a_replica_and_then_a_part_of_the_last_one(
    training: Virtual, leaver: int, last: int, tmp_path: Path, saved: Saved
) -> None:
    """No other rank has what the second one had, but for the copies that the last replica's ranks keep of each other.
    One rank has no virtual stages."""
    stay = (0, 2) if leaver == 3 else (1, 3)
    leaves_and_then_dies(training, tmp_path, saved, leaver, stay[last])


@pytest.mark.parametrize("training", [TWO, PLAIN], ids=str)
def test_killed_in_evaluations(training: Virtual, tmp_path: Path, saved: Saved) -> None:
    """They are made again, in the sizes that there are then, and those after them have the samples that they would have
    had: the last stage's reader is that of another chunk. What was summed up for a log of three iterations, in three
    sizes, is in it."""
    training = named(training, "evaluated", evaluates=3, logs=3)
    faults = [kill(training, 1, "data", 2, "evaluate"), kill(training, 2, "data", 5, "evaluate")]
    two_losses(training, tmp_path, saved, *faults, first=3, second=6)


@pytest.mark.parametrize("training", [TWO], ids=str)
def test_a_second_death_as_a_replica_is_about_to_leave(training: Virtual, tmp_path: Path, saved: Saved) -> None:
    dies_as_a_replica_is_about_to_leave(training, tmp_path, saved)


@pytest.mark.parametrize("training", [TWO], ids=str)
def test_below_the_least_replicas(training: Virtual, tmp_path: Path, saved: Saved) -> None:
    below_the_least(training, tmp_path, saved)


@pytest.mark.parametrize(
    "through", [[Sizes(tp=2, dp=2)], [Sizes(dp=4), TWO.sizes]], ids=["to-none", "to-none-and-back"]
)
def test_elastic_again_in_the_new_layout(through: list[Sizes], tmp_path: Path, saved: Saved) -> None:
    """By command to another layout, without virtual stages, and perhaps to one with them again; there one rank is
    killed, and its replica leaves, and comes back: its processes skip what the job has done in all sizes."""
    training = named(TWO, "long", iterations=LONGER, evaluates=5)
    running = training.start(tmp_path / "run", "--step-time=1000", config=never(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("train", 1 + 2 * number) for number in range(len(through))]
    for number, (sizes, call) in enumerate(zip(through, calls, strict=True)):
        assert command(running, sizes, call) == ""
        running.wait_for("recovery_finished", TIMEOUT_S, count=1 + number)
    elastic.inject(running, rank=1, at="backward", step=training.call("train", 5))
    running.wait_for("recovery_finished", TIMEOUT_S, count=len(through) + 1)
    assert elastic.command(running, 2) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    found, last = stages(job, training), through[-1]
    expected = [*((sizes, True) for sizes in through), (last.of(1), False), (last, False)]
    assert [(stage.sizes, stage.restarted) for stage in found] == expected, job.explain()
    assert training.iteration(found[-2].step) in (5, 6), job.explain()
    check_loop(job, training, saved, found)


def test_by_command_in_turns(tmp_path: Path, saved: Saved) -> None:
    """One replica, which goes on without virtual stages, fewer of these, and back to the launch's, with them;
    a rank is replaced in the first and in the last of these."""
    training = named(TWO, "turns", iterations=LONG)
    running = training.start(tmp_path / "run", "--step-time=1000", config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("train", number) for number in (2, 6, 8, 10)]
    assert elastic.command(running, 1, calls[0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=2, at="backward", step=training.call("train", 4))
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert command(running, Sizes(dp=4), calls[1]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    assert elastic.command(running, 2, calls[2]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=4)
    assert command(running, training.sizes, calls[3]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=5)
    elastic.inject(running, rank=3, at="optimizer", step=training.call("train", 12))
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    sizes = (training.sizes.of(1), Sizes(dp=4), Sizes(dp=2), training.sizes)
    expected = [Stage(call, s, restarted=bool(n % 2)) for n, (call, s) in enumerate(zip(calls, sizes, strict=True))]
    check_loop(job, training, saved, expected)

"""Megatron-LM's unmodified loop with context parallelism, and with MoE layers and expert parallelism, in a job that is
elastic, and whose parallel layout may change. In each stage it is, bit for bit, a job that was started so from that
iteration's state, which megatron-core alone has written and read: losses, the whole state, evaluations.

The losses of experts that Megatron logs are those that the iterations have had, in whatever size and layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S
from tests.support.replan import Saved, Sizes, command
from tests.support.replan_elastic import Stage, both, never, stages
from tests.support.replan_elastic_megatron_lm import (
    FIRST,
    PHASES,
    SECOND,
    SHARDED,
    below_the_least,
    dies_as_a_replica_is_about_to_leave,
    dies_before_the_smaller_job_goes_on,
    dies_when_a_replica_has_just_left,
    kill,
    leaves_and_then_dies,
    two_losses,
)
from tests.support.replan_megatron_lm import Training, check_loop, named

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(6 * TIMEOUT_S), needs_checkout]

EXPERTS = (
    *("--num-experts=4", "--moe-router-topk=2", "--moe-aux-loss-coeff=0.01", "--moe-z-loss-coeff=0.001"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-token-dispatcher-type=alltoall"),
)


def experts(name: str, sizes: Sizes, *flags: str, **more: Any) -> Training:
    return Training(name, sizes, (*EXPERTS, *flags), experts=True, **more)


CP = Training("cp2-dp2", Sizes(cp=2, dp=2), ("--bf16", "--log-params-norm"))
CP_PARTS = Training("cp2-dp2-distributed", Sizes(cp=2, dp=2), SHARDED)
EP = experts("ep2-dp4", Sizes(dp=4, ep=2), "--bf16", "--log-params-norm")
EP_PARTS = experts("ep2-dp4-distributed", Sizes(dp=4, ep=2), *SHARDED)
EP_CP = experts("cp2-ep2-dp2-distributed", Sizes(cp=2, dp=2, ep=2), *SHARDED)
TRAININGS = (CP, CP_PARTS, EP, EP_PARTS)
LONG, LONGER = 14, 18


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("both-lm-experts"))


@pytest.mark.parametrize("last", [0, 1], ids=["its-first", "its-last"])
@pytest.mark.parametrize("leaver", [3, 0], ids=["last", "first"])
@pytest.mark.parametrize("training", [*TRAININGS, EP_CP], ids=str)
def test_a_replica_and_then_a_part_of_the_last_one(
    training: Training, leaver: int, last: int, tmp_path: Path, saved: Saved
) -> None:
    """No other rank has what the second one had, but for the copies that the last replica's ranks keep of each other:
    with expert parallelism half of the experts."""
    stay = (0, 1) if leaver > 1 else (2, 3)
    leaves_and_then_dies(training, tmp_path, saved, leaver, stay[last])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_the_second_loss_in_each_phase(training: Training, phase: str, tmp_path: Path, saved: Saved) -> None:
    two_losses(training, tmp_path, saved, kill(training, 1, "forward", FIRST), kill(training, 2, phase, SECOND))


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("training", [CP, EP, EP_PARTS], ids=str)
def test_losses_that_are_summed_up(training: Training, phase: str, tmp_path: Path, saved: Saved) -> None:
    """A log of three iterations, which were computed in three sizes with other numbers of micro-batches. Both losses
    are in a log's call (context parallelism has none in the first of these iterations): losses of experts that one size
    has summed up are logged in the next one."""
    training = named(training, "logs", logs=3)
    first = kill(training, 0, phase, 4, "log" if training.experts else "train")
    faults = [first, kill(training, 3, phase, 5, "log")]
    two_losses(training, tmp_path, saved, *faults, first=4, second=5)


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_killed_in_evaluations(training: Training, tmp_path: Path, saved: Saved) -> None:
    """They are made again, in the sizes that there are then, and those after them have the samples that they would have
    had."""
    training = named(training, "evaluated", evaluates=3)
    faults = [kill(training, rank, "data", number, "evaluate") for rank, number in ((1, 2), (2, 5))]
    two_losses(training, tmp_path, saved, *faults, first=3, second=6)


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS, EP], ids=str)
def test_the_second_loss_before_the_smaller_job_goes_on(training: Training, tmp_path: Path, saved: Saved) -> None:
    dies_before_the_smaller_job_goes_on(training, tmp_path, saved)


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS, EP], ids=str)
def test_a_second_death_as_a_replica_is_about_to_leave(training: Training, tmp_path: Path, saved: Saved) -> None:
    """Ranks 3 and 0 have other experts, and of the dead ones' ranges of the dense state each has copies."""
    dies_as_a_replica_is_about_to_leave(training, tmp_path, saved)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_a_second_death_when_a_replica_has_just_left(training: Training, state: str, tmp_path: Path) -> None:
    dies_when_a_replica_has_just_left(training, tmp_path, state)


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_below_the_least_replicas(training: Training, tmp_path: Path, saved: Saved) -> None:
    below_the_least(training, tmp_path, saved)


@pytest.mark.parametrize(
    ("training", "other"),
    [
        pytest.param(training, other, id=f"{training}-to-{str(other).replace(',', '-')}")
        for training, other in (
            (CP_PARTS, Sizes(pp=2, dp=2)),
            (CP, Sizes(tp=2, dp=2)),
            (EP_PARTS, Sizes(cp=2, dp=2)),
            (EP_PARTS, Sizes(tp=2, dp=2)),
            (EP, Sizes(pp=2, dp=2)),
            (EP_CP, Sizes(dp=4, ep=2)),
        )
    ],
)
def test_elastic_again_in_the_new_layout(training: Training, other: Sizes, tmp_path: Path, saved: Saved) -> None:
    """By command to another layout of two replicas; there one is killed, and its replica leaves, and comes back: its
    processes skip what the job has done in three sizes."""
    training = named(training, "long", iterations=LONGER, evaluates=5)
    running = training.start(tmp_path / "run", "--step-time=1000", config=never(training))
    running.wait_for("job_started", TIMEOUT_S)
    at = training.call("train", 1)
    assert command(running, other, at) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=training.call("train", 3))
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert elastic.command(running, other.replicas) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    found = stages(job, training)
    expected = [(other, True), (other.of(1), False), (other, False)]
    assert [(stage.sizes, stage.restarted) for stage in found] == expected, job.explain()
    assert found[0].step == at and training.iteration(found[1].step) in (3, 4), job.explain()
    check_loop(job, training, saved, found)


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_by_command_in_turns(training: Training, tmp_path: Path, saved: Saved) -> None:
    """Fewer replicas, another layout of more ranks than are left, fewer again, and back to the launch's. Each change is
    before a log, which says of its step what that had in the size before."""
    training = named(training, "turns", iterations=LONG)
    running = training.start(tmp_path / "run", "--step-time=1000", config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("log", number) for number in (2, 4, 7, 9)]
    there, fewer = Sizes(dp=4), Sizes(dp=2)
    assert elastic.command(running, 1, calls[0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, there, calls[1]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert elastic.command(running, 2, calls[2]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    assert command(running, training.sizes, calls[3]) == ""
    job = running.wait(TIMEOUT_S)
    sizes = (training.sizes.of(1), there, fewer, training.sizes)
    expected = [Stage(call, s, restarted=bool(n % 2)) for n, (call, s) in enumerate(zip(calls, sizes, strict=True))]
    check_loop(job, training, saved, expected)
    assert not job.of("failure_detected"), job.explain()


@pytest.mark.parametrize("training", [CP_PARTS, EP_PARTS], ids=str)
def test_a_replacement_between_the_two(training: Training, tmp_path: Path, saved: Saved) -> None:
    """In the smaller job, and in the layout after it, a rank is replaced: in both its loop goes round from the first
    iteration."""
    training = named(training, "replaced", iterations=LONG)
    other = replace(training.sizes, ep=1).of(1) if training.sizes.ep > 1 else Sizes(dp=2)
    running = training.start(tmp_path / "run", "--step-time=1000", config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("train", 2), training.call("train", 8)]
    assert elastic.command(running, 1, calls[0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="between", step=training.call("log", 5))
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert command(running, other, calls[1]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    elastic.inject(running, rank=0, at="optimizer", step=training.call("train", 11))
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    expected = [Stage(calls[0], training.sizes.of(1)), Stage(calls[1], other, restarted=True)]
    check_loop(job, training, saved, expected)

"""Megatron-LM's unmodified loop in a job that is elastic, and whose parallel layout may change: replicas leave and come
in the living processes, and where that is not possible the job goes on in another layout, in which it is elastic again.
In each stage it is, bit for bit, a job that was started so from that iteration's state, which megatron-core alone has
written and read: losses, the whole state, evaluations; and the log is that of the losses that there were."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S, content, finished
from tests.support.replan import Course, Saved, Sizes, check_same_steps, command
from tests.support.replan_elastic import Stage, both, never, stages
from tests.support.replan_elastic_megatron_lm import (
    FIRST,
    ONE,
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

TP = Training("tp2-dp2-fp32", Sizes(2, 1, 2))
TP_PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)
PP = Training("pp2-dp2-bf16", Sizes(1, 2, 2), ("--bf16",))
PP_PARTS = Training("pp2-dp2-distributed", Sizes(1, 2, 2), SHARDED)
TRAININGS = (TP, TP_PARTS, PP, PP_PARTS)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("both-lm"))


def mate(training: Training, rank: int) -> int:
    """The other rank of its replica."""
    return rank ^ 1 if training.sizes.tp > 1 else (rank + 2) % 4


@pytest.mark.parametrize("last", [0, 1], ids=["its-first", "its-last"])
@pytest.mark.parametrize("leaver", [3, 0], ids=["last", "first"])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_a_replica_and_then_a_part_of_the_last_one(
    training: Training, leaver: int, last: int, tmp_path: Path, saved: Saved
) -> None:
    """The first or the last replica leaves. No other rank has what the second one had, but for the copies that the last
    replica's ranks keep of each other."""
    stay = [rank for rank in range(4) if rank not in (leaver, mate(training, leaver))]
    leaves_and_then_dies(training, tmp_path, saved, leaver, stay[last])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", [TP, PP_PARTS], ids=str)
def test_the_second_loss_in_each_phase(training: Training, phase: str, tmp_path: Path, saved: Saved) -> None:
    faults = [kill(training, 1, "forward", FIRST)]
    faults.append(kill(training, 2 if training is TP else 0, phase, SECOND))
    two_losses(training, tmp_path, saved, *faults)


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("training", [PP, TP_PARTS], ids=str)
def test_losses_that_are_summed_up(training: Training, phase: str, tmp_path: Path, saved: Saved) -> None:
    """The log is of three iterations, each of which was computed in other sizes: its mean loss is that of the losses
    that they have had. The second one dies in it: with it, of the last stage, the losses that are to be logged."""
    training = named(training, "logs", logs=3)
    faults = [kill(training, 0, "backward", 4), kill(training, 3, phase, 5, "log")]
    two_losses(training, tmp_path, saved, *faults, first=4, second=5)


@pytest.mark.parametrize("training", [TP, PP_PARTS], ids=str)
def test_killed_in_evaluations(training: Training, tmp_path: Path, saved: Saved) -> None:
    """They are made again, in the sizes that there are then, and those after them have the samples that they would have
    had."""
    training = named(training, "evaluated", evaluates=3)
    faults = [kill(training, rank, "data", number, "evaluate") for rank, number in ((1, 2), (0, 5))]
    if training.sizes.tp > 1:
        faults[0] = kill(training, 2, "data", 2, "evaluate")  # the reader of its replica
    two_losses(training, tmp_path, saved, *faults, first=3, second=6)


@pytest.mark.parametrize("training", [TP_PARTS, PP], ids=str)
def test_the_second_loss_before_the_smaller_job_goes_on(training: Training, tmp_path: Path, saved: Saved) -> None:
    dies_before_the_smaller_job_goes_on(training, tmp_path, saved)


@pytest.mark.parametrize("training", [TP_PARTS, TP, PP_PARTS], ids=str)
def test_a_second_death_as_a_replica_is_about_to_leave(training: Training, tmp_path: Path, saved: Saved) -> None:
    dies_as_a_replica_is_about_to_leave(training, tmp_path, saved)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", [TP_PARTS, PP], ids=str)
def test_a_second_death_when_a_replica_has_just_left(training: Training, state: str, tmp_path: Path) -> None:
    dies_when_a_replica_has_just_left(training, tmp_path, state)


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
@pytest.mark.parametrize("training", [TP_PARTS, PP], ids=str)
def test_a_death_in_the_new_layout_before_its_first_step(
    training: Training, state: str, tmp_path: Path, saved: Saved
) -> None:
    """No replica is left out there: all begin again, from what is in memory, in a layout of those that are left."""
    config = never(training, least=2)
    running = training.start(tmp_path / "run", config=config, inject=[kill(training, 1, "backward", FIRST)])
    running.wait_for("job_replanned", TIMEOUT_S)
    elastic.inject(running, rank=1, at=f"recovery:{state}")
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    changes = [Sizes.parse(event["layout"]).ranks for event in job.of("job_replanned")]
    assert len(changes) == 2 and changes[0] > changes[1], job.explain()
    (found,) = stages(job, training)
    check_loop(job, training, saved, [found])


@pytest.mark.parametrize("training", [TP_PARTS, PP], ids=str)
def test_below_the_least_replicas(training: Training, tmp_path: Path, saved: Saved) -> None:
    below_the_least(training, tmp_path, saved)


LONG = 20


@pytest.mark.parametrize("training", [TP, TP_PARTS, PP_PARTS], ids=str)
def test_elastic_again_in_the_new_layout(training: Training, tmp_path: Path, saved: Saved) -> None:
    """By command to another layout of two replicas; there one is killed, and its replica leaves, and comes back: its
    processes skip what the job has done in three sizes."""
    training = named(training, "long", iterations=LONG, evaluates=5)
    other = Sizes(1, 2, 2) if training.sizes.tp > 1 else Sizes(2, 1, 2)
    running = training.start(tmp_path / "run", "--step-time=500", config=never(training))
    running.wait_for("job_started", TIMEOUT_S)
    at = training.call("train", 1)
    assert command(running, other, at) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=training.call("train", 3))
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert elastic.command(running, 2) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    found = stages(job, training)
    one = replace(other, dp=1)
    expected = [(other, True), (one, False), (other, False)]
    assert [(stage.sizes, stage.restarted) for stage in found] == expected, job.explain()
    assert found[0].step == at and training.iteration(found[1].step) in (3, 4), job.explain()
    check_loop(job, training, saved, found)


def test_by_command_in_turns(tmp_path: Path, saved: Saved) -> None:
    """Fewer replicas, another layout of more ranks than are left, fewer again, and back to the launch's."""
    training = named(TP_PARTS, "turns", iterations=LONG)
    running = training.start(tmp_path / "run", "--step-time=500", config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("train", number) for number in (2, 5, 8, 11)]
    assert elastic.command(running, 1, calls[0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert "has the layout" in command(running, training.sizes.of(1))
    assert command(running, Sizes(1, 1, 4), calls[1]) == ""
    assert "about to change its parallel layout" in elastic.command(running, 2)
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert "4 at most is allowed" in elastic.command(running, 6)
    assert elastic.command(running, 2, calls[2]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    assert command(running, training.sizes, calls[3]) == ""
    job = running.wait(TIMEOUT_S)
    sizes = (training.sizes.of(1), Sizes(1, 1, 4), Sizes(1, 1, 2), training.sizes)
    expected = [Stage(call, s, restarted=bool(n % 2)) for n, (call, s) in enumerate(zip(calls, sizes, strict=True))]
    check_loop(job, training, saved, expected)
    assert not job.of("failure_detected"), job.explain()


def test_a_replacement_between_the_two(tmp_path: Path, saved: Saved) -> None:
    """In the smaller job, and in the layout after it, a rank is replaced: in both its loop goes round from the first
    iteration."""
    training = named(PP_PARTS, "replaced", iterations=LONG)
    running = training.start(tmp_path / "run", "--step-time=300", config=both(training))
    running.wait_for("job_started", TIMEOUT_S)
    calls = [training.call("train", 2), training.call("train", 12)]
    assert elastic.command(running, 1, calls[0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=0, at="backward", step=training.call("train", 5))
    running.wait_for("recovery_finished", TIMEOUT_S, count=2)
    assert command(running, Sizes(2, 1, 1), calls[1]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S, count=3)
    elastic.inject(running, rank=1, at="optimizer", step=training.call("train", 15))
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    expected = [Stage(calls[0], training.sizes.of(1)), Stage(calls[1], Sizes(2, 1, 1), restarted=True)]
    check_loop(job, training, saved, expected)


def test_checkpoints_of_megatrons(tmp_path: Path) -> None:
    """Written in the smaller job (a rank dies in it, and its replica leaves), and in the layout after it (the next one
    dies in that, too). Each holds what that of an undisturbed job holds that has computed the same, but for the ranks'
    random streams. A job that has begun with the first one goes on where it was, in spite of newer ones."""
    training = named(TP, "saved", saves=3)
    place, known = tmp_path / "written", tmp_path / "undisturbed"
    saves = "--save-interval=3"
    job = training.start(
        *(tmp_path / "run", f"--save={place}", saves),
        config=never(training),
        inject=[kill(training, 3, "between", 2, "exit"), kill(training, 0, "between", 5, "exit")],
    ).wait(TIMEOUT_S)
    check_fired(job, 2)
    found = stages(job, training)
    assert [(stage.sizes, stage.restarted) for stage in found] == [(training.sizes.of(1), False), (ONE, True)], (
        job.explain()
    )
    assert [training.iteration(stage.step) for stage in found] == [3, 6], job.explain()
    finished(job)
    other = finished(
        training.start(tmp_path / "other", f"--save={known}", saves, config=both(training)).wait(TIMEOUT_S)
    )
    check_same_content(place / "iter_0000003", known / "iter_0000003", tmp_path)
    shutil.rmtree(place / "iter_0000006")
    (place / "latest_checkpointed_iteration.txt").write_text("3")
    running = training.start(
        *(tmp_path / "loaded", "--step-time=2000", f"--load={place}", f"--save={place}", "--save-interval=1"),
        config=both(training),
    )
    running.wait_for("job_started", TIMEOUT_S)
    assert elastic.command(running, 1, 1 * 3) == ""  # three calls an iteration
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, Sizes(1, 2, 1), 3 * 3) == ""
    loaded = finished(running.wait(TIMEOUT_S))
    ours, theirs = Course.of(loaded), Course.of(other)
    check_same_steps(ours, theirs, 3, 4, training.sizes, loaded.explain())
    assert ours.states["begin", 6, "tp=1,pp=2,dp=1"] == ours.states["state", 6, str(training.sizes.of(1))]
    assert len(ours.states["state", 8, "tp=1,pp=2,dp=1"]) == 1, loaded.explain()


def check_same_content(one: Path, other: Path, folder: Path) -> None:
    """But for each rank's random streams, and the state of the rerun state machine."""
    held = [content(checkpoint, folder / "all.pt") for checkpoint in (one, other)]
    names = {name for name in held[0].keys() | held[1].keys() if not name.startswith(_OWN)}
    assert any("exp_avg_sq" in name for name in names), sorted(names)
    assert not [name for name in names if held[0].get(name) != held[1].get(name)]


_OWN = ("/rng_state", "/rerun_state_machine")
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("--flash-recovery-elastic=2:2",), {}, "the launcher says --elastic 1:2"),
    (("--flash-recovery-parallelism=3",), {}, "the launcher says --parallelism 1"),
    (("--flash-recovery-checkpoint-dir=/nowhere",), {}, "checkpoint.dir"),
    ((), {"elastic": {"min": 1, "max": 4}}, "elastic.max"),
]


@pytest.mark.parametrize(("flags", "settings", "reason"), REFUSED, ids=[reason.split()[-1] for *_, reason in REFUSED])
def test_what_is_refused(flags: tuple[str, ...], settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    job = TP.start(tmp_path / "run", *flags, config={**both(TP), **settings}).wait(TIMEOUT_S)
    assert job.code != 0 and reason in job.explain(), job.explain()
    assert "step=0" not in job.explain()

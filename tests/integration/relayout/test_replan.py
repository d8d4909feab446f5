"""A megatron-core job that goes on in another parallel layout, on command and where a rank is not replaced: from its
step on it is, bit for bit, a job that megatron-core alone has started in that layout from that step's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrecovery.config import PHASES
from flashrecovery.snapshot.files import LAST_CHECKPOINT
from tests.support.installed import skip_module_without
from tests.support.jobs import check_clean, check_fired
from tests.support.replan import (
    AT,
    STEPS,
    TIMEOUT_S,
    Course,
    Saved,
    Sizes,
    Training,
    check_goes_on,
    check_same_steps,
    command,
    never,
    start,
)
from tests.support.replan_scenarios import (
    FIRST,
    SLOWLY,
    check_back_to_a_checkpoint,
    check_losses,
    check_on_command,
    check_replaced_in_the_new_layout,
    check_second_death_before_the_change,
    check_second_death_in_the_new_layout,
    check_there_and_back,
    killed,
    started,
    wait_for_version,
)

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

SHARDED = ("--use-distributed-optimizer", "--bf16")
STAGES = Training("tp2-pp2", Sizes(2, 2, 1), ("--bf16",))
PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)
ROWS = Training("pp2-dp2-distributed-fp32", Sizes(1, 2, 2), ("--use-distributed-optimizer",))
WIDE = Training("pp2-fp32", Sizes(1, 2, 2))
TIED = Training("tp2-pp2-tied-distributed", Sizes(2, 2, 1), (*SHARDED, "--tie-head"))
DEEP = Training("pp4-layers4", Sizes(1, 4, 1), ("--layers", "4", "--bf16"))
LATENT = Training("tp2-latent-distributed", Sizes(2, 1, 1), (*SHARDED, "--multi-latent-attention"))
PAIR = Training("tp2-distributed", Sizes(2, 1, 1), SHARDED)
VICTIMS = (0, 1, 3)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned"))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{sizes.tp}{sizes.pp}{sizes.dp}")
        for training, sizes in (
            (STAGES, Sizes(1, 2, 1)),
            (STAGES, Sizes(2, 1, 2)),
            (PARTS, Sizes(1, 2, 2)),
            (PARTS, Sizes(2, 2, 1)),
            (PARTS, Sizes(1, 1, 1)),
            (ROWS, Sizes(2, 1, 1)),
            (ROWS, Sizes(1, 1, 3)),
            (WIDE, Sizes(2, 2, 1)),
            (TIED, Sizes(1, 1, 2)),
            (TIED, Sizes(1, 2, 2)),
            (DEEP, Sizes(2, 2, 1)),
            (LATENT, Sizes(1, 1, 2)),
        )
    ],
)
def test_on_command(training: Training, sizes: Sizes, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, tmp_path / "run", saved)


def test_there_and_back(tmp_path: Path, saved: Saved) -> None:
    """TP 2 -> 1 -> 2: the same state, and then the same losses as a job that has never changed."""
    check_there_and_back(PARTS, Sizes(1, 1, 4), tmp_path / "run", saved)


@pytest.mark.parametrize("changed", [False, True])
def test_a_job_that_is_told_to_end_leaves_a_checkpoint(changed: bool, tmp_path: Path, saved: Saved) -> None:
    """In the layout of the launch, or in one that it has come to: that is the one of the next launch here."""
    sizes = Sizes(1, 1, 2) if changed else PAIR.sizes
    running = started(tmp_path / "run", PAIR)
    if changed:
        assert command(running, sizes, FIRST) == ""
        running.wait_for("recovery_finished", TIMEOUT_S)
    running.wait_for_step(AT, TIMEOUT_S)
    running.popen.terminate()
    ended = running.wait(TIMEOUT_S)
    left = tmp_path / "run" / LAST_CHECKPOINT
    assert ended.code == 1 and f"is in checkpoint {left}" in ended.output, ended.explain()
    job = started(tmp_path / "run", PAIR, options=["--resume"], sizes=sizes).wait(TIMEOUT_S)
    (said,) = [notice["text"] for notice in job.notices("resumed")]
    step = int(said.removeprefix("resumed at step ").partition(" ")[0])
    assert job.code == 0 and AT <= step < STEPS, job.explain()
    _, whole = saved.of(PAIR, [(FIRST, sizes)] if changed else [])
    check_same_steps(Course.of(job), Course.of(whole), step, STEPS, sizes, job.explain())
    check_clean(job)
    assert not left.exists(), "the job has come to its end"


def kills() -> list[Any]:
    return [
        pytest.param(training, phase, victim, id=f"{training}-{phase}-{victim}")
        for training in (STAGES, PARTS)
        for phase in PHASES
        for victim in VICTIMS
        if phase != "param-gather" or training is PARTS
    ]


@pytest.mark.parametrize(("training", "phase", "victim"), kills())
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    check_losses(training, [killed(victim, phase)], 3, tmp_path / "run", saved)


@pytest.mark.parametrize("training", [ROWS, WIDE, TIED, DEEP], ids=str)
def test_other_trainings(training: Training, tmp_path: Path, saved: Saved) -> None:
    check_losses(training, [killed(1, "optimizer")], 3, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["quiescing", "stashing"])
@pytest.mark.parametrize("training", [STAGES, TIED], ids=str)
def test_a_second_death_before_the_change(training: Training, state: str, tmp_path: Path, saved: Saved) -> None:
    check_second_death_before_the_change(training, state, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
def test_a_second_death_in_the_new_layout(state: str, tmp_path: Path, saved: Saved) -> None:
    check_second_death_in_the_new_layout(PARTS, state, tmp_path / "run", saved)


def test_a_rank_that_is_replaced_while_the_layout_changes(tmp_path: Path, saved: Saved) -> None:
    """By command, and one is killed as it is asked to stop: the command is carried out all the same."""
    running = started(tmp_path / "run", STAGES, inject=[killed(1, "recovery:quiescing", None)])
    assert command(running, Sizes(1, 2, 1), AT) == ""
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    check_goes_on(job, STAGES, saved, [(AT, Sizes(1, 2, 1))])


def test_a_rank_is_replaced_in_the_new_layout(tmp_path: Path, saved: Saved) -> None:
    check_replaced_in_the_new_layout(PARTS, Sizes(1, 2, 1), tmp_path / "run", saved)


def test_two_at_once_with_each_others_copies_end_the_job(tmp_path: Path) -> None:
    """No rank has the state, and there is no checkpoint: loudly."""
    running = start(tmp_path / "run", STAGES, *SLOWLY)
    wait_for_version(running, 2)
    running.kill(1, 2)
    job = running.wait(TIMEOUT_S)
    assert job.code != 0, job.explain()
    (failed,) = job.of("job_failed")
    assert "cannot be recovered" in failed["reason"], job.explain()


def test_two_at_once_go_back_to_a_checkpoint_in_another_layout(tmp_path: Path, saved: Saved) -> None:
    check_back_to_a_checkpoint(STAGES, tmp_path, saved)


def test_no_layout_fits(tmp_path: Path) -> None:
    job = start(tmp_path / "run", STAGES, inject=[killed(1, "backward")], config=never(4)).wait(TIMEOUT_S)
    assert job.code != 0, job.explain()
    (failed,) = job.of("job_failed")
    assert "no parallel layout fits the 3 ranks" in failed["reason"] and "parallelism.min" in failed["reason"], (
        job.explain()
    )


def test_what_is_refused(tmp_path: Path, saved: Saved) -> None:
    running = started(tmp_path / "run", STAGES)
    assert "does not divide 2 heads" in command(running, Sizes(4, 1, 1))
    assert "8 ranks are needed" in command(running, Sizes(2, 2, 2))
    assert "has the layout" in command(running, STAGES.sizes)
    wait_for_version(running, 2)
    assert "has begun already" in command(running, Sizes(1, 2, 1), 1)
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and not job.of("job_replanned"), job.explain()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--mode", "loader"), "batches of each rank's own"),
        (
            ("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce", "--bf16"),
            "overlap_param_gather",
        ),
    ],
    ids=["loader", "overlap"],
)
def test_jobs_that_are_refused(flags: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    job = start(tmp_path / "run", Training("refused", Sizes(1, 1, 2), flags)).wait(TIMEOUT_S)
    assert job.code != 0 and reason in job.explain(), job.explain()

"""Jobs of Megatron-LM's loop that are elastic, and whose parallel layout may change: in which call a rank is killed,
and what becomes of the job when it loses a replica first, and then a rank of the last one, or both at once."""

from __future__ import annotations

from pathlib import Path

from tests.support.jobs import Job, check_fired
from tests.support.megatron_lm_loop import TIMEOUT_S
from tests.support.replan import Saved, Sizes
from tests.support.replan_elastic import Stage, never, stages
from tests.support.replan_megatron_lm import Training, check_loop

FIRST, SECOND = 2, 5
"""Iterations of the two losses."""
ONE = Sizes()
SHARDED = ("--use-distributed-optimizer", "--bf16")
PHASES = ("data", "forward", "backward", "optimizer-start", "optimizer", "commit")


def kill(training: Training, rank: int, phase: str, number: int, kind: str = "train") -> str:
    """In a call of this iteration."""
    return f"rank={rank},fault=sigkill,at={phase},step={training.call(kind, number)}"


def check_two_losses(job: Job, training: Training, saved: Saved, first: int = FIRST, second: int = SECOND) -> None:
    """First a replica has left, and then the layout has changed, to one rank; each around its iteration."""
    check_fired(job, 2)
    found = stages(job, training)
    expected = [(training.sizes.of(1), False), (ONE, True)]
    assert [(stage.sizes, stage.restarted) for stage in found] == expected, job.explain()
    assert training.iteration(found[0].step) in (first, first + 1), job.explain()
    assert training.iteration(found[1].step) in (second, second + 1), job.explain()
    assert not job.of("fallback_started"), job.explain()
    check_loop(job, training, saved, found)


def two_losses(
    training: Training, folder: Path, saved: Saved, *faults: str, first: int = FIRST, second: int = SECOND
) -> None:
    """A job that these faults strike, which no rank is replaced in."""
    job = training.start(folder / "run", config=never(training), inject=faults).wait(TIMEOUT_S)
    check_two_losses(job, training, saved, first, second)


def leaves_and_then_dies(training: Training, folder: Path, saved: Saved, leaver: int, victim: int) -> None:
    """The replica of the first of these ranks leaves, and then the other one dies."""
    faults = [kill(training, leaver, "backward", FIRST), kill(training, victim, "optimizer", SECOND)]
    two_losses(training, folder, saved, *faults)


def _second_death(training: Training, folder: Path, state: str) -> tuple[Job, list[Stage]]:
    """The last rank dies, and the first one in this state of the recovery."""
    faults = [kill(training, 3, "backward", FIRST), f"rank=0,fault=sigkill,at=recovery:{state}"]
    job = training.start(folder / "run", config=never(training), inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    return job, stages(job, training)


def dies_before_the_smaller_job_goes_on(training: Training, folder: Path, saved: Saved) -> None:
    """The copies of the last replica are there before it does."""
    job, found = _second_death(training, folder, "resuming")
    assert found[-1].restarted and found[-1].sizes.ranks == 1, job.explain()
    check_loop(job, training, saved, found)


def dies_as_a_replica_is_about_to_leave(training: Training, folder: Path, saved: Saved) -> None:
    """Of the replica that was to stay: what is left of both lays the job out again."""
    job, found = _second_death(training, folder, "quiescing")
    assert found and found[-1].restarted and found[-1].sizes.ranks <= 2, job.explain()
    check_loop(job, training, saved, found)


def dies_when_a_replica_has_just_left(training: Training, folder: Path, state: str) -> None:
    """What it had is nowhere else: the job ends, and says so."""
    job, _ = _second_death(training, folder, state)
    assert job.code != 0, job.explain()
    (failed,) = job.of("job_failed")
    assert "cannot be recovered" in failed["reason"] or "no rank" in failed["reason"], job.explain()


def below_the_least(training: Training, folder: Path, saved: Saved) -> None:
    """With ``elastic.min`` 2 no replica leaves: the three ranks that are left get another layout at once."""
    faults = [kill(training, 1, "backward", FIRST)]
    job = training.start(folder / "run", config=never(training, least=2), inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    (found,) = stages(job, training)
    assert found.restarted and found.sizes.ranks in (2, 3), job.explain()
    check_loop(job, training, saved, [found])

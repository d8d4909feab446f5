"""Fallback checkpoints of elastic jobs with FSDP2, read in another size than that in which they were written: bit for
bit as a job that was resized by command at that step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import STEPS, command, often
from tests.support.elastic_checkpoints import dead_job, fell_back, launched, of_ranks, saving, spoil, started
from tests.support.elastic_fsdp2 import Resized, check_goes_on_alike, resized_once, start
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def check_launched(job: Job, other: Job, version: int, size: int) -> None:
    """It has begun with this version, and goes on as the other one."""
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_goes_on_alike(job, other, version, size)
    check_clean(job)


@pytest.mark.parametrize("size", often((2, 3), ()))
def test_a_job_that_died_whole_goes_on_smaller(size: int, tmp_path: Path, resized: Resized) -> None:
    version, _ = dead_job(tmp_path)[-1]
    job = launched(tmp_path, "smaller", size)
    check_launched(job, resized(version, size), version, size)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [(3, 4), (2, 3)])
def test_a_job_that_died_whole_goes_on_larger(before: int, after: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, nproc=before)[-1]
    other = started(tmp_path, before, version, after)
    check_launched(launched(tmp_path, "larger", after), other, version, after)


FORMS = {
    "mixed-precision": ("--mixed",),
    "tied-named": ("--tied", "--named"),
    "momentum": ("--optimizer", "sgd"),
    "uneven-batch": ("--global-batch", "20"),
}


@pytest.mark.parametrize("form", often(FORMS, ()))
def test_forms(form: str, tmp_path: Path, resized: Resized) -> None:
    version, _ = dead_job(tmp_path, *FORMS[form])[-1]
    job = launched(tmp_path, "smaller", 3, *FORMS[form])
    check_launched(job, resized(version, 3, *FORMS[form]), version, 3)


@pytest.mark.grid
@pytest.mark.parametrize("damage", ["missing", "bit", "short", "metadata"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    damage: str, tmp_path: Path, resized: Resized
) -> None:
    *_, (older, _), (_, newest) = dead_job(tmp_path, checkpoints=2)
    named = spoil(newest, damage)
    job = launched(tmp_path, "smaller", 3)
    assert any(named in notice["text"] for notice in job.notices("checkpoint_damaged")), job.explain()
    assert job.code == 0, job.explain()
    check_goes_on_alike(job, resized(older, 3), older, 3)
    check_clean(job)


@pytest.mark.grid
def test_without_another_checkpoint_the_damaged_file_is_named(tmp_path: Path) -> None:
    for _, path in dead_job(tmp_path):
        named = spoil(path, "missing")
    job = launched(tmp_path, "smaller", 3)
    assert job.code != 0 and named in job.of("job_failed")[0]["reason"], job.explain()
    assert not [log for log in job.logs if log.lines], job.explain()
    check_clean(job)


def running_job(tmp_path: Path, nproc: int, **options: Any) -> RunningJob:
    """A job that has a checkpoint; no rank is replaced."""
    config = {"elastic": {"min": 2, "max": nproc, "replace": "never"}, **saving(tmp_path / "checkpoints")}
    running = start(tmp_path / "run", "--step-time", "300", config=config, nproc=nproc, **options)
    running.wait_for("checkpoint_saved")
    return running


@pytest.mark.grid
@pytest.mark.parametrize("victims", [(1, 2), (0, 3), (0, 1)])
def test_too_many_are_lost_at_once(victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """No rank has what one of them had: the others go back to a checkpoint of all four."""
    running = running_job(tmp_path, 4)
    running.kill(*victims)
    job = running.wait()
    version = fell_back(job, 4, 2, STEPS)
    check_goes_on_alike(job, resized(version, 2), version, 2)
    check_clean(job)


@pytest.mark.grid
@pytest.mark.parametrize("left", [3, 0])
def test_one_is_left(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In size 1 nothing is sharded any more. (By command it is not possible: of what three have alone one has copies of
    what one of them has.) A job of one rank has as many threads as there are cores unless it is told otherwise, and the
    gradient of LayerNorm's weight is added up in another order by two threads than by one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = {"elastic": {"min": 1, "max": 4, "replace": "never"}, **saving(tmp_path / "checkpoints")}
    running = start(tmp_path / "run", "--step-time", "300", config=config)
    running.wait_for("checkpoint_saved")
    running.kill(*(rank for rank in range(4) if rank != left))
    job = running.wait()
    version = fell_back(job, 4, 1, STEPS)
    check_goes_on_alike(job, started(tmp_path, 4, version, 1), version, 1)
    check_clean(job)


@pytest.fixture(scope="module")
def of_five(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """The job of two ranks that is started from what one of five, undisturbed, has had at a step."""
    made: dict[int, Job] = {}

    def job(step: int) -> Job:
        if step not in made:
            made[step] = started(tmp_path_factory.mktemp("started"), 5, step, 2)
        return made[step]

    return job


@pytest.mark.grid
@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying", "resuming"])
@pytest.mark.parametrize("third", [0, 3])
def test_one_more_dies_while_they_go_back(
    third: int, state: str, tmp_path: Path, of_five: Callable[[int], Job]
) -> None:
    running = running_job(tmp_path, 5, inject=[f"rank={third},fault=sigkill,at=recovery:{state}"])
    running.kill(1, 2)
    job = running.wait()
    check_fired(job)
    version = fell_back(job, 5, 2, STEPS)
    check_goes_on_alike(job, of_five(version), version, 2)
    check_clean(job)


@pytest.mark.grid
def test_all_die_in_a_smaller_size_before_it_has_a_checkpoint(tmp_path: Path, resized: Resized) -> None:
    """All are replaced, and go back to a checkpoint of more ranks than they are."""
    config = {"elastic": {"min": 2, "max": 4}, **saving(tmp_path / "checkpoints", 4.0)}
    running = start(tmp_path / "run", "--step-time", "500", config=config)
    running.wait_for("checkpoint_saved")
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    running.kill(0, 1, 2)
    job = running.wait()
    fallback = job.of("fallback_started")[0]
    assert job.code == 0 and of_ranks(Path(fallback["path"])) == 4, job.explain()
    assert job.of("recovery_finished")[-1]["victims"] and not job.of("recovery_finished")[-1]["left"], job.explain()
    for log in job.run_dir.rglob("rank*.gen0.log"):
        log.unlink()  # with three ranks from a later step on: steps of that size had another past
    check_goes_on_alike(job, resized(fallback["version"], 3), fallback["version"], 3)
    check_clean(job)

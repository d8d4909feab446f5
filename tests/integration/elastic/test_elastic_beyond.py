"""Elastic jobs grow beyond their launch: as a job that was resized by command at the same steps, bit for bit, which
goes on as a job that was started in that size from that step's state. Ranks that no launch has had may die as any
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import (
    AHEAD,
    LONG,
    changes,
    check_batches,
    check_goes_on_alike,
    check_steps_alike,
    grow,
    inject,
    long_flags,
    often,
    resized_by_command,
    sizes_of,
    start,
)
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

pytestmark = [pytest.mark.timeout(300), pytest.mark.grid]
AT, LOST, BACK = 10, 16, 30
Resized = Callable[[Sequence[tuple[int, int]]], Job]


def beyond(least: int = 1, most: int = 4, **more: Any) -> dict[str, Any]:
    return {"elastic": {"min": least, "max": most, **more}, "slots": 4}


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """The job of two ranks that is resized by command, undisturbed. Each is made once."""
    made: dict[tuple[tuple[int, int], ...], Job] = {}

    def job(sizes: Sequence[tuple[int, int]]) -> Job:
        key = tuple(sizes)
        if key not in made:
            folder = tmp_path_factory.mktemp("resized") / "job"
            made[key] = resized_by_command(folder, sizes, launched=2, config=beyond())
        return made[key]

    return job


def check_as_commanded(job: Job, resized: Resized) -> None:
    """In all its sizes the job went the way of one that was resized by command at the same steps."""
    assert job.code == 0, job.explain()
    sizes = sizes_of(job)
    other = resized(sizes)
    for (step, size), (until, _) in zip(sizes, [*sizes[1:], (LONG, 0)], strict=True):
        check_steps_alike(job, other, step, until, size)
    check_goes_on_alike(job, other, *sizes[-1], LONG)
    check_clean(job)


def grown(folder: Path, *flags: str, then: int | None = None, **elastic: Any) -> RunningJob:
    """Two ranks have become four; they are held at ``then``."""
    running = start(folder, beyond(**elastic), *long_flags(), *flags, nproc=2)
    running.hold(AT - AHEAD)
    running.wait_for("job_started")
    grow(running, 4, AT, then)
    return running


def test_two_ranks_become_four(tmp_path: Path, resized: Resized) -> None:
    job = grown(tmp_path / "run", "--show-batches").wait()
    (change,) = changes(job)
    assert change.ranks == (0, 1, 2, 3) and job.of("job_resized")[0]["came"] == [2, 3], job.explain()
    check_batches(job, LONG)
    check_as_commanded(job, resized)


@pytest.mark.parametrize("victims", often([(0,), (1,), (2,), (3,), (0, 1), (2, 3), (1, 2)], ()))
def test_there_and_killed_and_back(victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """2 -> 4 -> 3 or 2 -> 4: those of the launch may leave as well as the others."""
    running = grown(tmp_path / "run", "--show-batches", then=LOST - 2, replace="never")
    for rank in victims:
        inject(running, rank=rank, at="backward", step=LOST)
    running.hold(BACK - AHEAD)
    running.wait_for("recovery_finished", count=2)
    grow(running, 4, BACK)
    job = running.wait()
    check_fired(job, len(victims))
    assert [c.ranks for c in changes(job)][-1] == (0, 1, 2, 3), job.explain()
    assert job.of("job_resized")[-1]["came"] == list(victims), job.explain()
    assert len(job.of("failure_detected")) == len(victims), job.explain()
    check_batches(job, LONG)
    check_as_commanded(job, resized)


def test_those_beyond_are_replaced(tmp_path: Path, resized: Resized) -> None:
    """Each rank dies once in the larger size, and is filled again."""
    running = grown(tmp_path / "run", then=LOST - 2)
    for number, rank in enumerate((3, 2, 0, 1)):
        inject(running, rank=rank, at="backward", step=LOST + 4 * number)
    running.hold(None)
    job = running.wait()
    check_fired(job, 4)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], [3], [2], [0], [1]], job.explain()
    assert len(job.of("job_resized")) == 1, job.explain()
    check_as_commanded(job, resized)


REFUSED = {
    "too few micro-batches": (
        2,
        {"min": 1, "max": 13},
        "a step has 12 micro-batches, and at least one for each replica",
    ),
    "launched with more": (4, {"min": 1, "max": 3}, "the job is launched with 4 ranks, which are 4 replicas"),
    "launched with fewer": (2, {"min": 3, "max": 4}, "a launch within MIN:MAX is allowed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_the_first_step(what: str, tmp_path: Path) -> None:
    nproc, elastic, said = REFUSED[what]
    job = start(tmp_path / "run", {"elastic": elastic}, nproc=nproc).wait()
    assert job.code != 0 and said in job.explain(), job.explain()
    assert not job.of("job_started"), job.explain()
    check_clean(job)

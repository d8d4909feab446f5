"""Elastic jobs of ``tests/scripts/elastic_replicas.py``: compared step by step, each rank's part of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import command
from tests.support.elastic_fsdp2 import Course, check_steps_alike
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

SCRIPT = ROOT / "tests" / "scripts" / "elastic_replicas.py"
STEPS = 16
EACH = 2
"""Ranks of a replica."""
Resized = Callable[..., Job]


def never(most: int, least: int = 1) -> dict[str, Any]:
    return {"elastic": {"min": least, "max": most, "replace": "never"}}


def start(
    folder: Path,
    *flags: str,
    replicas: int = 2,
    config: Mapping[str, Any] | None = None,
    inject: Sequence[str] = (),
    standby: int = 0,
    steps: int = STEPS,
) -> RunningJob:
    return RunningJob(
        folder,
        Layout("elastic", "", nproc=replicas * EACH),
        standby=standby,
        inject=inject,
        config=never(replicas) if config is None else config,
        script=SCRIPT,
        flags=["--steps", str(steps), *flags],
    )


def replica_of(rank: int, replicas: int, *flags: str) -> tuple[int, ...]:
    """All ranks of the replica of this one, as the job was launched."""
    if "--stride" in flags:
        return tuple(range(rank % replicas, replicas * EACH, replicas))
    return tuple(range(rank // EACH * EACH, rank // EACH * EACH + EACH))


def check_goes_on_alike(job: Job, other: Job, step: int, ranks: int, end: int = STEPS) -> None:
    """From ``step`` on both jobs have that many ranks, and the same bits in every step on every rank, to the end."""
    check_steps_alike(job, other, step, end, ranks)
    mine, theirs = Course.of(job), Course.of(other)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    assert mine.ends == theirs.ends and set(mine.ends) == set(range(ranks)), why


def check_same_in_all_replicas(job: Job, step: int, ranks: int, end: int = STEPS) -> None:
    """The ranks at the same place of each replica have the same parts (neighbours make up a replica)."""
    course = Course.of(job)
    for version in range(step + 1, end + 1):
        for place in range(EACH):
            found = {digest for rank in range(place, ranks, EACH) for digest in course.parts[version, rank, ranks]}
            assert len(found) == 1, f"version {version}, place {place}: {found}\n{job.explain()}"


def commanded(folder: Path, step: int, size: int, *flags: str, launched: int) -> Job:
    """A job of that many replicas that is resized by command, undisturbed: from ``step`` on to ``size``. It is itself
    compared with a job that was started in the new size from that step's state."""
    folder.mkdir(exist_ok=True)
    elastic = {"elastic": {"min": 1, "max": launched}}
    slowly = ("--step-time", "150", "--save-to", str(folder), *flags)
    running = start(folder / "run", *slowly, config=elastic, replicas=launched)
    running.wait_for("job_started", 120)
    assert command(running, size, step) == ""
    job = running.wait(180)
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    left = [
        rank
        for last in range(size, launched)
        for rank in replica_of(last if "--stride" in flags else last * EACH, launched, *flags)
    ]
    assert (event["step"], event["before"], event["replicas"], event["left"]) == (step, launched, size, sorted(left)), (
        job.explain()
    )
    assert [n["text"][-11:] for n in job.notices("rank_left")] == ["exit code 0"] * len(left), job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_clean(job)
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    begin = ("--start-from", str(folder / f"{step}.pt"), *flags)
    new = start(folder / "new", *begin, config=config, replicas=size).wait(180)
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size * EACH)
    check_clean(new)
    return job


def resized_once(factory: pytest.TempPathFactory) -> Resized:
    """The job that is resized by command, undisturbed: from that many replicas, from this step on, to this size, with
    these flags. Each is made once, and is itself compared with a job that was started in the new size from that step's
    state."""

    @cache
    def job(launched: int, step: int, size: int, *flags: str) -> Job:
        return commanded(factory.mktemp("resized"), step, size, *flags, launched=launched)

    return job


def check_ends_as_resized(job: Job, resized: Resized, launched: int, left: Sequence[int], *flags: str) -> None:
    """The replicas of these ranks have left, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    gone = sorted({rank for victim in left for rank in replica_of(victim, launched, *flags)})
    assert sorted(rank for event in events for rank in event["left"]) == gone, job.explain()
    step, size = events[-1]["step"], launched - len(gone) // EACH
    assert events[-1]["replicas"] == size and {event["step"] for event in events} <= {step, step - 1}, job.explain()
    dead = set(left)
    ends = {n["rank"]: n["text"] for n in job.notices("rank_left")}
    healthy = [rank for rank in gone if rank not in dead]
    assert all(ends[rank].endswith("exit code 0") for rank in healthy), job.explain()
    check_goes_on_alike(job, resized(launched, step, size, *flags), step, size * EACH)
    if "--stride" not in flags:
        check_same_in_all_replicas(job, step, size * EACH)
    check_clean(job)

"""Elastic jobs of ``tests/scripts/elastic_fsdp2.py``: compared step by step, each rank's part of the state."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import STEPS, command, never
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

SCRIPT = ROOT / "tests" / "scripts" / "elastic_fsdp2.py"
Resized = Callable[..., Job]
_STEP = re.compile(r"step=(\d+) rank=(\d+) size=(\d+) loss_hex=(\S+)")
_PART = re.compile(r"part=(\d+) rank=(\d+) size=(\d+) ([0-9a-f]{64})")
_DIGEST = re.compile(r"digest rank=(\d+) ([0-9a-f]{64})")


def start(
    folder: Path,
    *flags: str,
    config: Mapping[str, Any] | None = None,
    nproc: int = 4,
    inject: Sequence[str] = (),
    standby: int = 0,
) -> RunningJob:
    return RunningJob(
        folder,
        Layout("elastic", "", nproc=nproc),
        standby=standby,
        inject=inject,
        config=never() if config is None else config,
        script=SCRIPT,
        flags=["--steps", str(STEPS), *flags],
    )


@dataclass
class Course:
    """What the processes of a job have printed: losses by step, number in the group, and size; digests of each rank's
    part of the state by version, number and size; and of the whole state at the end by number. More than one of the
    same is a difference."""

    losses: dict[tuple[int, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    parts: dict[tuple[int, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Course:
        found = Course()
        for log in job.run_dir.rglob("rank*.log"):
            text = log.read_text()
            for step, rank, size, loss in _STEP.findall(text):
                found.losses[int(step), int(rank), int(size)].add(loss)
            for version, rank, size, digest in _PART.findall(text):
                found.parts[int(version), int(rank), int(size)].add(digest)
            found.ends |= {int(rank): digest for rank, digest in _DIGEST.findall(text)}
        return found


def check_goes_on_alike(job: Job, other: Job, step: int, size: int, end: int = STEPS) -> None:
    """From ``step`` on both jobs are of this size, and have the same bits in every step on every rank, to the ``end``
    of their steps."""
    check_steps_alike(job, other, step, end, size)
    mine, theirs = Course.of(job), Course.of(other)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    assert mine.ends == theirs.ends and set(mine.ends) == set(range(size)), why
    assert len({*mine.ends.values()}) == 1, f"the ranks do not gather the same state\n{why}"


def check_steps_alike(job: Job, other: Job, step: int, until: int, size: int) -> None:
    """From ``step`` until before ``until`` both jobs are of this size, and have the same bits on every rank."""
    mine, theirs = Course.of(job), Course.of(other)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    for number in range(step, until):
        for rank in range(size):
            for what, at in (("losses", number), ("parts", number + 1)):
                found = getattr(mine, what)[at, rank, size]
                assert len(found) == 1, f"{what} of {at}, rank {rank}: {found}\n{why}"
                assert found == getattr(theirs, what)[at, rank, size], f"{what} of {at}, rank {rank}\n{why}"


def check_moved(job: Job) -> None:
    """State has been sharded otherwise, and each byte that a rank lacked has gone once."""
    finished = job.of("recovery_finished")[-1]
    assert 0 < finished["lacking_bytes"] <= finished["reshaped_bytes"] <= 1.05 * finished["lacking_bytes"], finished


def commanded(folder: Path, step: int, size: int, *flags: str, launched: int = 4) -> Job:
    """A job of that many ranks that is resized by command, undisturbed: from ``step`` on to ``size``. It is itself
    compared with a job that was started in the new size from that step's state."""
    folder.mkdir(exist_ok=True)
    elastic = {"elastic": {"min": 1, "max": launched}}
    running = start(
        folder / "run", "--step-time", "100", "--save-to", str(folder), *flags, config=elastic, nproc=launched
    )
    running.wait_for("job_started")
    assert command(running, size, step) == ""
    job = running.wait()
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    assert (event["step"], event["before"], event["replicas"]) == (step, launched, size), job.explain()
    assert [n["text"][-11:] for n in job.notices("rank_left")] == ["exit code 0"] * (launched - size), job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_moved(job)
    check_clean(job)
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    new = start(folder / "new", "--start-from", str(folder / f"{step}.pt"), *flags, config=config, nproc=size).wait()
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size)
    check_clean(new)
    return job


def resized_once(factory: pytest.TempPathFactory) -> Resized:
    """The job of four ranks that is resized by command, undisturbed: from this step on to this size, with these flags.
    Each is made once, and is itself compared with a job that was started in the new size from that step's state."""

    @cache
    def job(step: int, size: int, *flags: str) -> Job:
        return commanded(factory.mktemp("resized"), step, size, *flags)

    return job

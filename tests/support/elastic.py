"""Elastic jobs of ``tests/scripts/elastic.py``: started, resized by command, and compared step by step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from flashrecovery.cli.resize import resize
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

SCRIPT = ROOT / "tests" / "scripts" / "elastic.py"
STEPS = 16
_STEP = re.compile(r"step=(\d+) rank=(\d+) size=(\d+) loss_hex=(\S+)")
_STATE = re.compile(r"state=(\d+) size=(\d+) ([0-9a-f]{64})")
_DIGEST = re.compile(r"digest rank=(\d+) ([0-9a-f]{64})")


def never(least: int = 2, **timeouts: float) -> dict[str, Any]:
    return {"elastic": {"min": least, "max": 4, "replace": "never"}, "timeouts": timeouts}


def start(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *flags: str,
    nproc: int = 4,
    inject: Sequence[str] = (),
    standby: int = 0,
    script: Path = SCRIPT,
) -> RunningJob:
    return RunningJob(
        folder,
        Layout("elastic", "", nproc=nproc),
        standby=standby,
        inject=inject,
        config=never() if config is None else config,
        script=script,
        flags=["--steps", str(STEPS), *flags],
    )


def command(job: RunningJob, replicas: int, step: int | None = None) -> str:
    """``flashrecovery resize``; returns what it has refused, "" if nothing."""
    at = () if step is None else ("--at-step", str(step))
    done = CliRunner().invoke(resize, [str(job.run_dir), "--to", str(replicas), *at])
    return "" if done.exit_code == 0 else str(done.exception)


@dataclass
class Course:
    """What the processes of a job have printed: losses by step, number in the group, and size; digests of the state by
    version and size (a victim may have completed a step alone, of which nobody else knows); and of the end by number.
    More than one of the same is a difference."""

    losses: dict[tuple[int, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    states: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    ends: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Course:
        found = Course()
        for log in job.run_dir.rglob("rank*.log"):
            text = log.read_text()
            for step, rank, size, loss in _STEP.findall(text):
                found.losses[int(step), int(rank), int(size)].add(loss)
            for version, size, digest in _STATE.findall(text):
                found.states[int(version), int(size)].add(digest)
            found.ends |= {int(rank): digest for rank, digest in _DIGEST.findall(text)}
        return found


def check_goes_on_alike(job: Job, other: Job, step: int, size: int) -> None:
    """From ``step`` on both jobs are of this size, and have the same bits in every step on every rank."""
    mine, theirs = Course.of(job), Course.of(other)
    why = f"{job.explain()}\n--- the other\n{other.explain()}"
    for number in range(step, STEPS):
        for rank in range(size):
            losses = mine.losses[number, rank, size]
            assert len(losses) == 1, f"step {number}, rank {rank}: {losses}\n{why}"
            assert losses == theirs.losses[number, rank, size], f"step {number}, rank {rank}\n{why}"
        states = mine.states[number + 1, size]
        assert len(states) == 1, f"the ranks differ in version {number + 1}\n{why}"
        assert states == theirs.states[number + 1, size], f"version {number + 1}\n{why}"
    assert mine.ends == theirs.ends and set(mine.ends) == set(range(size)), why


def commanded(
    folder: Path,
    step: int,
    size: int,
    *flags: str,
    launched: int = 4,
    script: Path = SCRIPT,
    timeout_s: float = 120,
    divided: bool = False,
    started: bool = True,
) -> Job:
    """A job of so many ranks that is resized by command, undisturbed: from ``step`` on to ``size``. It is itself
    compared with a job that was started in the new size from that step's state. ``divided``: its state is, and who
    leaves need not be the last ones. ``started``: False leaves out the comparison."""
    folder.mkdir(exist_ok=True)
    elastic = {"elastic": {"min": 1, "max": launched}}
    slowly = ("--step-time", "100", "--save-to", str(folder), *flags)
    running = start(folder / "run", elastic, *slowly, nproc=launched, script=script)
    running.wait_for("job_started", timeout_s)
    assert command(running, size, step) == ""
    job = running.wait(timeout_s)
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    left = event["left"] if divided else list(range(size, launched))
    assert len(left) == launched - size, job.explain()
    assert (event["step"], event["before"], event["replicas"], event["left"]) == (step, launched, size, left), (
        job.explain()
    )
    assert [n["text"][-11:] for n in job.notices("left")] == ["exit code 0"] * len(left), job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_clean(job)
    if not started:
        return job
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    begin = ("--start-from", str(folder / f"{step}.pt"), *flags)
    new = start(folder / "new", config, *begin, nproc=size, script=script).wait(timeout_s)
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size)
    check_clean(new)
    return job

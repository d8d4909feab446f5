"""Elastic jobs: a rank dies and nobody replaces it, and the others go on as a job that was resized by command at the
same step, bit for bit, which goes on as a job that was started in the new size from that step's state."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrecovery.cli.resize import resize
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean, check_fired

pytestmark = pytest.mark.timeout(240)
SCRIPT = ROOT / "tests" / "scripts" / "elastic.py"
STEPS, AT = 16, 9
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
VICTIMS = (0, 1, 3)
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
        for log in (job.run_dir / "logs").glob("rank*.log"):
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


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Job]:
    """The job that is resized by command, undisturbed: from this step on to this size. Each is made once, and is itself
    compared with a job that was started in the new size from that step's state."""
    made: dict[tuple[int, int], Job] = {}

    def job(step: int, size: int) -> Job:
        if (step, size) not in made:
            made[step, size] = _resized(tmp_path_factory.mktemp(f"resized-{step}-{size}"), step, size)
        return made[step, size]

    return job


def _resized(folder: Path, step: int, size: int) -> Job:
    running = start(folder / "run", None, "--step-time", "100", "--save-to", str(folder))
    running.wait_for("job_started")
    assert command(running, size, step) == ""
    job = running.wait()
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    left = list(range(size, 4))
    assert (event["step"], event["before"], event["replicas"], event["left"]) == (step, 4, size, left), job.explain()
    assert [n["text"][-11:] for n in job.notices("left")] == ["exit code 0"] * len(left), job.explain()
    assert not job.of("failure_detected"), job.explain()
    check_clean(job)
    config = {"elastic": {"min": 1, "max": size}} if size > 1 else {}
    new = start(folder / "new", config, "--start-from", str(folder / f"{step}.pt"), nproc=size).wait()
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, step, size)
    check_clean(new)
    return job


def check_shrunk(job: Job, resized: Callable[[int, int], Job], left: list[int]) -> None:
    """These ranks have left together, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    (event,) = job.of("job_resized")
    size = 4 - len(left)
    assert event["left"] == left and event["replicas"] == size, job.explain()
    assert event["step"] in (AT, AT + 1), job.explain()
    assert all(recovery["left"] == recovery["victims"] for recovery in job.of("recovery_finished"))
    check_goes_on_alike(job, resized(event["step"], size), event["step"], size)
    check_clean(job)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_not_replaced(phase: str, victim: int, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    job = start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait()
    check_fired(job)
    check_shrunk(job, resized, [victim])


@pytest.mark.parametrize("fault", ["raise", "exit", "sigstop"])
def test_other_losses(fault: str, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    job = start(tmp_path / "run", inject=[f"rank=2,fault={fault},at=backward,step={AT}"]).wait()
    check_fired(job)
    check_shrunk(job, resized, [2])


def test_two_at_once(tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (0, 2)]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [0, 2])


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "verifying"])
def test_a_second_death_during_the_change(state: str, tmp_path: Path, resized: Callable[[int, int], Job]) -> None:
    faults = [f"rank=1,fault=sigkill,at=backward,step={AT}", f"rank=3,fault=sigkill,at=recovery:{state}"]
    job = start(tmp_path / "run", inject=faults).wait()
    check_fired(job, 2)
    check_ends_as_resized(job, resized, [1, 3])


def check_ends_as_resized(job: Job, resized: Callable[[int, int], Job], left: list[int]) -> None:
    """These ranks have left, at the same step, and the others go on as if that had been commanded."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, size = events[-1]["step"], 4 - len(left)
    assert {event["step"] for event in events} == {step} and events[-1]["replicas"] == size, job.explain()
    check_goes_on_alike(job, resized(step, size), step, size)
    check_clean(job)

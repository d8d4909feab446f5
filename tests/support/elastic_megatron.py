"""Elastic jobs with megatron-core in your own loop: how they are started, and compared with jobs that are resized
by command at the same step, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import check_steps_alike, command, start
from tests.support.elastic_back import Way
from tests.support.elastic_checkpoints import dead_job, launched
from tests.support.elastic_checkpoints import started as began_otherwise
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S, AT, STEPS = 240, 6, 12


@dataclass(frozen=True)
class Training:
    """One configuration of the script. ``each``: ranks of a replica; ``runs``: of how many runs of ranks that follow on
    each other they are (pipeline stages)."""

    name: str
    flags: tuple[str, ...]
    replicas: int = 2
    each: int = 2
    runs: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def sharded(self) -> bool:
        """Whether state is sharded among the replicas."""
        return "--use-distributed-optimizer" in self.flags

    def ranks(self, victim: int) -> list[int]:
        """Of the victim's replica."""
        inner = self.each // self.runs
        replica = victim // inner % self.replicas
        return [(run * self.replicas + replica) * inner + at for run in range(self.runs) for at in range(inner)]

    def start(
        self, folder: Path, *flags: str, config: Any = None, inject: Sequence[str] = (), nproc: int = 0
    ) -> RunningJob:
        """Start one job, of as many ranks as it is launched with, or ``nproc``; none is replaced, if no ``config``
        says otherwise."""
        ranks = nproc or self.each * self.replicas
        never = {"elastic": {"min": 1, "max": ranks // self.each, "replace": "never"}}
        return start(
            *(folder, never if config is None else config, *self.flags, "--steps", str(STEPS), *flags),
            nproc=ranks,
            inject=inject,
            script=SCRIPT,
            env=ENVIRONMENT,
        )

    def run(self, folder: Path, *flags: str, **options: Any) -> Job:
        """Start one, and wait for its end."""
        return self.start(folder, *flags, **options).wait(TIMEOUT_S)


Resized = Callable[[Training, int, int], Job]


def resized_once(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """Gives the job that is resized by command at this step to that many replicas, undisturbed. It goes on as one that
    is *started* in that size from that step's state (an elastic one, which has two replicas)."""

    @cache
    def job(training: Training, step: int, replicas: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{training.name}-resized-{step}-{replicas}")
        config = {"elastic": {"min": 1, "max": training.replicas}}
        running = training.start(folder / "run", "--step-time", "300", "--save-to", str(folder), config=config)
        running.wait_for("job_started", TIMEOUT_S)
        refused = command(running, replicas, step)
        assert not refused, refused
        made = running.wait(TIMEOUT_S)
        assert made.code == 0 and not made.of("failure_detected"), made.explain()
        (event,) = made.of("job_resized")
        assert (event["step"], event["replicas"]) == (step, replicas), made.explain()
        check_clean(made)
        if replicas > 1:
            state, nproc = str(folder / f"{step}.pt"), training.each * replicas
            new = training.run(folder / "new", "--start-from", state, nproc=nproc)
            assert new.code == 0, new.explain()
            check_steps_alike(made, new, step, STEPS, nproc)
            check_clean(new)
        return made

    return job


def check_left(job: Job, training: Training, victims: Sequence[int], resized: Resized) -> None:
    """The victims' replicas have left in step AT, and the others go on as by command; what went over the wire for it is
    what was needed and not held."""
    assert job.code == 0, job.explain()
    check_fired(job, len(victims))
    left = sorted({rank for victim in victims for rank in training.ranks(victim)})
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], training.replicas - len(left) // training.each
    assert {event["step"] for event in events} <= {step, step - 1}, job.explain()
    assert step in range(AT - training.sharded, AT + 2) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, step, replicas), step, STEPS, training.each * replicas)
    for event in job.of("recovery_finished"):
        assert event["reshaped_bytes"] == event["lacking_bytes"], job.explain()
    check_clean(job)


def check_killed(training: Training, victims: Sequence[int], phase: str, folder: Path, resized: Resized) -> None:
    """All of them in this phase of step AT."""
    faults = tuple(f"rank={victim},fault=sigkill,at={phase},step={AT}" for victim in victims)
    check_left(training.run(folder, inject=faults), training, victims, resized)


def check_second_death(training: Training, first: int, second: int, state: str, folder: Path, resized: Resized) -> None:
    """The first one is killed in step AT, and the second one, of another replica, in this state of the recovery: both
    replicas leave."""
    faults = (f"rank={first},fault=sigkill,at=backward,step={AT}", f"rank={second},fault=sigkill,at=recovery:{state}")
    check_left(training.run(folder, inject=faults), training, (first, second), resized)


def check_back(training: Training, victim: int, folder: Path) -> None:
    """The victim's replica leaves, and comes back."""
    end, back = 38, 32

    def begin(folder: Path, *flags: str, **options: Any) -> RunningJob:
        return training.start(folder, "--steps", str(end), "--step-time", "800", *flags, **options)

    def alike(job: Job, other: Job, step: int, until: int, ranks: int) -> None:
        check_steps_alike(job, other, step, end if until < 0 else until, ranks)

    way = Way(begin, alike, lambda step: step, training.replicas, training.each)
    way.check_back(folder, [victim], training.ranks(victim), AT, back)


LONG = 40
"""Steps of jobs that write checkpoints."""


def by_ranks(training: Training) -> Callable[..., RunningJob]:
    """As :mod:`tests.support.elastic_checkpoints` starts jobs, which counts ranks."""

    def begin(folder: Path, *flags: str, config: Any, nproc: int, **options: Any) -> RunningJob:
        of_replicas = config
        if "elastic" in config:
            of_replicas = {**config, "elastic": {**config["elastic"], "max": nproc // training.each}}
        return training.start(folder, "--steps", str(LONG), *flags, config=of_replicas, nproc=nproc, **options)

    return begin


def check_read_by(training: Training, before: int, after: int, folder: Path) -> None:
    """A job of ``before`` replicas dies whole, and one of ``after`` goes on from its checkpoint."""
    begin, each = by_ranks(training), training.each
    version, _ = dead_job(folder, nproc=before * each, begin=begin)[-1]
    job = launched(folder, "again", after * each, begin=begin)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version > 0, job.explain()
    other = began_otherwise(folder, before * each, version, after * each, begin=begin)
    check_steps_alike(job, other, version, LONG, after * each)
    check_clean(job)

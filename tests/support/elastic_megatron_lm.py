"""Elastic jobs on the unmodified loop of a checkout of Megatron-LM: ``tests/scripts/elastic_megatron_lm.py``. What
versions count is in :mod:`tests.support.megatron_lm_loop`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.elastic import Change, Course, check_steps_alike, command
from tests.support.jobs import ROOT, Job, RunningJob, check_clean
from tests.support.megatron_lm_loop import (
    TIMEOUT_S,
    LoopTraining,
    check_experts_logged,
    evaluated,
    in_force,
    logs_of,
    loop_environment,
    mean_loss,
)

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron_lm.py"
DISTRIBUTED = ("--use-distributed-optimizer",)


@dataclass(frozen=True)
class Training(LoopTraining):
    """One configuration.

    Attributes:
        launched: ranks.
        each: ranks of a replica.
    """

    flags: tuple[str, ...] = ()
    launched: int = 4
    each: int = 1

    @property
    def sharded(self) -> bool:
        """Whether ranks have what others do not."""
        return "--use-distributed-optimizer" in self.flags

    def sizes(self, call: int, replicas: int) -> list[tuple[int, str]]:
        """From which iteration on a job has which size, if it has this one from ``call`` on."""
        return [(0, str(self.launched)), (self.iteration(call), str(replicas * self.each))]

    def start(
        self,
        folder: Path,
        *flags: str,
        config: Any = None,
        inject: Sequence[str] = (),
        nproc: int = 0,
        standby: int = 0,
    ) -> RunningJob:
        """Start one job, of as many ranks as it is launched with, or ``nproc``."""
        never = {"elastic": {"min": 1, "max": self.launched // self.each, "replace": "never"}}
        return elastic.start(
            folder,
            never if config is None else config,
            *(*self.common_flags(), *self.flags, f"--steps={self.iterations}", *flags),
            nproc=nproc or self.launched,
            inject=inject,
            standby=standby,
            script=SCRIPT,
            env=loop_environment(),
        )


def check_goes_on_alike(job: Job, other: Job, call: int, replicas: int, training: Training) -> None:
    """From ``call`` on both have the same bits in each iteration on every rank."""
    check_steps_alike(job, other, training.iteration(call), training.iterations, replicas * training.each)


def evaluations(job: Job) -> dict[tuple[int, int], set[str]]:
    """What evaluations have found, by iteration and size."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for (number, _, size), losses in evaluated(job).items():
        found[number, int(size)].update(losses)
    return found


_LOGGED = re.compile(r" iteration +(\d+)/ +\d+ \|(.*)")
_TIMES = re.compile(r"elapsed time[^|]*\|")


def logged(job: Job) -> dict[int, set[str]]:
    """What Megatron has logged of each iteration, but for times."""
    found: dict[int, set[str]] = defaultdict(set)
    for log in job.run_dir.rglob("rank*.log"):
        for number, line in _LOGGED.findall(log.read_text()):
            found[int(number) - 1].add(_TIMES.sub("", line))
    return found


def check_logged(job: Job, training: Training, changes: Sequence[Change]) -> None:
    """Each line of the log of an undisturbed job that has changed its size so has the global batch, and the mean of the
    losses that the iterations since the log before have had, in whatever size."""
    sizes = [(0, training.launched), *((training.iteration(c.step), len(c.ranks)) for c in changes)]
    losses, lines = Course.of(job).losses, logged(job)

    def loss(number: int) -> str:
        size = in_force(sizes, number)
        (found,) = losses[number, size - 1, size]
        return found

    for number, shown in logs_of(training, loss):
        (line,) = lines[number]
        assert f"consumed samples: {(number + 1) * training.batch:12d} |" in line, line
        assert f"global batch size: {training.batch:5d} |" in line, line
        assert f"lm loss: {mean_loss(shown)} |" in line, f"iteration {number}: {mean_loss(shown)}\n{line}"


Resized = Callable[[Training, int, int], Job]


def resized_once(factory: pytest.TempPathFactory) -> Resized:
    """The jobs that are resized by command, undisturbed: from a call on to that many replicas. Each is made once, and
    is itself compared with a job that was started in the new size from that iteration's state (an elastic one, which
    has two replicas at least)."""

    @cache
    def job(training: Training, call: int, replicas: int) -> Job:
        folder = factory.mktemp(f"{training.name}-resized-{call}-{replicas}")
        return _commanded(folder, training, call, replicas)

    return job


def _commanded(folder: Path, training: Training, call: int, replicas: int) -> Job:
    config = {"elastic": {"min": 1, "max": training.launched // training.each}}
    running = training.start(folder / "run", "--step-time=300", f"--save-to={folder}", config=config)
    running.wait_for("job_started", TIMEOUT_S)
    refused = command(running, replicas, call)
    assert not refused, refused
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    (event,) = job.of("job_resized")
    assert (event["step"], event["replicas"]) == (call, replicas), job.explain()
    check_experts_logged(job, training, training.sizes(call, replicas))
    check_clean(job)
    if replicas == 1:
        return job
    begin = f"--start-from={folder}/{training.iteration(call)}.pt"
    config = {"elastic": {"min": 1, "max": replicas}}
    new = training.start(folder / "new", begin, config=config, nproc=replicas * training.each).wait(TIMEOUT_S)
    assert new.code == 0, new.explain()
    check_goes_on_alike(job, new, call, replicas, training)
    check_clean(new)
    return job


def check_ends_as_resized(job: Job, at: int, left: Sequence[int], training: Training, resized: Resized) -> None:
    """These ranks have left, since something has happened in call ``at``, and the others go on as if that had been
    commanded."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == sorted(left), job.explain()
    call, replicas = events[-1]["step"], (training.launched - len(left)) // training.each
    assert events[-1]["replicas"] == replicas, job.explain()
    assert call in ((at - 1, at, at + 1) if training.sharded else (at, at + 1)), job.explain()
    check_goes_on_alike(job, resized(training, call, replicas), call, replicas, training)
    check_experts_logged(job, training, training.sizes(call, replicas))
    check_clean(job)

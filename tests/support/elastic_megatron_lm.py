"""Elastic jobs on the unmodified loop of a checkout of Megatron-LM: ``tests/scripts/elastic_megatron_lm.py``.

Versions count the loop's protected calls: in each iteration a training step and a log, and after it an evaluation
(between timers that begin with barriers) or a checkpoint where one is due.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support import elastic
from tests.support.elastic import check_steps_alike, command
from tests.support.jobs import ROOT, Job, RunningJob, check_clean
from tests.support.megatron_lm import CHECKOUT, MODEL, environment

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron_lm.py"
TIMEOUT_S = 240
ITERATIONS = 9
SMALL = ("--hidden-size=16", "--num-attention-heads=2", "--seq-length=16", "--max-position-embeddings=16")
DISTRIBUTED = ("--use-distributed-optimizer",)


@dataclass(frozen=True)
class Training:
    """One configuration.

    Attributes:
        launched: ranks.
        each: ranks of a replica.
        evaluates, saves: after so many iterations each time; 0: never.
    """

    name: str
    flags: tuple[str, ...] = ()
    batch: int = 24
    launched: int = 4
    each: int = 1
    iterations: int = ITERATIONS
    evaluates: int = 0
    saves: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def divided(self) -> bool:
        """Whether ranks have what others do not."""
        return "--use-distributed-optimizer" in self.flags

    @property
    def calls(self) -> list[tuple[str, int]]:
        """What each call is, and of which iteration."""
        found = []
        for number in range(self.iterations):
            found += [("train", number), ("log", number)]
            if self.evaluates and (number + 1) % self.evaluates == 0:
                found += [("barrier", number), ("evaluate", number), ("barrier", number)]
            if self.saves and (number + 1) % self.saves == 0:
                found.append(("exit", number))
        return found

    def call(self, kind: str, number: int) -> int:
        """The number of a call."""
        return self.calls.index((kind, number))

    def iteration(self, call: int) -> int:
        """The first iteration that is computed when a job goes on with a call."""
        return next(number for kind, number in self.calls[call:] if kind == "train")

    def start(
        self, folder: Path, *flags: str, config: Any = None, inject: Sequence[str] = (), nproc: int = 0
    ) -> RunningJob:
        """Start one job, of as many ranks as it is launched with, or ``nproc``."""
        never = {"elastic": {"min": 1, "max": self.launched // self.each, "replace": "never"}}
        return elastic.start(
            folder,
            never if config is None else config,
            *(*MODEL, *SMALL, f"--global-batch-size={self.batch}", "--flash-recovery", *self.flags),
            *(f"--steps={self.iterations}", *self._evaluation(), *flags),
            nproc=nproc or self.launched,
            inject=inject,
            script=SCRIPT,
            env={**environment(Path(CHECKOUT)), "PYTHONWARNINGS": "ignore"},
        )

    def _evaluation(self) -> list[str]:
        return ["--eval-iters=2", f"--eval-interval={self.evaluates}"] if self.evaluates else []


def check_goes_on_alike(job: Job, other: Job, call: int, replicas: int, training: Training) -> None:
    """From ``call`` on both have the same bits in each iteration on every rank."""
    check_steps_alike(job, other, training.iteration(call), training.iterations, replicas * training.each)


_EVALUATED = re.compile(r"evaluated=(\d+) size=(\d+) (.*)")


def evaluations(job: Job) -> dict[tuple[int, int], set[str]]:
    """What evaluations have found, by iteration and size."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for log in job.run_dir.rglob("rank*.log"):
        for number, size, losses in _EVALUATED.findall(log.read_text()):
            found[int(number), int(size)].add(losses)
    return found


def content(checkpoint: Path, into: Path) -> dict[str, Any]:
    """All that one of Megatron's own checkpoints holds but for the arguments: tensors, put together as bytes, and
    numbers, by name."""
    dcp_to_torch_save(checkpoint, into)
    return dict(_flattened("", torch.load(into, weights_only=False)))


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        tensor = isinstance(value, torch.Tensor)
        shown = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor else repr(value)
        yield name, (str(value.dtype), tuple(value.shape), shown) if tensor else shown
        return
    for key, part in value:
        yield from _flattened(f"{name}/{key}", part)


Resized = Callable[[Training, int, int], Job]


def resized_once(factory: pytest.TempPathFactory) -> Resized:
    """The jobs that are resized by command, undisturbed: from a call on to so many replicas. Each is made once, and is
    itself compared with a job that was started in the new size from that iteration's state (an elastic one, which has
    two replicas at least)."""

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
    assert call in ((at - 1, at, at + 1) if training.divided else (at, at + 1)), job.explain()
    check_goes_on_alike(job, resized(training, call, replicas), call, replicas, training)
    check_clean(job)

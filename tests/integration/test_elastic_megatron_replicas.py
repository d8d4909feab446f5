"""Elastic jobs with megatron-core in a loop of one's own whose replicas have several ranks: tensor and pipeline
parallelism. A rank that dies takes its replica with it, and the others go on as in a job that was resized by command at
the same step, bit for bit; where two replicas are left, that goes on as one that was started with two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import check_steps_alike, command, start
from tests.support.elastic_back import Way
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

pytest.importorskip("megatron.core")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S, AT, STEPS = 240, 6, 12
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]


@dataclass(frozen=True)
class Training:
    """One configuration of the script. ``inner``: ranks of a replica that follow on each other, of its two."""

    name: str
    flags: tuple[str, ...]
    inner: int
    replicas: int = 2

    def __str__(self) -> str:
        return self.name

    def ranks(self, victim: int) -> list[int]:
        """Of the victim's replica."""
        if self.inner == 2:
            return sorted([victim, victim ^ 1])
        return [victim % self.replicas, victim % self.replicas + self.replicas]


TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2", "--layers", "2")
TP2, PP2 = Training("tp2", TP, 2), Training("pp2", PP, 1)
OTHERS = (
    Training("tp2-sp-bf16", (*TP, "--sequence-parallel", "--bf16"), 2),
    Training("tp2-fp16", (*TP, "--fp16"), 2),
    Training("pp2-bf16-buckets", (*PP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"), 1),
    Training("pp2-tied", (*PP, "--tie-head"), 1),
)
THREE = (Training("tp2-three", TP, 2, 3), Training("pp2-three", PP, 1, 3))
Resized = Callable[[Training, int, int], Job]


def run(folder: Path, training: Training, *flags: str, replicas: int = 0, inject: tuple[str, ...] = ()) -> Job:
    number = replicas or training.replicas
    config = {"elastic": {"min": 1, "max": number, "replace": "never"}}
    return start(
        *(folder, config, *training.flags, "--steps", str(STEPS), *flags),
        nproc=2 * number,
        inject=inject,
        script=SCRIPT,
        env=ENVIRONMENT,
    ).wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    @cache
    def job(training: Training, step: int, replicas: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{training.name}-resized-{step}-{replicas}")
        config = {"elastic": {"min": 1, "max": training.replicas}}
        slowly = ("--steps", str(STEPS), "--step-time", "300", "--save-to", str(folder))
        running = start(
            *(folder / "run", config, *training.flags, *slowly),
            nproc=2 * training.replicas,
            script=SCRIPT,
            env=ENVIRONMENT,
        )
        running.wait_for("job_started", TIMEOUT_S)
        refused = command(running, replicas, step)
        assert not refused, refused
        made = running.wait(TIMEOUT_S)
        assert made.code == 0 and not made.of("failure_detected"), made.explain()
        (event,) = made.of("job_resized")
        assert (event["step"], event["replicas"]) == (step, replicas), made.explain()
        check_clean(made)
        if replicas > 1:  # a job that is started with one is no elastic one
            new = run(folder / "new", training, "--start-from", str(folder / f"{step}.pt"), replicas=replicas)
            assert new.code == 0, new.explain()
            check_steps_alike(made, new, step, STEPS, 2 * replicas)
            check_clean(new)
        return made

    return job


def check(job: Job, training: Training, victims: Sequence[int], resized: Resized) -> None:
    assert job.code == 0, job.explain()
    check_fired(job, len(victims))
    left = sorted({rank for victim in victims for rank in training.ranks(victim)})
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], training.replicas - len(left) // 2
    assert {event["step"] for event in events} <= {step, step - 1}, job.explain()
    assert step in (AT, AT + 1) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, step, replicas), step, STEPS, 2 * replicas)
    check_clean(job)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (TP2, PP2), ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank={victim},fault=sigkill,at={phase},step={AT}",))
    check(job, training, [victim], resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank=1,fault=sigkill,at=optimizer,step={AT}",))
    check(job, training, [1], resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank={victim},fault=sigkill,at=backward,step={AT}",))
    check(job, training, [victim], resized)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 3), (4, 2)])
@pytest.mark.parametrize("training", THREE, ids=str)
def test_two_at_once(training: Training, first: int, second: int, tmp_path: Path, resized: Resized) -> None:
    """Of one replica, or of two."""
    faults = [f"rank={rank},fault=sigkill,at=backward,step={AT}" for rank in (first, second)]
    job = run(tmp_path / "run", training, inject=tuple(faults))
    check(job, training, (first, second), resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize(("first", "second"), [(0, 3), (5, 2)])
@pytest.mark.parametrize("training", THREE, ids=str)
def test_a_second_death_during_the_change(
    training: Training, first: int, second: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """Of another replica, which leaves, too."""
    if second in training.ranks(first):
        second -= 1  # with stages
    faults = (f"rank={first},fault=sigkill,at=backward,step={AT}", f"rank={second},fault=sigkill,at=recovery:{state}")
    check(run(tmp_path / "run", training, inject=faults), training, (first, second), resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (TP2, PP2, *THREE), ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    """A replica leaves, and comes back."""
    end, back = 38, 32

    def begin(folder: Path, *flags: str, config: Any, inject: Sequence[str] = (), nproc: int = 0) -> RunningJob:
        given = (*training.flags, "--steps", str(end), "--step-time", "800", *flags)
        launched = nproc or 2 * training.replicas
        return start(folder, config, *given, nproc=launched, inject=inject, script=SCRIPT, env=ENVIRONMENT)

    def alike(job: Job, other: Job, step: int, until: int, ranks: int) -> None:
        check_steps_alike(job, other, step, end if until < 0 else until, ranks)

    way = Way(begin, alike, lambda step: step, training.replicas, 2)
    way.check_back(tmp_path, [victim], training.ranks(victim), AT, back)

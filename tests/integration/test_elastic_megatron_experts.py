"""Elastic jobs with megatron-core in a loop of one's own with expert parallelism (MoE layers) and context parallelism.

A rank that dies takes its replica with it: all ranks that together have the whole model once. With experts these are
several data-parallel ranks, each with micro-batches of its own. The others go on as in a job that was resized by
command at the same step, bit for bit, and that one as one that was started in that size."""

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

pytest.importorskip("megatron.core")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S, AT, STEPS = 240, 6, 12
PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]


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

    def ranks(self, victim: int) -> list[int]:
        """Of the victim's replica."""
        inner = self.each // self.runs
        replica = victim // inner % self.replicas
        return [(run * self.replicas + replica) * inner + at for run in range(self.runs) for at in range(inner)]


EP = ("--num-experts", "4", "--expert-model-parallel-size", "2")
CP = ("--context-parallel-size", "2")
TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2", "--layers", "2")
ALL_TO_ALL = ("--moe-token-dispatcher-type", "alltoall")
EP2, CP2 = Training("ep2", EP), Training("cp2", CP)
OTHERS = (
    Training("ep2-alltoall-bf16", (*EP, *ALL_TO_ALL, "--bf16")),
    Training("ep2-fp16", (*EP, "--fp16")),
    Training("ep2-buckets", (*EP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700")),
    Training("ep2-cp2", (*EP, *CP)),
    Training("experts-alone", ("--num-experts", "4"), each=1, replicas=4),
    Training("cp2-bf16", (*CP, "--bf16")),
)
LARGE = (
    Training("ep2-pp2", (*EP, *PP), each=4, runs=2),
    Training("ep2-tp2", (*EP, *ALL_TO_ALL, *TP, "--sequence-parallel"), each=4),
    Training("cp2-pp2", (*CP, *PP), each=4, runs=2),
)
THREE = (Training("ep2-three", EP, 3), Training("cp2-three", CP, 3))
Resized = Callable[[Training, int, int], Job]


def run(folder: Path, training: Training, *flags: str, replicas: int = 0, inject: tuple[str, ...] = ()) -> Job:
    number = replicas or training.replicas
    config = {"elastic": {"min": 1, "max": number, "replace": "never"}}
    return start(
        *(folder, config, *training.flags, "--steps", str(STEPS), *flags),
        nproc=training.each * number,
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
            nproc=training.each * training.replicas,
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
            check_steps_alike(made, new, step, STEPS, training.each * replicas)
            check_clean(new)
        return made

    return job


def check(job: Job, training: Training, victims: Sequence[int], resized: Resized) -> None:
    assert job.code == 0, job.explain()
    check_fired(job, len(victims))
    left = sorted({rank for victim in victims for rank in training.ranks(victim)})
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], training.replicas - len(left) // training.each
    assert {event["step"] for event in events} <= {step, step - 1}, job.explain()
    assert step in (AT, AT + 1) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, step, replicas), step, STEPS, training.each * replicas)
    check_clean(job)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (EP2, CP2), ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank={victim},fault=sigkill,at={phase},step={AT}",))
    check(job, training, [victim], resized)


@pytest.mark.parametrize("training", (*OTHERS, *LARGE), ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank=1,fault=sigkill,at=optimizer,step={AT}",))
    check(job, training, [1], resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    job = run(tmp_path / "run", training, inject=(f"rank={victim},fault=sigkill,at={phase},step={AT}",))
    check(job, training, [victim], resized)


def test_a_number_of_replicas_that_does_not_divide_is_none(tmp_path: Path, resized: Resized) -> None:
    """Eight micro-batches on the eight ranks of four replicas: the six of three would not divide them."""
    training = Training("ep2-four", (*EP, "--global-batch", "16"), 4)
    job = run(tmp_path / "run", training, inject=(f"rank=7,fault=sigkill,at=backward,step={AT}",))
    assert job.code == 0, job.explain()
    check_fired(job, 1)
    (event,) = job.of("job_resized")
    assert (event["replicas"], event["left"]) == (2, [4, 5, 6, 7]), job.explain()
    check_steps_alike(job, resized(training, event["step"], 2), event["step"], STEPS, 4)
    check_clean(job)


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
    faults = (f"rank={first},fault=sigkill,at=backward,step={AT}", f"rank={second},fault=sigkill,at=recovery:{state}")
    check(run(tmp_path / "run", training, inject=faults), training, (first, second), resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (EP2, CP2, *THREE), ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    """A replica leaves, and comes back."""
    end, back = 38, 32

    def begin(folder: Path, *flags: str, config: Any, inject: Sequence[str] = ()) -> RunningJob:
        given = (*training.flags, "--steps", str(end), "--step-time", "800", *flags)
        nproc = training.each * training.replicas
        return start(folder, config, *given, nproc=nproc, inject=inject, script=SCRIPT, env=ENVIRONMENT)

    def alike(job: Job, other: Job, step: int, until: int, ranks: int) -> None:
        check_steps_alike(job, other, step, end if until < 0 else until, ranks)

    way = Way(begin, alike, lambda step: step, training.replicas, training.each)
    way.check_back(tmp_path, [victim], training.ranks(victim), AT, back)


@pytest.mark.parametrize("training", THREE, ids=str)
def test_a_replacement(training: Training, tmp_path: Path) -> None:
    """Where there is room the rank is filled again, and the job is as one that nothing has disturbed."""
    config = {"elastic": {"min": 1, "max": training.replicas}}
    nproc = training.each * training.replicas
    common: dict[str, Any] = {"nproc": nproc, "script": SCRIPT, "env": ENVIRONMENT}
    faults = (f"rank=3,fault=sigkill,at=backward,step={AT}",)
    given = (*training.flags, "--steps", str(STEPS))
    job, other = (
        start(tmp_path / name, config, *given, inject=some, **common).wait(TIMEOUT_S)
        for name, some in (("run", faults), ("other", ()))
    )
    assert job.code == 0 and not job.of("job_resized"), job.explain()
    check_fired(job, 1)
    check_steps_alike(job, other, 0, STEPS, nproc)
    check_clean(job)
    check_clean(other)


LONG = 40


def begin(training: Training) -> Callable[..., RunningJob]:
    """As :mod:`tests.support.elastic_checkpoints` starts jobs: by ranks."""

    def started(folder: Path, *flags: str, config: Any, nproc: int, **options: Any) -> RunningJob:
        of_replicas = {**config, "elastic": {**config["elastic"], "max": nproc // training.each}}
        given = (*training.flags, "--steps", str(LONG), *flags)
        return start(folder, of_replicas, *given, nproc=nproc, script=SCRIPT, env=ENVIRONMENT, **options)

    return started


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("training", (EP2, CP2), ids=str)
def test_a_job_that_died_whole_goes_on_in_another_size(
    training: Training, before: int, after: int, tmp_path: Path
) -> None:
    each, way = training.each, begin(training)
    version, _ = dead_job(tmp_path, nproc=before * each, begin=way)[-1]
    job = launched(tmp_path, "again", after * each, begin=way)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    other = began_otherwise(tmp_path, before * each, version, after * each, begin=way)
    check_steps_alike(job, other, version, LONG, after * each)
    check_clean(job)

"""Elastic jobs with megatron-core, expert or context parallelism, and the distributed optimizer.

The dense parameters' state is divided among all data-parallel ranks, several of each replica, and the experts' among
those at the same place in every replica: anew in each size. As jobs that are resized by command at the same step, bit
for bit, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from collections.abc import Callable
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
EACH = 2
PHASES = ("between", "forward", "backward", "grad-sync", "optimizer", "param-gather", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
EP = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--use-distributed-optimizer")
CP = ("--context-parallel-size", "2", "--use-distributed-optimizer")
BUCKETS = ("--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700")
TRAININGS = {
    "ep": (*EP, "--bf16"),
    "cp": (*CP, "--bf16"),
    "ep-fp32": EP,
    "cp-fp32": CP,
    "ep-fp16-alltoall": (*EP, "--fp16", "--moe-token-dispatcher-type", "alltoall"),
    "ep-buckets": (*EP, *BUCKETS),
    "cp-buckets": (*CP, *BUCKETS),
    "ep-cp": (*EP, "--context-parallel-size", "2", "--bf16"),
    "ep-frozen": (*EP, "--bf16", "--mode", "frozen"),
}
MAIN = ("ep", "cp")
Resized = Callable[..., Job]


def launch(
    folder: Path, training: str, *flags: str, replicas: int, config: Any = None, faults: tuple[str, ...] = ()
) -> RunningJob:
    never = {"elastic": {"min": 1, "max": replicas, "replace": "never"}}
    return start(
        *(folder, never if config is None else config, *TRAININGS[training], "--steps", str(STEPS), *flags),
        nproc=EACH * replicas,
        inject=faults,
        script=SCRIPT,
        env=ENVIRONMENT,
    )


def replica_of(rank: int) -> list[int]:
    return sorted([rank, rank ^ 1])


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """Gives the job that is resized by command at this step to so many replicas, undisturbed. It goes on as one that is
    *started* in that size from that step's state (an elastic one, which has two replicas)."""

    @cache
    def job(training: str, launched: int, step: int, replicas: int) -> Job:
        folder = tmp_path_factory.mktemp(f"{training}-resized")
        flags = ("--step-time", "300", "--save-to", str(folder))
        config = {"elastic": {"min": 1, "max": launched}}
        running = launch(folder / "run", training, *flags, replicas=launched, config=config)
        running.wait_for("job_started", TIMEOUT_S)
        refused = command(running, replicas, step)
        assert not refused, refused
        made = running.wait(TIMEOUT_S)
        assert made.code == 0 and not made.of("failure_detected"), made.explain()
        (event,) = made.of("job_resized")
        assert (event["step"], event["replicas"]) == (step, replicas), made.explain()
        check_clean(made)
        if replicas > 1:
            new = launch(folder / "new", training, "--start-from", str(folder / f"{step}.pt"), replicas=replicas).wait(
                TIMEOUT_S
            )
            assert new.code == 0, new.explain()
            check_steps_alike(made, new, step, STEPS, EACH * replicas)
            check_clean(new)
        return made

    return job


def check(job: Job, training: str, launched: int, left: list[int], resized: Resized) -> None:
    """These ranks have left since something has happened in step AT, and the others go on as by command; what went over
    the wire for it is what was needed and not held."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], launched - len(left) // EACH
    assert step in (AT - 1, AT, AT + 1) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, launched, step, replicas), step, STEPS, EACH * replicas)
    for event in job.of("recovery_finished"):
        assert event["reshaped_bytes"] == event["lacking_bytes"], job.explain()
    check_clean(job)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", MAIN)
def test_one_of_two(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=2, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check(job, training, 2, replica_of(victim), resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", MAIN)
def test_one_of_three(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among whose ranks the state is divided anew."""
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check(job, training, 3, replica_of(victim), resized)


@pytest.mark.parametrize("training", [t for t in TRAININGS if t not in MAIN])
def test_other_trainings(training: str, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank=1,fault=sigkill,at=optimizer,step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check(job, training, 3, replica_of(1), resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", MAIN)
def test_a_second_death_during_the_change(training: str, state: str, tmp_path: Path, resized: Resized) -> None:
    """Of a replica that is no neighbour of the first one's: four become two."""
    faults = (f"rank=0,fault=sigkill,at=backward,step={AT}", f"rank=5,fault=sigkill,at=recovery:{state}")
    flags = ("--global-batch", "48")
    TRAININGS.setdefault(f"{training}-48", (*TRAININGS[training], *flags))
    job = launch(tmp_path / "run", f"{training}-48", replicas=4, faults=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check(job, f"{training}-48", 4, [0, 1, 4, 5], resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("training", MAIN)
def test_killed_and_back(training: str, replicas: int, victim: int, tmp_path: Path) -> None:
    """A replica leaves, and comes back."""
    end, back = 38, 32

    def begin(folder: Path, *flags: str, config: Any, inject: Any = ()) -> RunningJob:
        given = ("--steps", str(end), "--step-time", "800", *flags)
        return launch(folder, training, *given, replicas=replicas, config=config, faults=tuple(inject))

    def alike(job: Job, other: Job, step: int, until: int, ranks: int) -> None:
        check_steps_alike(job, other, step, end if until < 0 else until, ranks)

    way = Way(begin, alike, lambda step: step, replicas, EACH)
    way.check_back(tmp_path, [victim], replica_of(victim), AT, back)


def test_checkpoints_are_refused(tmp_path: Path) -> None:
    config = {"elastic": {"min": 1, "max": 2}, "checkpoint": {"dir": str(tmp_path / "saved")}}
    job = launch(tmp_path / "run", "ep", replicas=2, config=config).wait(TIMEOUT_S)
    assert job.code != 0 and "without checkpoint.dir it is allowed" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)

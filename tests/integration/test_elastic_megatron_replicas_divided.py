"""Elastic jobs with megatron-core whose replicas have several ranks, and whose optimizer's state is divided among the
replicas: tensor and pipeline parallelism with the distributed optimizer. Those that stand at the same place in their
replicas divide what they have alike, anew in each size. As jobs that are resized by command at the same step, bit for
bit, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import changes, check_steps_alike, command, inject, start
from tests.support.jobs import ROOT, Job, RunningJob, check_clean, check_fired
from tests.support.megatron import ENVIRONMENT

pytest.importorskip("megatron.core")

SCRIPT = ROOT / "tests" / "scripts" / "elastic_megatron.py"
TIMEOUT_S, AT, STEPS = 240, 6, 12
EACH = 2
PHASES = (
    *("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather"),
    *("commit", "below"),
)
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
TP = ("--tensor-model-parallel-size", "2", "--use-distributed-optimizer")
PP = ("--pipeline-model-parallel-size", "2", "--layers", "2", "--use-distributed-optimizer")
TRAININGS = {
    "tp": (*TP, "--bf16"),
    "pp": (*PP, "--bf16"),
    "tp-fp32": TP,
    "tp-fp16-sp": (*TP, "--fp16", "--sequence-parallel"),
    "tp-buckets": (*TP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"),
    "pp-fp32": PP,
    "pp-fp16-tied": (*PP, "--fp16", "--tie-head"),
    "pp-buckets": (*PP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"),
}
MAIN = ("tp", "pp")
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


def replica_of(training: str, rank: int, replicas: int) -> list[int]:
    """All of its ranks, as launched."""
    if training.startswith("tp"):
        return sorted([rank, rank ^ 1])
    return [rank % replicas, rank % replicas + replicas]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """Gives the job that is resized by command at these steps to these sizes, undisturbed. After its last change it
    goes on as one that is *started* in that size from that step's state (an elastic one, which has two replicas)."""

    @cache
    def job(training: str, launched: int, *sizes: tuple[int, int], end: int = STEPS, step_ms: int = 300) -> Job:
        folder = tmp_path_factory.mktemp(f"{training}-resized")
        flags = ("--steps", str(end), "--step-time", str(step_ms), "--save-to", str(folder))
        config = {"elastic": {"min": 1, "max": launched}}
        running = launch(folder / "run", training, *flags, replicas=launched, config=config)
        running.wait_for("job_started", TIMEOUT_S)
        for number, (step, replicas) in enumerate(sizes, 1):
            refused = command(running, replicas, step)
            assert not refused, refused
            event = running.wait_for("job_resized", TIMEOUT_S, count=number)
            assert (event["step"], event["replicas"]) == (step, replicas), running.wait(TIMEOUT_S).explain()
            running.wait_for("recovery_finished", TIMEOUT_S, count=number)
        made = running.wait(TIMEOUT_S)
        assert made.code == 0 and not made.of("failure_detected"), made.explain()
        check_clean(made)
        step, replicas = sizes[-1]
        if replicas > 1:
            begin = ("--steps", str(end), "--start-from", str(folder / f"{step}.pt"))
            new = launch(folder / "new", training, *begin, replicas=replicas).wait(TIMEOUT_S)
            assert new.code == 0, new.explain()
            check_steps_alike(made, new, step, end, EACH * replicas)
            check_clean(new)
        return made

    return job


def check_bytes(job: Job) -> None:
    """What went over the wire for a change is what was needed and not held."""
    for event in job.of("recovery_finished"):
        assert event["reshaped_bytes"] == event["lacking_bytes"], job.explain()


def check_shrunk(job: Job, training: str, launched: int, left: list[int], resized: Resized) -> None:
    """These ranks have left since something has happened in step AT, and the others go on as by command."""
    assert job.code == 0, job.explain()
    events = job.of("job_resized")
    assert sorted(rank for event in events for rank in event["left"]) == left, job.explain()
    step, replicas = events[-1]["step"], launched - len(left) // EACH
    assert step in (AT - 1, AT, AT + 1) and events[-1]["replicas"] == replicas, job.explain()
    check_steps_alike(job, resized(training, launched, (step, replicas)), step, STEPS, EACH * replicas)
    check_bytes(job)
    check_clean(job)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", MAIN)
def test_one_of_two(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=2, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 2, replica_of(training, victim, 2), resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", MAIN)
def test_one_of_three(training: str, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among whom the state is divided anew."""
    faults = (f"rank={victim},fault=sigkill,at={phase},step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 3, replica_of(training, victim, 3), resized)


@pytest.mark.parametrize("training", [t for t in TRAININGS if t not in MAIN])
def test_other_trainings(training: str, tmp_path: Path, resized: Resized) -> None:
    faults = (f"rank=1,fault=sigkill,at=optimizer,step={AT}",)
    job = launch(tmp_path / "run", training, replicas=3, faults=faults).wait(TIMEOUT_S)
    check_fired(job)
    check_shrunk(job, training, 3, replica_of(training, 1, 3), resized)

"""Elastic jobs on Megatron-LM's unmodified loop with virtual pipeline stages: a rank takes its replica with it, and the
others go on as a job that was resized by command at the same call, bit for bit; where two replicas are left, that goes
on as one that was started with two from that iteration's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_back import Way
from tests.support.elastic_megatron_lm import (
    DISTRIBUTED,
    TIMEOUT_S,
    Resized,
    Training,
    check_ends_as_resized,
    check_steps_alike,
    evaluations,
    resized_once,
)
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, RunningJob, check_fired
from tests.support.megatron_lm import needs_checkout

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]

STAGES = ("--pipeline-model-parallel-size=2", "--num-layers=4", "--num-layers-per-virtual-pipeline-stage=1")
SHARDED = (*DISTRIBUTED, "--bf16")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size=700", "--bf16")
PLAIN = Training("vpp2", STAGES, each=2)
SHARDS = Training("vpp2-sharded", (*STAGES, *SHARDED), each=2)
OTHERS = (
    Training("vpp2-overlap", (*STAGES, *OVERLAP), each=2),
    Training("vpp2-sharded-overlap", (*STAGES, *DISTRIBUTED, *OVERLAP), each=2),
    Training(
        "vpp2-recompute",
        (*STAGES, "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"),
        each=2,
    ),
    Training(
        "vpp2-said-otherwise",
        (*STAGES[:-1], "--num-virtual-stages-per-pipeline-rank=2", "--microbatch-group-size-per-vp-stage=3"),
        each=2,
    ),
)
THREE = (
    Training("vpp2-three", STAGES, launched=6, each=2),
    Training("vpp2-sharded-three", (*STAGES, *SHARDED), launched=6, each=2),
)
AT = PLAIN.call("train", 4)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def replica(victim: int, training: Training) -> list[int]:
    """All ranks of its replica of two, as Megatron numbers them."""
    replicas = training.launched // 2
    return [victim % replicas, victim % replicas + replicas]


def killed(training: Training, phase: str, victim: int, folder: Path, at: int = AT) -> Job:
    job = training.start(folder, inject=[f"rank={victim},fault=sigkill,at={phase},step={at}"]).wait(TIMEOUT_S)
    check_fired(job)
    return job


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "commit"])
@pytest.mark.parametrize("training", (PLAIN, SHARDS), ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    job = killed(training, phase, victim, tmp_path / "run")
    check_ends_as_resized(job, AT, replica(victim, training), training, resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    job = killed(training, "backward", 3, tmp_path / "run")
    check_ends_as_resized(job, AT, replica(3, training), training, resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three_replicas(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    job = killed(training, "backward", victim, tmp_path / "run")
    check_ends_as_resized(job, AT, replica(victim, training), training, resized)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_killed_in_an_evaluation(overlap: bool, tmp_path: Path, resized: Resized) -> None:
    """It is done again with as many samples, the same ones. A schedule that only goes forward puts aside how gradients
    are reduced, and the one that is cut short does not put it back."""
    name, flags = ("vpp2-overlap-evaluated", (*STAGES, *OVERLAP)) if overlap else ("vpp2-evaluated", STAGES)
    training = Training(name, flags, each=2, evaluates=4)
    at = training.call("evaluate", 3)
    job = killed(training, "data", 0, tmp_path / "run", at)
    check_ends_as_resized(job, at, replica(0, training), training, resized)
    (event,) = job.of("job_resized")
    assert evaluations(job) == evaluations(resized(training, event["step"], 1))


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (PLAIN, SHARDS), ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    """Two replicas to one and back."""
    long = Training(training.name, training.flags, each=2, iterations=36)

    def alike(job: Job, other: Job, call: int, until: int, ranks: int) -> None:
        end = long.iterations if until < 0 else long.iteration(until)
        check_steps_alike(job, other, long.iteration(call), end, ranks)

    def begin(folder: Path, *flags: str, **options: Any) -> RunningJob:
        return long.start(folder, "--step-time=800", *flags, **options)

    way = Way(begin, alike, long.iteration, 2, 2)
    way.check_back(tmp_path, [victim], replica(victim, long), long.call("train", 3), long.call("train", 31))

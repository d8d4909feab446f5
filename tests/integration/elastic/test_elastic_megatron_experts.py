"""Elastic jobs with megatron-core in your own loop with expert parallelism (MoE layers) and context parallelism.

A rank that dies takes its replica with it: all ranks that together have the whole model once. With experts these are
several data-parallel ranks, each with its own micro-batches. The others go on as in a job that was resized by
command at the same step, bit for bit, and that one as one that was started in that size."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.redundancy.checkpoint.published import published
from tests.support.elastic import check_steps_alike
from tests.support.elastic_checkpoints import die_whole, saving
from tests.support.elastic_megatron import (
    AT,
    STEPS,
    TIMEOUT_S,
    Resized,
    Training,
    check_back,
    check_killed,
    check_read_by,
    check_second_death,
    resized_once,
)
from tests.support.installed import skip_module_without
from tests.support.jobs import check_clean, check_fired

skip_module_without("megatron.core")

PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]

EP = ("--num-experts", "4", "--expert-model-parallel-size", "2")
CP = ("--context-parallel-size", "2")
TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2", "--layers", "2")
ALL_TO_ALL = ("--moe-token-dispatcher-type", "alltoall")
SHARDED = ("--use-distributed-optimizer", "--bf16")
EP2, CP2 = Training("ep2", EP), Training("cp2", CP)
OTHERS = (
    Training("ep2-alltoall-bf16", (*EP, *ALL_TO_ALL, "--bf16")),
    Training("ep2-fp16", (*EP, "--fp16")),
    Training("ep2-buckets", (*EP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700")),
    Training("ep2-cp2", (*EP, *CP)),
    Training("experts-alone", ("--num-experts", "4"), each=1, replicas=4),
    Training("experts-alone-sharded", ("--num-experts", "4", *SHARDED), each=1, replicas=4),
    Training("cp2-bf16", (*CP, "--bf16")),
)
LARGE = (
    Training("ep2-pp2", (*EP, *PP), each=4, runs=2),
    Training("ep2-tp2", (*EP, *ALL_TO_ALL, *TP, "--sequence-parallel"), each=4),
    Training("cp2-pp2", (*CP, *PP), each=4, runs=2),
)
THREE = (Training("ep2-three", EP, 3), Training("cp2-three", CP, 3))


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (EP2, CP2), ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    check_killed(training, [victim], phase, tmp_path / "run", resized)


@pytest.mark.parametrize("training", (*OTHERS, *LARGE), ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    check_killed(training, [1], "optimizer", tmp_path / "run", resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    check_killed(training, [victim], phase, tmp_path / "run", resized)


def test_a_number_of_replicas_that_does_not_divide_is_none(tmp_path: Path, resized: Resized) -> None:
    """Eight micro-batches on the eight ranks of four replicas: the six of three would not divide them."""
    training = Training("ep2-four", (*EP, "--global-batch", "16"), 4)
    job = training.run(tmp_path / "run", inject=(f"rank=7,fault=sigkill,at=backward,step={AT}",))
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
    check_killed(training, (first, second), "backward", tmp_path / "run", resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize(("first", "second"), [(0, 3), (5, 2)])
@pytest.mark.parametrize("training", THREE, ids=str)
def test_a_second_death_during_the_change(
    training: Training, first: int, second: int, state: str, tmp_path: Path, resized: Resized
) -> None:
    """Of another replica, which leaves, too."""
    check_second_death(training, first, second, state, tmp_path / "run", resized)


@pytest.mark.parametrize("training", THREE, ids=str)
def test_a_checkpoint_is_read_in_another_size(training: Training, tmp_path: Path, resized: Resized) -> None:
    """Written by three replicas, of which no rank lives on, and read by two."""
    place = tmp_path / "checkpoints"
    config = {"elastic": {"min": 1, "max": 3}, **saving(place)}
    running = training.start(tmp_path / "died", "--step-time", "400", config=config)
    running.wait_for("checkpoint_saved", TIMEOUT_S, count=4)
    die_whole(running)
    version, _ = published(place)[-1]
    config = {"elastic": {"min": 1, "max": 2}, **saving(place, 1000), "resume": True}
    job = training.run(tmp_path / "smaller", config=config, nproc=2 * training.each)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version > 0, job.explain()
    check_steps_alike(job, resized(training, version, 2), version, STEPS, 2 * training.each)
    check_clean(job)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (EP2, CP2, *THREE), ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    check_back(training, victim, tmp_path)


@pytest.mark.parametrize("training", THREE, ids=str)
def test_a_replacement(training: Training, tmp_path: Path) -> None:
    """Where there is room the rank is filled again, and the job is as one that nothing has disturbed."""
    config = {"elastic": {"min": 1, "max": training.replicas}}
    job = training.run(tmp_path / "run", config=config, inject=(f"rank=3,fault=sigkill,at=backward,step={AT}",))
    other = training.run(tmp_path / "other", config=config)
    assert job.code == 0 and not job.of("job_resized"), job.explain()
    check_fired(job, 1)
    check_steps_alike(job, other, 0, STEPS, training.each * training.replicas)
    check_clean(job)
    check_clean(other)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("training", (EP2, CP2), ids=str)
def test_a_job_that_died_whole_goes_on_in_another_size(
    training: Training, before: int, after: int, tmp_path: Path
) -> None:
    check_read_by(training, before, after, tmp_path)

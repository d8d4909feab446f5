"""Fallback checkpoints of elastic megatron-core jobs with expert or context parallelism and the distributed optimizer,
whose dense state several places of each replica divide together. Read by another number of replicas: bit for bit as a
job that is started in that size from the state of an undisturbed one, or resized by command at that step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.elastic import check_steps_alike
from tests.support.elastic_checkpoints import dead_job, fell_back, launched, saving, spoil
from tests.support.elastic_checkpoints import started as began_otherwise
from tests.support.elastic_megatron import LONG, TIMEOUT_S, Training, by_ranks, check_read_by
from tests.support.installed import skip_module_without
from tests.support.jobs import check_clean

skip_module_without("megatron.core")

pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
EACH = 2
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--use-distributed-optimizer")
CONTEXT = ("--context-parallel-size", "2", "--use-distributed-optimizer")
EP, CP = Training("ep", (*EXPERTS, "--bf16"), 3), Training("cp", (*CONTEXT, "--bf16"), 3)
OTHERS = (
    Training("ep-fp32", EXPERTS, 3),
    Training("ep-buckets", (*EXPERTS, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"), 3),
    Training("ep-cp", (*EXPERTS, "--context-parallel-size", "2", "--bf16"), 3),
    Training("ep-frozen", (*EXPERTS, "--bf16", "--mode", "frozen"), 3),
    Training("experts-alone", ("--num-experts", "4", "--use-distributed-optimizer", "--bf16"), 3, each=1),
)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_a_job_that_died_whole_goes_on_in_another_size(
    training: Training, before: int, after: int, tmp_path: Path
) -> None:
    check_read_by(training, before, after, tmp_path)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path) -> None:
    check_read_by(training, 3, 2, tmp_path)


@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_too_many_are_lost_at_once(training: Training, tmp_path: Path) -> None:
    """No rank has what two neighbouring replicas had: the other two go back to a checkpoint of four."""
    four = replace(training, flags=(*training.flags, "--global-batch", "48"))
    config = {"elastic": {"min": 1, "max": 4, "replace": "never"}, **saving(tmp_path / "checkpoints", 2)}
    running = by_ranks(four)(tmp_path / "run", "--step-time", "300", config=config, nproc=4 * EACH)
    running.wait_for("checkpoint_saved", TIMEOUT_S)
    running.kill(2, 5)
    job = running.wait(TIMEOUT_S)
    version = fell_back(job, 4 * EACH, 2, LONG)
    other = began_otherwise(tmp_path, 4 * EACH, version, 2 * EACH, begin=by_ranks(four))
    check_steps_alike(job, other, version, LONG, 2 * EACH)
    check_clean(job)


@pytest.mark.parametrize("damage", ["missing", "bit", "short", "metadata"])
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    training: Training, damage: str, tmp_path: Path
) -> None:
    way = by_ranks(training)
    *_, (older, _), (_, newest) = dead_job(tmp_path, nproc=3 * EACH, checkpoints=2, begin=way)
    named = spoil(newest, damage)
    job = launched(tmp_path, "again", 2 * EACH, begin=way)
    assert any(named in notice["text"] for notice in job.notices("checkpoint_damaged")), job.explain()
    assert job.code == 0, job.explain()
    other = began_otherwise(tmp_path, 3 * EACH, older, 2 * EACH, begin=way)
    check_steps_alike(job, other, older, LONG, 2 * EACH)
    check_clean(job)


@pytest.mark.parametrize("after", [2, 3])
def test_a_checkpoint_of_other_places_is_refused(after: int, tmp_path: Path) -> None:
    """Tensor parallelism has replicas of two ranks, too, of which each divides its own state."""
    tensor = replace(CP, flags=("--tensor-model-parallel-size", "2", "--use-distributed-optimizer", "--bf16"))
    dead_job(tmp_path, nproc=3 * EACH, begin=by_ranks(tensor))
    job = launched(tmp_path, "again", after * EACH, begin=by_ranks(CP))
    assert job.code != 0 and "sharded among the places [0] of each replica" in job.explain(), job.explain()
    check_clean(job)

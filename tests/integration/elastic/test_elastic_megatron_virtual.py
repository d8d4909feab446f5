"""Elastic jobs with megatron-core in your own loop whose pipeline ranks have several model chunks each (virtual
stages, the interleaved schedule), with and without the distributed optimizer. What a rank that dies takes with it
leaves, and the others go on as in a job that was resized by command at the same step, bit for bit; where two replicas
are left, that goes on as one that was started with two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import command
from tests.support.elastic_megatron import (
    AT,
    TIMEOUT_S,
    Resized,
    Training,
    check_back,
    check_killed,
    check_second_death,
    resized_once,
)
from tests.support.installed import skip_module_without
from tests.support.jobs import check_clean
from tests.support.megatron import VPP

skip_module_without("megatron.core")

PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]

DISTRIBUTED = ("--use-distributed-optimizer", "--bf16")
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "700")
PLAIN, SHARDED = Training("vpp2", VPP, runs=2), Training("vpp2-sharded", (*VPP, *DISTRIBUTED), runs=2)
OTHERS = (
    Training("vpp2-fp16", (*VPP, "--fp16"), runs=2),
    Training("vpp2-bf16-buckets", (*VPP, "--bf16", *BUCKETS), runs=2),
    Training("vpp2-tied", (*VPP, "--tie-head"), runs=2),
    Training("vpp2-sharded-fp32", (*VPP, "--use-distributed-optimizer"), runs=2),
    Training("vpp2-sharded-buckets", (*VPP, *DISTRIBUTED, *BUCKETS), runs=2),
    Training("vpp2-sharded-tied", (*VPP, *DISTRIBUTED, "--tie-head"), runs=2),
    Training("vpp2-sharded-frozen", (*VPP, *DISTRIBUTED, "--mode", "frozen"), runs=2),
)
THREE = (Training("vpp2-three", VPP, 3, runs=2), Training("vpp2-sharded-three", (*VPP, *DISTRIBUTED), 3, runs=2))


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (PLAIN, SHARDED), ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    check_killed(training, [victim], phase, tmp_path / "run", resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    check_killed(training, [1], "optimizer", tmp_path / "run", resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among which the state is sharded again."""
    check_killed(training, [victim], "backward", tmp_path / "run", resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
def test_a_second_death_during_the_change(state: str, tmp_path: Path, resized: Resized) -> None:
    """Of another replica, which leaves, too."""
    check_second_death(THREE[0], 0, 4, state, tmp_path / "run", resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "reshaping", "verifying", "resuming"])
def test_a_second_death_where_state_is_sharded(state: str, tmp_path: Path, resized: Resized) -> None:
    """Of four replicas two leave, neither of which keeps the other's copies."""
    training = Training("vpp2-sharded-four", (*VPP, *DISTRIBUTED, "--global-batch", "48"), 4, runs=2)
    check_second_death(training, 1, 7, state, tmp_path / "run", resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (PLAIN, SHARDED, *THREE), ids=str)
def test_a_replica_comes_back(training: Training, victim: int, tmp_path: Path) -> None:
    check_back(training, victim, tmp_path)


def test_a_size_that_the_schedule_cannot_compute_is_none(tmp_path: Path, resized: Resized) -> None:
    """Six micro-batches: of three replicas each computes two of them, and two replicas would compute three each, which
    is no multiple of the two stages. So two replicas leave."""
    training = Training("vpp2-odd", (*VPP, "--global-batch", "12"), 3, runs=2)
    config = {"elastic": {"min": 1, "max": 3, "replace": "never"}}
    running = training.start(
        tmp_path / "run", "--step-time", "250", config=config, inject=(f"rank=2,fault=sigkill,at=backward,step={AT}",)
    )
    running.wait_for("job_started", TIMEOUT_S)
    assert "1 is allowed" in command(running, 2, AT - 2)
    job = running.wait(TIMEOUT_S)
    (event,) = job.of("job_resized")
    assert job.code == 0 and event["replicas"] == 1 and 2 in event["left"], job.explain()
    check_clean(job)


REFUSED = {
    "odd": (("--global-batch", "12"), "the framework's schedule cannot compute 3 of them on a replica"),
    "left-over": (
        (
            "--mode",
            "same-chunk",
        ),
        "has not gone through its micro-batches for model chunks [1]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    flags, words = REFUSED[name]
    job = Training(name, (*VPP, *flags), runs=2).run(tmp_path / "run")
    assert job.code != 0 and words in job.explain(), job.explain()
    check_clean(job)

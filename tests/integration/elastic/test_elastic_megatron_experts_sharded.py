"""Elastic jobs with megatron-core, expert or context parallelism, and the distributed optimizer.

The dense parameters' state is sharded among all data-parallel ranks, several of each replica, and the experts' among
those at the same place in every replica: again in each size. As jobs that are resized by command at the same step, bit
for bit, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.elastic_megatron import (
    TIMEOUT_S,
    Resized,
    Training,
    check_back,
    check_killed,
    check_second_death,
    resized_once,
)
from tests.support.installed import skip_module_without

skip_module_without("megatron.core")

PHASES = ("between", "forward", "backward", "grad-sync", "optimizer", "param-gather", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--use-distributed-optimizer")
CONTEXT = ("--context-parallel-size", "2", "--use-distributed-optimizer")
STAGES = ("--pipeline-model-parallel-size", "2", "--layers", "2")
BUCKETS = ("--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700")
EP, CP = Training("ep", (*EXPERTS, "--bf16"), 3), Training("cp", (*CONTEXT, "--bf16"), 3)
OTHERS = (
    Training("ep-fp32", EXPERTS, 3),
    Training("cp-fp32", CONTEXT, 3),
    Training("ep-fp16-alltoall", (*EXPERTS, "--fp16", "--moe-token-dispatcher-type", "alltoall"), 3),
    Training("ep-buckets", (*EXPERTS, *BUCKETS), 3),
    Training("cp-buckets", (*CONTEXT, *BUCKETS), 3),
    Training("ep-cp", (*EXPERTS, "--context-parallel-size", "2", "--bf16"), 3),
    Training("ep-frozen", (*EXPERTS, "--bf16", "--mode", "frozen"), 3),
    Training("ep-dense-stage", (*EXPERTS, *STAGES, "--bf16", "--mode", "dense-stage"), each=4, runs=2),
)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_one_of_two(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    check_killed(replace(training, replicas=2), [victim], phase, tmp_path / "run", resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_one_of_three(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among whose ranks the state is sharded again."""
    check_killed(training, [victim], phase, tmp_path / "run", resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    check_killed(training, [1], "optimizer", tmp_path / "run", resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_a_second_death_during_the_change(training: Training, state: str, tmp_path: Path, resized: Resized) -> None:
    """Of a replica that is no neighbour of the first one's: four become two."""
    four = replace(training, name=f"{training}-48", flags=(*training.flags, "--global-batch", "48"), replicas=4)
    check_second_death(four, 0, 5, state, tmp_path / "run", resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_killed_and_back(training: Training, replicas: int, victim: int, tmp_path: Path) -> None:
    check_back(replace(training, replicas=replicas), victim, tmp_path)

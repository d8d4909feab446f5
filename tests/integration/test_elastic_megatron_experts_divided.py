"""Elastic jobs with megatron-core, expert or context parallelism, and the distributed optimizer.

The dense parameters' state is divided among all data-parallel ranks, several of each replica, and the experts' among
those at the same place in every replica: anew in each size. As jobs that are resized by command at the same step, bit
for bit, which go on as jobs that are started in that size from that step's state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.elastic_megatron import AT, TIMEOUT_S, Resized, Training, check_back, check_left, resized_once

pytest.importorskip("megatron.core")

PHASES = ("between", "forward", "backward", "grad-sync", "optimizer", "param-gather", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--use-distributed-optimizer")
CONTEXT = ("--context-parallel-size", "2", "--use-distributed-optimizer")
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
)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_one_of_two(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    two = replace(training, replicas=2)
    job = two.run(tmp_path / "run", inject=(f"rank={victim},fault=sigkill,at={phase},step={AT}",))
    check_left(job, two, [victim], resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("phase", ("backward", "optimizer", "commit"))
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_one_of_three(training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized) -> None:
    """Two are left, among whose ranks the state is divided anew."""
    job = training.run(tmp_path / "run", inject=(f"rank={victim},fault=sigkill,at={phase},step={AT}",))
    check_left(job, training, [victim], resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    job = training.run(tmp_path / "run", inject=(f"rank=1,fault=sigkill,at=optimizer,step={AT}",))
    check_left(job, training, [1], resized)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_a_second_death_during_the_change(training: Training, state: str, tmp_path: Path, resized: Resized) -> None:
    """Of a replica that is no neighbour of the first one's: four become two."""
    four = replace(training, name=f"{training}-48", flags=(*training.flags, "--global-batch", "48"), replicas=4)
    faults = (f"rank=0,fault=sigkill,at=backward,step={AT}", f"rank=5,fault=sigkill,at=recovery:{state}")
    check_left(four.run(tmp_path / "run", inject=faults), four, [0, 5], resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("training", (EP, CP), ids=str)
def test_killed_and_back(training: Training, replicas: int, victim: int, tmp_path: Path) -> None:
    check_back(replace(training, replicas=replicas), victim, tmp_path)

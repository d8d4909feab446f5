"""Elastic jobs on Megatron-LM's unmodified loop with expert parallelism (MoE layers) or context parallelism.

A rank that dies takes its replica with it, and the others go on as a job that was resized by command at the same call,
bit for bit, which goes on as one that was started in the new size from that iteration's state. What is logged of the
losses of experts are means of what the layers of all ranks have summed up, in the size of each iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_megatron_lm import (
    DISTRIBUTED,
    Resized,
    Training,
    check_ends_as_resized,
    resized_once,
)
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]
EXPERTS = (
    *("--num-experts=4", "--expert-model-parallel-size=2", "--moe-router-topk=2", "--moe-aux-loss-coeff=0.01"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-token-dispatcher-type=alltoall"),
)
CONTEXT = ("--context-parallel-size=2",)


def experts(name: str, *flags: str, **sizes: int) -> Training:
    """Their losses in the log are compared, too."""
    more: dict[str, Any] = {"launched": 6, "each": 2, **sizes}
    return Training(name, (*EXPERTS, *flags), experts=True, **more)


TWO = (experts("ep2", launched=4), Training("cp2", CONTEXT, each=2))
THREE = (
    experts("ep2-three"),
    Training("cp2-three", CONTEXT, launched=6, each=2),
    experts("ep2-distributed", *DISTRIBUTED, "--bf16"),
    Training("cp2-distributed", (*CONTEXT, *DISTRIBUTED, "--bf16"), launched=6, each=2),
)
OTHERS = (
    experts("ep2-bf16", "--bf16", "--moe-z-loss-coeff=0.001"),
    experts("ep2-per-token", "--calculate-per-token-loss"),
    experts("ep2-overlap", "--overlap-grad-reduce", "--ddp-bucket-size=700"),
    experts("ep2-cp2", *CONTEXT),
    experts("experts-alone", "--expert-model-parallel-size=1", launched=4, each=1),
    Training("cp2-per-token", (*CONTEXT, "--calculate-per-token-loss"), launched=6, each=2),
)
AT = TWO[0].call("train", 4)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def of_replica(victim: int, training: Training) -> list[int]:
    first = victim // training.each * training.each
    return list(range(first, first + training.each))


def check(folder: Path, training: Training, phase: str, victim: int, resized: Resized) -> None:
    job = training.start(folder, inject=[f"rank={victim},fault=sigkill,at={phase},step={AT}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, AT, of_replica(victim, training), training, resized)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "commit"])
@pytest.mark.parametrize("training", TWO, ids=str)
def test_a_rank_takes_its_replica_with_it(
    training: Training, phase: str, victim: int, tmp_path: Path, resized: Resized
) -> None:
    check(tmp_path / "run", training, phase, victim, resized)


@pytest.mark.parametrize("victim", (0, 3, 5))
@pytest.mark.parametrize("training", THREE, ids=str)
def test_one_of_three_replicas(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """The others go on as a job that was started with two, from that iteration's state."""
    check(tmp_path / "run", training, "backward", victim, resized)


@pytest.mark.parametrize("training", OTHERS, ids=str)
def test_other_trainings(training: Training, tmp_path: Path, resized: Resized) -> None:
    check(tmp_path / "run", training, "optimizer", 1, resized)


@pytest.mark.parametrize("victim", (0, 5))
@pytest.mark.parametrize("training", (THREE[2], OTHERS[0]), ids=str)
def test_killed_in_the_log(training: Training, victim: int, tmp_path: Path, resized: Resized) -> None:
    """The step was computed in the size before: its losses of experts are means over that one's micro-batches."""
    at = training.call("log", 4)
    job = training.start(tmp_path / "run", inject=[f"rank={victim},fault=sigkill,at=between,step={at}"]).wait(TIMEOUT_S)
    check_fired(job)
    check_ends_as_resized(job, at, of_replica(victim, training), training, resized)

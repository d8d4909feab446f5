"""Fallback checkpoints of elastic jobs on Megatron-LM's unmodified loop with MoE experts (all on each rank, or
sharded), with context parallelism, and with virtual pipeline stages: gone back to, and begun with, in another size. Bit
for bit as a job that was resized by command at that call, which goes on as one that was started in that size from
that iteration's state: losses and the whole state of every later iteration, what is logged of it (losses of experts are
compared with what the layers of all ranks have summed up, too), and evaluations.

A checkpoint just before a log is one of a step whose losses of experts are still to be logged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic_checkpoints import spoil
from tests.support.elastic_megatron_lm import DISTRIBUTED, Resized, Training, resized_once
from tests.support.elastic_megatron_lm_checkpoints import (
    check_alike,
    check_goes_back,
    check_started,
    died_whole,
    died_with_two,
    fell_far_back,
    goes_on,
    held,
    lost,
)
from tests.support.installed import skip_module_without
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S

skip_module_without("megatron.core")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]
EXPERTS = (
    *("--num-experts=4", "--moe-router-topk=2", "--moe-aux-loss-coeff=0.01", "--moe-z-loss-coeff=0.001"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-token-dispatcher-type=alltoall"),
)
EP, CP = ("--expert-model-parallel-size=2",), ("--context-parallel-size=2",)
STAGES = ("--pipeline-model-parallel-size=2", "--num-layers=4", "--num-layers-per-virtual-pipeline-stage=1")
SHARDED = (*DISTRIBUTED, "--bf16")


def experts(name: str, *flags: str, **more: Any) -> Training:
    return Training(name, (*EXPERTS, *flags), **{"experts": True, "launched": 6, "each": 2, **more})


EP1 = experts("ep1", "--bf16", launched=4, each=1)
EP1_PARTS = experts("ep1-distributed", *SHARDED, launched=4, each=1)
EP1_LOOP = experts("ep1-loop", *SHARDED, launched=4, each=1, evaluates=4, logs=3)
"""In which three iterations are in a log, and evaluations are made."""
EP2 = experts("ep2", *EP, "--bf16")
EP2_PARTS = experts("ep2-distributed", *EP, *SHARDED)
EP2_LOOP = experts("ep2-loop", *EP, *SHARDED, launched=8, batch=48, evaluates=4, logs=3)
EP2_CP2 = experts("ep2-cp2", *EP, *CP, *SHARDED)
CP2 = Training("cp2", (*CP, "--bf16"), launched=6, each=2)
CP2_PARTS = Training("cp2-distributed", (*CP, *SHARDED), launched=6, each=2)
CP2_LOOP = replace(CP2_PARTS, name="cp2-loop", launched=8, batch=48, evaluates=4, logs=3)
VPP2 = Training("vpp2", (*STAGES, "--bf16"), launched=6, each=2)
VPP2_PARTS = Training("vpp2-distributed", (*STAGES, *SHARDED), launched=6, each=2)
VPP2_LOOP = replace(VPP2_PARTS, name="vpp2-loop", launched=8, batch=48, evaluates=4, logs=3)
BOTH, TRAIN, LOG = ("train", "log"), ("train",), ("log",)


def before(*found: tuple[Training, tuple[str, ...]]) -> pytest.MarkDecorator:
    """These trainings, each with a checkpoint before a call of these kinds."""
    cases = [pytest.param(training, kind, id=f"{training}-{kind}") for training, kinds in found for kind in kinds]
    return pytest.mark.parametrize(("training", "kind"), cases)


@pytest.fixture(scope="session")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


def neighbours(training: Training) -> tuple[int, int]:
    """Ranks at the same place of two replicas, of which the second one keeps the copies of the first."""
    if STAGES[0] in training.flags:  # Megatron numbers them stage by stage
        return 1, 2
    return training.each, 2 * training.each


@before((EP1_LOOP, BOTH), (EP2_LOOP, BOTH), (CP2_LOOP, TRAIN), (VPP2_LOOP, BOTH))
def test_the_others_go_back(training: Training, kind: str, tmp_path: Path, resized: Resized) -> None:
    """No rank has what one of them had: two replicas of four are left, and go back some iterations."""
    job = lost(held(training, tmp_path, kind=kind), *neighbours(training))
    check_goes_back(job, training, 2, resized)


@before((EP2, LOG), (EP2_PARTS, LOG), (CP2, TRAIN), (VPP2, TRAIN))
def test_with_replacements(training: Training, kind: str, tmp_path: Path) -> None:
    """All that stand at the same place in their two replicas are lost, and replaced; the others go back with them."""
    training = replace(training, name=f"{training}-two", launched=4)
    victims = (2, 3) if STAGES[0] in training.flags else (1, 3)
    job = lost(held(training, tmp_path, kind=kind, elastic={"replace": "auto", "min": 2}, standby=2), *victims)
    call = fell_far_back(job, training, 2)
    other = training.start(tmp_path / "other", config={"elastic": {"min": 1, "max": 2}}).wait(TIMEOUT_S)
    check_alike(job, other, call, 2, training)


@before(
    *((EP1, LOG), (EP1_PARTS, LOG), (EP1_LOOP, BOTH), (EP2, LOG), (EP2_PARTS, BOTH), (EP2_CP2, LOG)),
    *((CP2, TRAIN), (CP2_PARTS, TRAIN), (VPP2, TRAIN), (VPP2_PARTS, TRAIN)),
)
def test_a_job_that_died_whole_goes_on_smaller(training: Training, kind: str, tmp_path: Path, resized: Resized) -> None:
    version = died_whole(training, tmp_path, kind)
    job = goes_on(training, tmp_path, 2)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    check_alike(job, resized(training, version, 2), version, 2, training, begun=[tmp_path / "died"])


@before((EP1, LOG), (EP2_PARTS, LOG), (CP2_PARTS, TRAIN), (VPP2_PARTS, TRAIN))
def test_a_job_that_died_whole_goes_on_larger(training: Training, kind: str, tmp_path: Path) -> None:
    """Of two replicas; as one that is started with three from the state of an undisturbed one of two."""
    two = replace(training, name=f"{training}-of-two", launched=2 * training.each)
    version = died_whole(two, tmp_path, kind)
    job = goes_on(two, tmp_path, 3)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    check_started(job, version, 3, two, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "bit"])
@pytest.mark.parametrize("training", [EP1_PARTS, EP2_PARTS, CP2_PARTS, VPP2_PARTS], ids=str)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    training: Training, damage: str, tmp_path: Path, resized: Resized
) -> None:
    older, newest = died_with_two(training, tmp_path)
    named = spoil(newest, damage)
    job = goes_on(training, tmp_path, 2)
    assert any(named in notice["text"] for notice in job.notices("checkpoint_damaged")), job.explain()
    assert job.code == 0 and job.of("fallback_started")[-1]["version"] == older, job.explain()
    check_alike(job, resized(training, older, 2), older, 2, training, begun=[tmp_path / "died"])

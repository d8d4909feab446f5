"""Elastic jobs with megatron-core in your own loop whose replicas have several ranks: tensor and pipeline
parallelism. A rank that dies takes its replica with it, and the others go on as in a job that was resized by command at
the same step, bit for bit; where two replicas are left, that goes on as one that was started with two."""

from __future__ import annotations

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

PHASES = ("between", "data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "commit", "below")
pytestmark = [pytest.mark.grid, pytest.mark.megatron, pytest.mark.timeout(4 * TIMEOUT_S)]

TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2", "--layers", "2")
TP2, PP2 = Training("tp2", TP), Training("pp2", PP, runs=2)
OTHERS = (
    Training("tp2-sp-bf16", (*TP, "--sequence-parallel", "--bf16")),
    Training("tp2-fp16", (*TP, "--fp16")),
    Training("pp2-bf16-buckets", (*PP, "--bf16", "--overlap-grad-reduce", "--ddp-bucket-size", "700"), runs=2),
    Training("pp2-tied", (*PP, "--tie-head"), runs=2),
)
THREE = (Training("tp2-three", TP, 3), Training("pp2-three", PP, 3, runs=2))


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training", (TP2, PP2), ids=str)
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
    check_killed(training, [victim], "backward", tmp_path / "run", resized)


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
    if second in training.ranks(first):
        second -= 1  # with stages
    check_second_death(training, first, second, state, tmp_path / "run", resized)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("training", (TP2, PP2, *THREE), ids=str)
def test_killed_and_back(training: Training, victim: int, tmp_path: Path) -> None:
    check_back(training, victim, tmp_path)

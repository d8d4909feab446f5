"""Jobs whose process groups behave as NCCL's do (tests/support/fake_nccl) go on in another parallel layout: bit for bit
as jobs over that fake that megatron-core alone has started in that layout from that step's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fake_nccl
from tests.support.installed import skip_module_without
from tests.support.replan import TIMEOUT_S, Saved, Sizes, Training
from tests.support.replan_scenarios import (
    check_back_to_a_checkpoint,
    check_losses,
    check_on_command,
    check_replaced_in_the_new_layout,
    check_second_death_before_the_change,
    check_second_death_in_the_new_layout,
    check_there_and_back,
    killed,
)
from tests.support.wrappers import FAKE_NCCL

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

SHARDED = ("--use-distributed-optimizer", "--bf16")
STAGES = Training("tp2-pp2", Sizes(2, 2, 1), ("--bf16",), wrapper=FAKE_NCCL)
PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED, wrapper=FAKE_NCCL)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    fake_nccl.build()
    return Saved(tmp_path_factory.mktemp("replanned"))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [(STAGES, Sizes(2, 1, 2)), (STAGES, Sizes(1, 2, 1)), (PARTS, Sizes(1, 2, 2)), (PARTS, Sizes(1, 1, 1))],
    ids=str,
)
def test_on_command(training: Training, sizes: Sizes, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, tmp_path / "run", saved)


def test_there_and_back(tmp_path: Path, saved: Saved) -> None:
    check_there_and_back(PARTS, Sizes(1, 1, 4), tmp_path / "run", saved)


@pytest.mark.parametrize("phase", ["forward", "backward", "grad-sync", "optimizer", "commit"])
@pytest.mark.parametrize(("training", "victim"), [(STAGES, 0), (STAGES, 3), (PARTS, 1)], ids=str)
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    check_losses(training, [killed(victim, phase)], 3, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["quiescing", "stashing"])
def test_a_second_death_before_the_change(state: str, tmp_path: Path, saved: Saved) -> None:
    check_second_death_before_the_change(STAGES, state, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
def test_a_second_death_in_the_new_layout(state: str, tmp_path: Path, saved: Saved) -> None:
    check_second_death_in_the_new_layout(PARTS, state, tmp_path / "run", saved)


def test_a_rank_is_replaced_in_the_new_layout(tmp_path: Path, saved: Saved) -> None:
    check_replaced_in_the_new_layout(PARTS, Sizes(1, 2, 2), tmp_path / "run", saved)


def test_back_to_a_checkpoint(tmp_path: Path, saved: Saved) -> None:
    check_back_to_a_checkpoint(PARTS, tmp_path / "run", saved)

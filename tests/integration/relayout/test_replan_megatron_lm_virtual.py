"""Megatron-LM's unmodified loop with virtual pipeline stages that goes on in another parallel layout, with as many
virtual stages or none: from its iteration on it is, bit for bit, a job that was started in that layout from that
iteration's state, which megatron-core alone has written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S
from tests.support.replan import Saved, Sizes
from tests.support.replan_megatron_lm import Virtual, check_killed, check_on_command

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]

SHARDED = ("--use-distributed-optimizer", "--bf16")
TWO = Virtual("vpp2-dp2-distributed", Sizes(pp=2, dp=2), SHARDED)
PLAIN = Virtual("vpp2-dp2", Sizes(pp=2, dp=2))
ROWS = Virtual("vpp2-tp2-evaluated", Sizes(tp=2, pp=2), ("--bf16", "--log-params-norm"), evaluates=3)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-lm-virtual"))


@pytest.mark.parametrize("kind", ["train", "log"])
@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{str(sizes).replace(',', '-')}")
        for training, sizes in (
            (TWO, Sizes(tp=2, pp=2)),
            (TWO, Sizes(dp=4)),
            (TWO, Sizes(pp=4)),
            (PLAIN, Sizes(dp=3)),
            (PLAIN, Sizes(tp=2, pp=2)),
            (ROWS, Sizes(pp=2, dp=2)),
        )
    ],
)
def test_on_command(training: Virtual, sizes: Sizes, kind: str, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, kind, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "commit"])
@pytest.mark.parametrize("training", [TWO, PLAIN], ids=str)
def test_killed_and_not_replaced(training: Virtual, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    at = training.call("train", 4)
    check_killed(training, victim, phase, at, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_an_evaluation(victim: int, tmp_path: Path, saved: Saved) -> None:
    at = ROWS.call("evaluate", 5)
    check_killed(ROWS, victim, "data", at, tmp_path / "run", saved)

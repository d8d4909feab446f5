"""A megatron-core job with virtual pipeline stages that goes on in another parallel layout, with as many virtual stages
or none, and one without that gets some: from its step on it is, bit for bit, a job that megatron-core alone has started
in that layout from that step's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.replan import TIMEOUT_S, Saved, Sizes, Training
from tests.support.replan_scenarios import check_losses, check_on_command, killed

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

STAGES = ("--layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
"""Where the layout has pipeline stages, and they divide the micro-batches of a replica."""
SHARDED = ("--use-distributed-optimizer", "--bf16")
TWO = Training("vpp2-dp2-distributed", Sizes(1, 2, 2), (*STAGES, *SHARDED))
PLAIN = Training("vpp2-dp2", Sizes(1, 2, 2), STAGES)
TIED = Training("vpp2-dp2-tied", Sizes(1, 2, 2), (*STAGES, *SHARDED, "--tie-head"))
NONE = Training("dp4-to-virtual", Sizes(1, 1, 4), (*STAGES, *SHARDED))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned"))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{sizes.tp}{sizes.pp}{sizes.dp}")
        for training, sizes in (
            (TWO, Sizes(1, 1, 4)),
            (TWO, Sizes(2, 2, 1)),
            (TWO, Sizes(2, 1, 2)),
            (PLAIN, Sizes(1, 1, 3)),
            (PLAIN, Sizes(2, 2, 1)),
            (TIED, Sizes(2, 2, 1)),
            (NONE, Sizes(1, 2, 2)),
        )
    ],
)
def test_on_command(training: Training, sizes: Sizes, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", (0, 3))
@pytest.mark.parametrize("training", (TWO, PLAIN), ids=str)
def test_killed_and_not_replaced(training: Training, victim: int, tmp_path: Path, saved: Saved) -> None:
    check_losses(training, [killed(victim, "backward")], 3, tmp_path / "run", saved)

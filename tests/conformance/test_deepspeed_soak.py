"""``make soak-deepspeed``: 60 kills of each ZeRO stage (see :mod:`tests.support.soak`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.config import PHASES
from tests.support.installed import skip_module_without
from tests.support.jobs import Layout
from tests.support.soak import kills, soak

skip_module_without("deepspeed")


@pytest.mark.soak
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_soak(stage: int, tmp_path: Path) -> None:
    layout = Layout(f"zero{stage}", "train_deepspeed.py", ("--zero", str(stage)))
    phases = [p for p in PHASES if p != "param-gather" or stage > 0]
    soak(layout, kills(60), phases, tmp_path)

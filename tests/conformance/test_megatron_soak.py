"""``make soak-megatron``: 200 kills of TP2 x DP2 (see :mod:`tests.support.soak`).

A survivor there may wait in a tensor-parallel collective for a peer that lives and has left the step: no connection of
its own breaks, so it has to be told.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import megatron as mg
from tests.support.installed import skip_module_without
from tests.support.jobs import Layout
from tests.support.soak import kills, soak

skip_module_without("megatron.core")


@pytest.mark.soak
@pytest.mark.megatron
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(
    ("layout", "number"), [(mg.TP2_DP2, 200), (mg.TP2_DP2_OVERLAPS, 60)], ids=["tp2-dp2", "tp2-dp2-overlaps"]
)
def test_soak(layout: Layout, number: int, tmp_path: Path) -> None:
    soak(layout, kills(number), mg.phases(layout), tmp_path, mg.ENVIRONMENT)

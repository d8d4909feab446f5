"""``make soak``: 200 kills of a DDP job, 60 of FSDP2 and HSDP each (see :mod:`tests.support.soak`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.config import PHASES
from tests.support.jobs import DDP, FSDP, HSDP, Layout
from tests.support.soak import kills, soak


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "number"), [(DDP, 200), (FSDP, 60), (HSDP, 60)], ids=["ddp", "fsdp", "hsdp"])
def test_soak(layout: Layout, number: int, tmp_path: Path) -> None:
    phases = [p for p in PHASES if p != "param-gather" or layout is not DDP]
    soak(layout, kills(number), phases, tmp_path)

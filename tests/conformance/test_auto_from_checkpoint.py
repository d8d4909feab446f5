"""``--auto`` and a script that reads torch's own checkpoint before its loop. To have a state to read it into, torch
lets the optimizer take a step there, which is none of the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.jobs import ROOT, Job, Layout, check_fired, check_recovered, run_job
from tests.support.unmodified import check_same

SCRIPT = ROOT / "tests" / "scripts" / "auto_from_checkpoint.py"
TIMEOUT_S = 120
KILLS = (0, "forward", 0), (1, "backward", 2), (0, "optimizer", 3), (1, "commit", 4)

pytestmark = [pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]


def _run(path: Path, *flags: str, **kwargs: Any) -> Job:
    layout = Layout("fsdp2", "", nproc=2)
    return run_job(path, layout, script=SCRIPT, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


def test_after_four_deaths(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    assert _run(tmp_path / "before", folder, "--save", standby=0).code == 0
    reference = _run(tmp_path / "reference", folder, standby=0)
    job = _run(tmp_path / "run", folder, inject=faults(*KILLS), options=("--auto",))
    check_fired(job, len(KILLS))
    check_recovered(job, (0, 1))
    check_same(job, reference)

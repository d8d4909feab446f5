"""Lightning Fabric's loops by ``--auto``, without a line of ours: killed, they end with the same state, and print
each line once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.jobs import ROOT, Job, Layout, check_fired, check_recovered, run_job
from tests.support.unmodified import check_same

pytest.importorskip("lightning.fabric")

SCRIPT = ROOT / "tests" / "scripts" / "auto_fabric.py"
TIMEOUT_S = 300
KILLS = (1, "forward", 0), (0, "backward", 3), (0, "forward", 8), (1, "below", 10)
"""In the first step, and where an epoch's loader has been asked for its first batch: it counts epochs then."""

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(3 * TIMEOUT_S)]


def _run(path: Path, shape: str, inject: tuple[str, ...] = ()) -> Job:
    return run_job(
        path,
        Layout(shape, "", nproc=2),
        script=SCRIPT,
        flags=(shape,),
        inject=inject,
        options=("--auto",),
        timeout_s=TIMEOUT_S,
        standby=1,
    )


@pytest.mark.parametrize("shape", ["epochs", "accumulation", "trainer", "fsdp2"])
def test_after_four_deaths(shape: str, tmp_path: Path) -> None:
    reference = _run(tmp_path / "reference", shape)
    job = _run(tmp_path / "run", shape, tuple(faults(*KILLS)))
    check_same(job, reference)
    check_fired(job, len(KILLS))
    check_recovered(job, (0, 1))

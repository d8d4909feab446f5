"""What a restore allocates lies in memory that was ready for it, and the job goes on with the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_same, run_job

SCRIPT = ROOT / "tests" / "scripts" / "ready_memory.py"
MIB = 1 << 20
WEIGHTS = 3 * 4 * MIB
"""Bytes of the parameters that are large enough."""


def run(path: Path, kind: str, *inject: str) -> Job:
    return run_job(path, Layout(f"ready-{kind}", "", nproc=2), script=SCRIPT, flags=(kind,), inject=inject, standby=0)


def ready(job: Job) -> dict[int, int]:
    """By rank: bytes that were ready where they were needed."""
    text = "".join(path.read_text() for path in (job.run_dir / "logs").glob("rank*.log"))
    return {int(rank): int(nbytes) for rank, nbytes in re.findall(r"ready rank=(\d+) (\d+)", text)}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "replaced", "survivor"),
    [("views", 3 * WEIGHTS, WEIGHTS), ("own", 3 * WEIGHTS, WEIGHTS), ("none", 2 * WEIGHTS, 0)],
)
def test_state_and_gradients_come_back_to_memory_that_is_ready(
    kind: str, replaced: int, survivor: int, tmp_path: Path
) -> None:
    """Two kills: the second one is of the replacement."""
    job = run(tmp_path / "run", kind, *(f"rank=1,fault=sigkill,at=grad-sync,step={step}" for step in (2, 4)))
    check_same(job, run(tmp_path / "reference", kind))
    assert [e["victims"] for e in job.of("recovery_finished")] == [[1], [1]], job.explain()
    found = ready(job)
    assert 0.9 * replaced < found[1] <= 1.01 * replaced, "of the process that was made last"
    assert found[0] <= 2.02 * survivor

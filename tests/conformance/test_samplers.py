"""Samplers that a script sets between its steps give the same order again after a death."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Layout, check_same, run_job

SCRIPT = ROOT / "tests" / "scripts" / "curriculum.py"


@pytest.mark.grid
@pytest.mark.parametrize("at", ["backward", "optimizer", "below"])
@pytest.mark.parametrize("step", [5, 10])
def test_a_curriculum(step: int, at: str, tmp_path: Path) -> None:
    layout = Layout("curriculum", "", nproc=2)
    reference = run_job(tmp_path / "reference", layout, script=SCRIPT)
    job = run_job(tmp_path / "run", layout, script=SCRIPT, inject=[f"rank=1,fault=sigkill,at={at},step={step}"])
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[1]], job.explain()

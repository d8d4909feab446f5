"""Adapters over quantised weights, of bitsandbytes (with peft) and torchao: every step and the end are those of the
same launch without a kill, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Layout
from tests.support.loops import check_loop, run_loop

for package in ("torchao", "bitsandbytes", "peft"):
    pytest.importorskip(package)

SCRIPT = ROOT / "tests" / "scripts" / "quantised.py"
KILLS = (Kill(1, 2, "data", 0), Kill(0, 3, "backward", 1), Kill(1, 5, "optimizer", 2))
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
TIMEOUT_S = 400

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(3 * TIMEOUT_S)]


@pytest.mark.parametrize("kind", ["bitsandbytes-4bit", "bitsandbytes-8bit", "torchao-int8"])
def test_comes_back(kind: str, tmp_path: Path) -> None:
    layout = Layout(kind, "", ("--kind", kind), nproc=2)
    reference = run_loop(tmp_path / "reference", layout, 7, script=SCRIPT, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    job = run_loop(tmp_path / "run", layout, 7, KILLS, script=SCRIPT, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    check_loop(job, reference, KILLS)

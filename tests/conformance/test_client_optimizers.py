"""Optimizers that a script gives to DeepSpeed and that keep something in their attributes: it comes back, each rank's
own, or it is refused by name before the second step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout
from tests.support.loops import check_loop, run_loop

skip_module_without("deepspeed")

SCRIPT = ROOT / "tests" / "scripts" / "client_optimizers.py"
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
STEPS = 7
TIMEOUT_S = 200

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(3 * TIMEOUT_S)]


def _run(path: Path, framework: str, optimizer: str, kills: tuple[Kill, ...] = ()) -> Job:
    layout = Layout(framework, "", ("--framework", framework, "--optimizer", optimizer), nproc=2)
    return run_loop(path, layout, STEPS, kills, script=SCRIPT, env=ENVIRONMENT, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "framework",
    ["zero2", *(pytest.param(f, marks=pytest.mark.grid) for f in ("zero0-fp32", "zero0", "zero1", "zero3"))],
)
def test_comes_back(framework: str, tmp_path: Path) -> None:
    kills = (Kill(1, 2, "backward", 0), Kill(0, 4, "optimizer", 1))
    reference = _run(tmp_path / "reference", framework, "remembering")
    check_loop(_run(tmp_path / "run", framework, "remembering", kills), reference, kills)


@pytest.mark.grid
def test_what_is_too_large_is_refused_by_name(tmp_path: Path) -> None:
    job = _run(tmp_path / "run", "zero2", "hoarding")
    assert job.code != 0 and "Hoarding keeps" in job.output and "before/0" in job.output, job.explain()
    assert "step=1 " not in job.output, job.explain()

"""Optimizers of other projects, with state in their own forms: ranks that are killed in forward, backward and
optimizer come back with the same bits (docs/optimizers.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Layout
from tests.support.loops import check_loop, run_loop

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(900)]
for package in ("torchao", "bitsandbytes", "prodigyopt", "schedulefree", "transformers"):
    pytest.importorskip(package)

SCRIPT = ROOT / "tests" / "scripts" / "library_optimizers.py"
STEPS = 8
KILLS = (Kill(1, 2, "data", 0), Kill(0, 3, "backward", 1), Kill(1, 5, "optimizer", 2))
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
"""torchao's optimizers compile their step, which takes minutes of a processor."""
BOTH = ("torchao-8bit", "torchao-4bit", "torchao-fp8", "prodigy", "schedule-free", "muon", "adam-mini")
REPLICATED = (
    *("bitsandbytes-8bit", "bitsandbytes-lion", "transformers-adafactor"),
    *("lion", "kron", "kron-torch"),
)
"""Of these the first three do not run on FSDP2's DTensors by themselves, on a CPU."""

PACKAGES = {
    "adam-mini": "adam_mini",
    "lion": "pytorch_optimizer",
    "kron": "pytorch_optimizer",
    "kron-torch": "kron_torch",
}


@pytest.mark.parametrize(
    ("optimizer", "framework"),
    [*((name, framework) for name in BOTH for framework in ("ddp", "fsdp2")), *((name, "ddp") for name in REPLICATED)],
)
def test_comes_back(optimizer: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(optimizer, "torch"))
    layout = Layout(optimizer, "", ("--framework", framework, "--optimizer", optimizer), nproc=2)
    options = {"script": SCRIPT, "env": ENVIRONMENT, "timeout_s": 400}
    reference = run_loop(tmp_path / "reference", layout, STEPS, **options)
    check_loop(run_loop(tmp_path / "run", layout, STEPS, KILLS, **options), reference, KILLS)


def test_muon_compiled_by_inductor(tmp_path: Path) -> None:
    layout = Layout("compiled", "", ("--optimizer", "muon-compiled"), nproc=2)
    reference = run_loop(tmp_path / "reference", layout, STEPS, script=SCRIPT, timeout_s=400)
    check_loop(run_loop(tmp_path / "run", layout, STEPS, KILLS, script=SCRIPT, timeout_s=400), reference, KILLS)

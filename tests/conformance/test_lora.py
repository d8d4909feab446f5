"""peft's LoRA, whose layers read their adapters' weights: of a job that is killed while ZeRO-3 learns that, and later,
every step and the end are those of the same launch without a kill, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Job, Layout
from tests.support.loops import check_loop, run_loop

SCRIPT = ROOT / "tests" / "scripts" / "lora.py"
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
STEPS = 8
TIMEOUT_S = 400  # peft imports much, in each process

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(3 * TIMEOUT_S)]


def _run(path: Path, framework: str, kills: tuple[Kill, ...] = (), flags: tuple[str, ...] = ()) -> Job:
    layout = Layout(framework, "", ("--framework", framework, *flags), nproc=2)
    return run_loop(path, layout, STEPS, kills, script=SCRIPT, env=ENVIRONMENT, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("framework", ["zero3", "fsdp2"])
def test_two_adapters(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
    kills = (Kill(1, 1, "backward", 0), Kill(0, 4, "optimizer", 1))
    check_loop(_run(tmp_path / "run", framework, kills), _run(tmp_path / "reference", framework), kills)


def test_the_other_adapter_from_a_step_on(tmp_path: Path) -> None:
    """A process that comes after that step has never switched. The first kill is in the step itself."""
    pytest.importorskip("peft")
    kills = (Kill(0, 3, "backward", 0), Kill(1, 6, "backward", 1))
    flags = ("--switch", "3")
    reference = _run(tmp_path / "reference", "fsdp2", flags=flags)
    check_loop(_run(tmp_path / "run", "fsdp2", kills, flags), reference, kills)


@pytest.mark.parametrize("framework", ["ddp", "zero2", "zero3"])
def test_adapters_in_turns(framework: str, tmp_path: Path) -> None:
    """``set_adapter`` above, within and below the block, and a forward pass in each step with the adapters disabled, in
    which the first kill is. Of the adapter that is not set ZeRO-3 has no gradients."""
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
    kills = (Kill(1, 3, "data", 0), Kill(0, 5, "backward", 1))
    reference = _run(tmp_path / "reference", framework, flags=("--turns",))
    check_loop(_run(tmp_path / "run", framework, kills, ("--turns",)), reference, kills)

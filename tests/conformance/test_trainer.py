"""The Hugging Face Trainer, by PyTorch alone and with DeepSpeed: kills in steps, evaluations, checkpoints and between.

Its calls, as the versions of the job count them: two steps and a log, an evaluation every fifth step, a checkpoint
every eighth. 0 1 steps, 2 log, 3 4 steps, 5 log, 6 step, 7 evaluation, 8 step, 9 log, 10 11 steps, 12 log and save,
13 14 steps, 15 log and evaluation, ... The digest covers engine, random streams, and the Trainer's state and history.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, References, check_fired, check_recovered, check_same, run_job
from tests.support.sameness import Printed

skip_module_without("deepspeed", "transformers", "accelerate")

STEPS = 20
TIMEOUT_S = 500
SCRIPT = "train_hf.py"
EVALUATION, CHECKPOINT, END, AFTER = 7, 12, 32, 33
"""END: the count of operations after the last step. AFTER: the script's own evaluation, when training has ended."""

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(3 * TIMEOUT_S)]
Reference = Callable[[Layout], Job]


def hf(stage: int, name: str = "", *flags: str) -> Layout:
    return Layout(f"hf-zero{stage}{name}", SCRIPT, ("--zero", str(stage), *flags))


ZERO2, DDP = hf(2), Layout("hf-ddp", SCRIPT, ("--by", "ddp"))
FSDP = Layout("hf-fsdp", str(ROOT / "tests" / "scripts" / "trainer_fsdp.py"), DDP.flags)
LAYOUTS = (hf(0), hf(1, "-own-optimizer", "--own-optimizer"), ZERO2, hf(3), FSDP)
WITHOUT_GATHER = (hf(0).name, DDP.name)


def _run(path: Path, layout: Layout, **kwargs: Any) -> Job:
    flags = ["--output", str(path.parent / f"{path.name}-output")]
    return run_job(path, layout, steps=STEPS, flags=flags, timeout_s=TIMEOUT_S, **kwargs)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: _run(path, layout, standby=0))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(DDP, id=DDP.name), *(pytest.param(x, id=x.name, marks=pytest.mark.grid) for x in LAYOUTS)],
)
def test_deaths_in_steps(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    """In the second of two micro-batches too, and at the beginning of a log."""
    late = "optimizer" if layout.name in WITHOUT_GATHER else "param-gather"
    inject = faults((0, "backward", 4), (2, late, 10), (3, "between", 15), (1, "grad-sync", 23))
    job = _run(tmp_path / "run", layout, inject=inject)
    check_same(job, reference(layout), printed=Printed.LOGS)
    check_fired(job, 4)
    check_recovered(job, [0, 1, 2, 3])
    for failed in job.of("failure_detected"):  # a log comes with every second iteration
        assert abs(failed["iteration"] - (1 + 2 * failed["step"] / 3)) < 3, failed
        assert f"failed at iteration {failed['iteration']} (call {failed['step']})" in job.output, job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("layout", [ZERO2, DDP], ids=lambda x: x.name)
def test_deaths_in_evaluation_checkpoint_and_at_both_ends(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    kills = (3, "backward", 0), (1, "forward", EVALUATION), (2, "commit", CHECKPOINT), (0, "commit", END)
    job = _run(tmp_path / "run", layout, inject=faults(*kills, (3, "forward", AFTER)))
    check_same(job, reference(layout), printed=Printed.LOGS)
    check_fired(job, 5)
    check_recovered(job, [0, 1, 2, 3])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("off", "on"),
    [(hf(2, "-off", "--switched-off"), ZERO2), (Layout("hf-ddp-off", SCRIPT, (*DDP.flags, "--switched-off")), DDP)],
    ids=lambda x: x.name,
)
def test_protection_changes_no_bit(off: Layout, on: Layout, tmp_path: Path, reference: Reference) -> None:
    """With the key false, or without `protect`, the Trainer is not touched; its losses, history and state are the
    same."""
    job = _run(tmp_path / "run", off, standby=0)
    check_same(job, reference(on), printed=Printed.LOGS, launches=0)
    assert not job.notices("redundancy")

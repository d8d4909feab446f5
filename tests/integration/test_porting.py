"""What people write around the step: recovered from bit for bit, or refused by name before anything is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Job, Layout, check_clean
from tests.support.loops import check_loop, run_loop

SCRIPT = ROOT / "tests" / "scripts" / "porting.py"


def port(path: Path, loop: str, steps: int, kills: list[Kill] | None = None, nproc: int = 2) -> Job:
    if loop.startswith("accelerate"):
        pytest.importorskip("accelerate")
    return run_loop(path, Layout(loop, "", ("--loop", loop), nproc), steps, kills or (), SCRIPT)


@pytest.mark.parametrize(
    "loop",
    [
        "prefetcher-behind",
        "persistent-workers",
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.accelerate),
        pytest.param("accelerate-seedable", marks=[pytest.mark.accelerate, pytest.mark.slow]),
    ],
)
def test_two_kills_and_the_same_end(loop: str, tmp_path: Path) -> None:
    kills = [Kill(1, 2, "backward", 0), Kill(0, 9, "optimizer", 1)]
    steps = 13  # several epochs
    check_loop(port(tmp_path / "run", loop, steps, kills), port(tmp_path / "reference", loop, steps), kills)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("prefetcher-around", "recovery.data(prefetch(loader))"),
        pytest.param("accelerate-dispatch", "dispatch_batches=False", marks=pytest.mark.accelerate),
        pytest.param("accelerate-astray", "all micro-batches of one optimizer step", marks=pytest.mark.accelerate),
        pytest.param("accelerate-alone", "accelerator=accelerator", marks=pytest.mark.accelerate),
    ],
)
def test_what_cannot_be_recovered_is_refused_by_name(loop: str, expected: str, tmp_path: Path) -> None:
    job = port(tmp_path / "run", loop, 6)
    assert job.code == 1 and expected in job.output, job.explain()
    check_clean(job)

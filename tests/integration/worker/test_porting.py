"""What people write around the step: recovered from bit for bit, or refused by name before anything is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripts.proof import Kill
from tests.support.jobs import ROOT, Job, Layout, check_clean, check_same, run_job
from tests.support.loops import check_loop, run_loop

SCRIPT = ROOT / "tests" / "scripts" / "porting.py"
NANOGPT = ROOT / "tests" / "scripts" / "nanogpt.py"
LOCAL = ROOT / "tests" / "scripts" / "local_barrier.py"


def port(path: Path, loop: str, steps: int, kills: list[Kill] | None = None, nproc: int = 2) -> Job:
    if loop.startswith("accelerate"):
        pytest.importorskip("accelerate")
    return run_loop(path, Layout(loop, "", ("--loop", loop), nproc), steps, kills or (), SCRIPT)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("prefetcher-behind", marks=pytest.mark.grid),
        pytest.param("persistent-workers", marks=pytest.mark.grid),
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.accelerate),
        pytest.param("accelerate-seedable", marks=[pytest.mark.accelerate, pytest.mark.slow]),
    ],
)
def test_two_kills_and_the_same_end(loop: str, tmp_path: Path) -> None:
    kills = [Kill(1, 2, "backward", 0), Kill(0, 9, "optimizer", 1)]
    steps = 13  # several epochs
    check_loop(port(tmp_path / "run", loop, steps, kills), port(tmp_path / "reference", loop, steps), kills)


def test_nanogpts_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/recipes.md; with evaluation and checkpoint on rank 0 in steps that are killed."""
    tokens = np.random.default_rng(0).integers(0, 32, 4096).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    monkeypatch.setenv("NANOGPT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(name: str, kills: Sequence[Kill] = ()) -> Job:
        return run_loop(tmp_path / name, Layout("nanogpt", "", nproc=3), 15, kills, NANOGPT)

    places = ((0, 4, "backward"), (1, 5, "data"), (0, 8, "data"), (2, 9, "optimizer"), (0, 12, "optimizer"))
    kills = [Kill(*place, number) for number, place in enumerate(places)]
    check_loop(run("run", kills), run("reference"), kills)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("prefetcher-around", "recovery.data(prefetch(loader))"),
        pytest.param("accelerate-dispatch", "dispatch_batches=False", marks=pytest.mark.accelerate),
        pytest.param(
            "accelerate-astray",
            "all micro-batches of one optimizer step",
            marks=[pytest.mark.accelerate, pytest.mark.grid],
        ),
        pytest.param("accelerate-alone", "accelerator=accelerator", marks=pytest.mark.accelerate),
    ],
)
def test_what_cannot_be_recovered_is_refused_by_name(loop: str, expected: str, tmp_path: Path) -> None:
    job = port(tmp_path / "run", loop, 6)
    assert job.code == 1 and expected in job.output, job.explain()
    check_clean(job)


def share(path: Path, *flags: str, **more: Any) -> Job:
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    return run_job(path, Layout("shared", "", nproc=2), script=LOCAL, flags=(str(files), *flags), **more)


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_the_ranks_of_a_node_share(rank: int, tmp_path: Path) -> None:
    """docs/recipes.md. A rank that waits for the other ranks in a collective is answered, and finds the dead one's
    memory."""
    reference = share(tmp_path / "reference", "--by", "barrier")
    job = share(tmp_path / "run", "--by", "barrier", inject=[f"rank={rank},fault=sigkill,at=backward,step=3"])
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()


@pytest.mark.grid
def test_a_replacement_that_waits_for_files_of_its_peers_is_named(tmp_path: Path) -> None:
    config = {"timeouts": {"replacement_s": 12.0}, "max_failures_per_step": 1}
    job = share(tmp_path / "run", inject=["rank=1,fault=sigkill,at=backward,step=3"], config=config)
    assert job.code not in (0, -1000), job.explain()
    told = [notice["text"] for notice in job.notices("waiting") if notice["rank"] == 1]
    assert told and "in wait_for_local_peers of" in told[0] and "local_barrier.py" in told[0], job.explain()
    (failed,) = job.of("job_failed")
    assert "the replacement of rank 1 failed" in failed["reason"], failed

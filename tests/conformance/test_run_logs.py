"""The logs of a run that loses the rank that writes them: one id, one folder, each step once, nothing cut off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, run_job

SCRIPT = ROOT / "tests" / "scripts" / "logs.py"
STEPS = 8


def run(path: Path, inject: Sequence[str] = (), flags: Sequence[str] = ()) -> tuple[Job, Path]:
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    layout = Layout("logs", "", nproc=2)
    job = run_job(path, layout, script=SCRIPT, flags=(str(files), *flags), inject=inject)
    assert job.code == 0, job.explain()
    return job, files


def check_logs(job: Job, files: Path) -> list[str]:
    """Returns the losses."""
    folders = [p for p in files.iterdir() if (p / "train.log").exists()]
    scratches = [p for p in files.iterdir() if p.name.startswith("scratch")]
    assert len(folders) == len(scratches) == 1, f"{[*files.iterdir()]}\n{job.explain()}"
    (folder,) = folders
    lines = (folder / "train.log").read_text().split("\n")
    assert lines == ["header", *(f"step {step}" for step in range(STEPS)), ""], job.explain()
    rows = (folder / "loss.csv").read_text().split()
    assert rows[0] == "step,loss" and [row.split(",")[0] for row in rows[1:]] == [*map(str, range(STEPS))], rows
    assert str(scratches[0].name) in (folder / "config.json").read_text()
    return [row.split(",")[1] for row in rows[1:]]


def test_a_run_that_loses_the_rank_that_logs(tmp_path: Path) -> None:
    kills = ["rank=0,fault=sigkill,at=backward,step=3", "rank=0,fault=sigkill,at=forward,step=6"]
    job, files = run(tmp_path / "run", kills)
    check_clean(job)
    assert [event["victims"] for event in job.of("recovery_finished")] == [[0], [0]], job.explain()
    assert len(check_logs(job, files)) == STEPS
    said = sorted(
        line for log in (job.run_dir / "logs").glob("rank*.log") for line in log.read_text().split("\n") if line
    )
    assert said == ["told 0 False True", "told 0 True False", "told 0 True False", "told 1 False True"], job.explain()
    kept = [notice["text"] for notice in job.notices("file_kept")]
    assert len(kept) == 2 and all("(train.log)" in text and "(loss.csv)" in text for text in kept), kept
    assert not job.notices("setup_differs"), job.explain()


@pytest.mark.grid
@pytest.mark.deepspeed
@pytest.mark.parametrize("at", ["forward", "backward", "optimizer", "commit"])
def test_each_phase_with_deepspeed(at: str, tmp_path: Path) -> None:
    reference, there = run(tmp_path / "reference", flags=["--framework", "deepspeed"])
    job, files = run(tmp_path / "run", [f"rank=0,fault=sigkill,at={at},step=3"], ["--framework", "deepspeed"])
    assert check_logs(job, files) == check_logs(reference, there)

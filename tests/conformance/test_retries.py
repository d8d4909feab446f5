"""A script that catches the interruption of its step and begins the step again, for ever, is helped out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_same, run_job

SCRIPT = ROOT / "tests" / "scripts" / "retries.py"
KILLED = "rank=1,fault=sigkill,at={at},step=4"


def run(path: Path, kind: str, at: str = "") -> Job:
    inject = [KILLED.format(at=at)] if at else []
    return run_job(path, Layout(f"retries-{kind}", "", nproc=2), script=SCRIPT, flags=(kind,), inject=inject)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("base", "grad-sync"),
        pytest.param("base", "forward", marks=pytest.mark.grid),
        pytest.param("base", "optimizer", marks=pytest.mark.grid),
        pytest.param("collective", "grad-sync", marks=pytest.mark.grid),
        pytest.param("collective", "optimizer", marks=pytest.mark.grid),
    ],
)
def test_a_step_that_is_tried_again_whatever_is_raised_in_it(kind: str, at: str, tmp_path: Path) -> None:
    job = run(tmp_path / "run", kind, at)
    check_same(job, run(tmp_path / "reference", kind))
    assert [e["victims"] for e in job.of("recovery_finished")] == [[1]], job.explain()


@pytest.mark.grid
def test_where_nothing_can_be_raised_past_it_the_process_ends_and_names_the_line(tmp_path: Path) -> None:
    job = run(tmp_path / "run", "suppressed", "grad-sync")
    assert job.code not in (0, -1000) and job.of("job_failed"), job.explain()
    told = [e["evidence"] for e in job.of("failure_detected") if e["rank"] == 0]
    assert told and "retries.py:" in told[0] and "interruptions" in told[0], job.explain()

"""The data of one rank ends before that of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, run_job

SCRIPT = ROOT / "tests" / "scripts" / "ending_data.py"


def run(tmp_path: Path, mode: str) -> Job:
    return run_job(tmp_path / "run", Layout(mode, "", nproc=2), script=SCRIPT, flags=[mode], standby=0)


def test_a_rank_that_leaves_in_its_block_is_named_long_before_the_time_of_a_hang(tmp_path: Path) -> None:
    job = run(tmp_path, "break")
    (failed,) = job.of("job_failed")
    (told,) = job.notices("data_ended")
    assert failed["reason"].startswith("the data of rank 1 has ended in step 3, where the others go on"), job.explain()
    assert failed["time"] - told["time"] < 60, "hang_floor_s is 120 s"
    assert job.code == 1
    check_clean(job)


@pytest.mark.grid
def test_a_rank_that_asks_for_more_is_named_at_once(tmp_path: Path) -> None:
    job = run(tmp_path, "stop")
    (failed,) = job.of("job_failed")
    assert "recovery.data() of rank 1 has ended in step 3" in failed["reason"], job.explain()
    assert not job.of("recovery_finished"), "it would end there again"
    check_clean(job)


@pytest.mark.grid
def test_ranks_that_agree_on_the_end_leave_together(tmp_path: Path) -> None:
    job = run(tmp_path, "agree")
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    check_clean(job)


@pytest.mark.grid
def test_join_is_refused_by_name_before_the_first_step(tmp_path: Path) -> None:
    job = run(tmp_path, "join")
    (failed,) = job.of("job_failed")
    assert "DistributedDataParallel is in a join() context" in failed["reason"], job.explain()
    check_clean(job)

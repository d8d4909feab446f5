"""The data of one rank ends before that of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, run_job

SCRIPT = ROOT / "tests" / "scripts" / "ending_data.py"


def run(tmp_path: Path, mode: str, *options: str) -> Job:
    layout = Layout(mode, "", nproc=2)
    return run_job(tmp_path / "run", layout, script=SCRIPT, flags=[mode], standby=0, options=options)


def test_a_rank_that_leaves_in_its_block_is_named_long_before_the_time_of_a_hang(tmp_path: Path) -> None:
    job = run(tmp_path, "break")
    (failed,) = job.of("job_failed")
    (told,) = job.notices("data_ended")
    reason = "the data of rank 1 has ended in step 3, while the other ranks still have data"
    assert failed["reason"].startswith(reason), job.explain()
    assert failed["time"] - told["time"] < 60, "hang_step_s is 120 s"
    assert job.code == 1
    check_clean(job)


@pytest.mark.grid
def test_a_rank_that_asks_for_more_is_named_at_once_and_the_job_goes_on_with_more_data(tmp_path: Path) -> None:
    job = run(tmp_path, "stop")
    (failed,) = job.of("job_failed")
    assert "recovery.data() of rank 1 has ended in step 3" in failed["reason"], job.explain()
    assert not job.of("recovery_finished"), "it would end there again"
    check_clean(job)
    again = run(tmp_path, "enough", "--resume")
    assert again.gone_on_from_snapshots() == [3] and again.code == 0, again.explain()
    (tmp_path / "undisturbed").mkdir()
    assert len(again.digests) == 2 and again.digests == run(tmp_path / "undisturbed", "enough").digests


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

"""A job whose copies do not fit into its nodes' memory is told so with the numbers, and nothing is killed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.control_groups import inside, limited_memory
from tests.support.jobs import ROOT, Job, Layout, check_clean, run_job

SCRIPT = ROOT / "tests" / "scripts" / "large_shards.py"
STATE = 16 * 4096 * 4096 * 4


def run(run_dir: Path, *options: str) -> Job:
    return run_job(run_dir, Layout("large-shards", "", nproc=4), script=SCRIPT, options=options, own_imports=True)


@pytest.mark.parametrize("redundancy", ["auto", pytest.param("parity", marks=pytest.mark.slow)])
def test_it_is_refused(tmp_path: Path, redundancy: str) -> None:
    with limited_memory(STATE + (1500 << 20)) as group, inside(group):
        job = run(tmp_path / "run", "--redundancy", redundancy, "--max-restarts", "0")
    assert job.code != 0, job.explain()
    assert "GB of host memory on a node" in job.output and "trained" not in job.explain()
    assert "are free on the node with least" in job.output
    check_clean(job)


@pytest.mark.slow
def test_with_more_memory_it_trains(tmp_path: Path) -> None:
    with limited_memory(8 << 30) as group, inside(group):
        job = run(tmp_path / "run", "--max-restarts", "0")
    assert job.code == 0 and "trained" in job.explain(), job.explain()
    check_clean(job)

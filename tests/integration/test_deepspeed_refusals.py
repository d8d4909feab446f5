"""Bad input in a DeepSpeed config ends the job at its start, with the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Layout, check_clean, run_job

pytest.importorskip("deepspeed")

pytestmark = [pytest.mark.grid, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("nproc", "setting", "words"),
    [
        (
            1,
            'flash_recovery.redundancy="neighbor"',
            ["redundancy = 'neighbor'", "one rank", "allowed here: auto, none"],
        ),
        (1, 'flash_recovery.redundancy="replica"', ["redundancy = 'replica'", "one rank"]),
        (1, "elasticity={}", ["DeepSpeedConfigError", "'elasticity' configuration block is no longer supported"]),
        (1, "zero_optimization.mics_shard_size=2", ["DeepSpeedConfigError", "'zero_optimization.mics_shard_size'"]),
    ],
    ids=["dp1-neighbor", "dp1-replica", "elasticity", "mics"],
)
def test_refused_at_start(nproc: int, setting: str, words: list[str], tmp_path: Path) -> None:
    layout = Layout("refused", "train_deepspeed.py", ("--zero", "1", "--set", setting), nproc=nproc)
    job = run_job(tmp_path / "run", layout, standby=0, options=["--max-restarts", "0"], timeout_s=200)
    assert job.code != 0 and not job.losses, job.explain()
    for word in words:
        assert word in job.output, job.explain()
    check_clean(job)

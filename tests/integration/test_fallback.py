"""When no consistent state is left in memory: back to the newest checkpoint, or a clear error."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from flashrecovery.redundancy.checkpoint import newest
from tests.support.jobs import FSDP, RunningJob, check_clean, check_same, run_job

pytestmark = pytest.mark.timeout(400)  # two or three launches, one after another, each with a deadline of its own

FLAGS = ["--step-time", "60"]
STEPS = 60
NEIGHBOURS = (1, 2)  # rank 2 has the copy of rank 1


def _options(directory: Path) -> list[str]:
    return ["--checkpoint-dir", str(directory), "--checkpoint-interval", "0.7"]


def test_a_rank_and_its_neighbour_at_once_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", FSDP, steps=STEPS, standby=0, flags=FLAGS)
    options = _options(tmp_path / "ckpt")
    running = RunningJob(tmp_path / "run", FSDP, steps=STEPS, standby=2, flags=FLAGS, options=options)
    saved = running.wait_for("checkpoint_saved")
    running.kill(*NEIGHBOURS)
    job = running.wait()
    check_same(job, reference)
    assert {e["rank"] for e in job.of("failure_detected")} == set(NEIGHBOURS)
    (fallback,) = job.of("fallback_started")
    assert saved["version"] <= fallback["version"] < STEPS


def test_without_a_checkpoint_the_lost_shards_are_named(tmp_path: Path) -> None:
    running = RunningJob(tmp_path / "run", FSDP, steps=STEPS, standby=0, flags=FLAGS)
    running.wait_for_step(5)
    running.kill(*NEIGHBOURS)
    job = running.wait()
    assert job.code == 1, job.explain()
    assert "cannot be recovered" in job.output and "#" in job.output and "no checkpoint" in job.output, job.explain()
    check_clean(job)


def test_a_fresh_launch_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", FSDP, steps=STEPS, standby=0, flags=FLAGS)
    options = _options(tmp_path / "ckpt")
    first = RunningJob(tmp_path / "first", FSDP, steps=STEPS, standby=0, flags=FLAGS, options=options)
    first.wait_for("checkpoint_saved", 90)
    time.sleep(0.3)
    first.popen.send_signal(signal.SIGTERM)
    check_clean(first.wait(20))
    found = newest(tmp_path / "ckpt")
    assert found is not None and found[0] > 0
    second = run_job(tmp_path / "second", FSDP, steps=STEPS, standby=0, flags=FLAGS, options=[*options, "--resume"])
    check_same(second, reference, start=found[0])

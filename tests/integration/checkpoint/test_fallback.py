"""When no consistent state is left in memory: back to the newest checkpoint, or a clear error."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrecovery.cli.checkpoints import checkpoints
from flashrecovery.redundancy.checkpoint.published import newest, published
from tests.support.jobs import DDP, FSDP, Layout, References, RunningJob, check_clean, check_same, run_job

pytestmark = pytest.mark.timeout(400)  # two or three launches, one after another, each with its own deadline

FLAGS = ["--step-time", "60"]
STEPS = 80
"""Some seconds: of a checkpoint that ranks hear of too late, another one is announced three seconds later."""
THREE = replace(FSDP, nproc=3)
NEIGHBOURS = (1, 2)  # rank 2 has the copy of rank 1
NO_SNAPSHOTS = {"snapshots": {"keep": "never"}}
"""Or the node would hold both ranks' own copies."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(
        lambda: tmp_path_factory.mktemp("reference"),
        lambda path, layout: run_job(path, layout, steps=STEPS, standby=0),
    )


def _options(directory: Path) -> list[str]:
    return ["--checkpoint-dir", str(directory), "--checkpoint-interval", "0.7"]


def test_a_rank_and_its_neighbour_at_once_go_back_to_the_checkpoint(tmp_path: Path, reference: References) -> None:
    options = _options(tmp_path / "ckpt")
    running = RunningJob(
        tmp_path / "run", THREE, steps=STEPS, standby=2, flags=FLAGS, options=options, config=NO_SNAPSHOTS
    )
    saved = running.wait_for("checkpoint_saved")
    running.kill(*NEIGHBOURS)
    job = running.wait()
    check_same(job, reference(THREE))
    assert {e["rank"] for e in job.of("failure_detected")} == set(NEIGHBOURS)
    (fallback,) = job.of("fallback_started")
    assert saved["version"] <= fallback["version"] < STEPS
    looked = CliRunner().invoke(checkpoints, [str(job.run_dir), "--json"], catch_exceptions=False)
    assert looked.exit_code == 0 and json.loads(looked.output)[-1]["path"].startswith(str(tmp_path / "ckpt"))


def test_without_a_checkpoint_the_lost_shards_are_named(tmp_path: Path) -> None:
    running = RunningJob(tmp_path / "run", FSDP, steps=STEPS, standby=0, flags=FLAGS, config=NO_SNAPSHOTS)
    running.wait_for_step(5)
    running.kill(*NEIGHBOURS)
    job = running.wait()
    assert job.code == 1, job.explain()
    assert "cannot be recovered" in job.output and "#" in job.output and "no checkpoint" in job.output, job.explain()
    check_clean(job)


def _damage(checkpoint: Path) -> None:
    """One bit here and there in its largest file, which is mostly tensors."""
    largest = max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for at in range(0, len(content), 1009):
        content[at] ^= 1
    largest.write_bytes(content)


def _launch_that_ends_after_two_checkpoints(tmp_path: Path) -> list[tuple[int, Path]]:
    options = _options(tmp_path / "ckpt")
    running = RunningJob(
        tmp_path / "first", FSDP, steps=STEPS, standby=0, flags=FLAGS, options=options, config=NO_SNAPSHOTS
    )
    running.wait_for("checkpoint_saved", 90, count=2)
    running.popen.send_signal(signal.SIGTERM)
    check_clean(running.wait(20))
    return published(tmp_path / "ckpt")


@pytest.mark.grid
def test_a_damaged_checkpoint_is_left_out_for_the_one_before_it(tmp_path: Path, reference: References) -> None:
    *_, (version, older), (_, newer) = _launch_that_ends_after_two_checkpoints(tmp_path)
    _damage(newer)
    looked = CliRunner().invoke(checkpoints, [str(tmp_path / "ckpt"), "--json"])
    *_, before, last = json.loads(looked.output)
    assert looked.exit_code == 1 and last["path"] == str(newer) and last["wrong"]
    assert not before["wrong"] and (before["version"], before["ranks"]) == (version, 4)
    options = ["--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "1000", "--resume"]
    job = run_job(tmp_path / "second", FSDP, steps=STEPS, standby=0, flags=FLAGS, options=options, config=NO_SNAPSHOTS)
    (notice,) = job.notices("checkpoint_damaged")
    assert str(newer) in notice["text"] and f"{older} is used instead" in notice["text"]
    check_same(job, reference(FSDP), start=version)


@pytest.mark.grid
def test_where_all_checkpoints_are_damaged_the_job_says_so_and_does_not_begin_again(tmp_path: Path) -> None:
    for _, path in _launch_that_ends_after_two_checkpoints(tmp_path):
        _damage(path)
    options = ["--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "1000", "--resume"]
    job = run_job(tmp_path / "second", FSDP, steps=STEPS, standby=0, flags=FLAGS, options=options, config=NO_SNAPSHOTS)
    assert job.code == 1 and len(job.notices("checkpoint_damaged")) == 2, job.explain()
    assert "without --resume the job starts from scratch" in job.output and not [log for log in job.logs if log.lines]
    check_clean(job)


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        pytest.param(FSDP, None, id="fsdp"),
        pytest.param(DDP, {"snapshots": {"keep": "always"}}, id="ddp-snapshots"),
        pytest.param(DDP, None, id="ddp"),
    ],
)
@pytest.mark.grid  # in every run one of another size resumes (test_elastic.py)
def test_a_fresh_launch_resumes_from_the_checkpoint(
    layout: Layout, config: dict[str, Any] | None, tmp_path: Path, reference: References
) -> None:
    """In another run directory, so there are no snapshots. Where copies are made in every step it is
    written from one of these, and training is not held up."""
    options = _options(tmp_path / "ckpt")
    first = RunningJob(tmp_path / "first", layout, steps=STEPS, standby=0, flags=FLAGS, options=options, config=config)
    saved = first.wait_for("checkpoint_saved", 90)
    assert (saved["k0_s"] > 0) is (layout is DDP and config is None)
    time.sleep(0.3)
    first.popen.send_signal(signal.SIGTERM)
    check_clean(first.wait(20))
    found = newest(tmp_path / "ckpt")
    assert found is not None and found[0] > 0
    options = [*options, "--resume"]
    second = run_job(tmp_path / "second", layout, steps=STEPS, standby=0, flags=FLAGS, options=options, config=config)
    check_same(second, reference(layout), start=found[0])

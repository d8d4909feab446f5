"""Whatever ends a job before its last step writes what the living ranks hold, and ``--resume`` goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.snapshot.files import FOLDER
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

pytestmark = pytest.mark.timeout(400)
SCRIPT = ROOT / "tests" / "scripts" / "few_tensors.py"
STEPS = 16
ALWAYS = {"snapshots": {"keep": "always"}}


def start(run_dir: Path, kind: str, ranks: int, *options: str, pace: float = 0.0, **kwargs: Any) -> RunningJob:
    layout = Layout(kind, "", nproc=ranks)
    flags = [str(STEPS), kind, str(pace)]
    return RunningJob(
        run_dir, layout, standby=0, script=SCRIPT, flags=flags, options=["--log", "all", *options], **kwargs
    )


def whole(path: Path, kind: str, ranks: int) -> Job:
    job = start(path / "whole", kind, ranks).wait()
    assert job.code == 0 and len(job.digests) == ranks, job.explain()
    return job


def gone_on(path: Path, kind: str, ranks: int, **kwargs: Any) -> Job:
    """The next launch, which has gone on from a version and comes to the same end."""
    job = start(path / "run", kind, ranks, "--resume", **kwargs).wait()
    (version,) = job.gone_on_from_snapshots()
    assert f"resumed at step {version} from the snapshots of" in job.output
    assert job.code == 0 and job.digests == whole(path, kind, ranks).digests, job.explain()
    assert f"step={version - 1} " not in job.output, "what an earlier launch has printed is not shown again"
    check_clean(job)
    assert not (path / "run" / FOLDER).exists(), "the job has come to its end"
    return job


@pytest.mark.parametrize(
    ("number", "kind", "ranks"),
    [
        pytest.param(signal.SIGTERM, "mlp", 2, id="term"),
        pytest.param(signal.SIGINT, "norm", 2, id="interrupt-buffers", marks=pytest.mark.grid),
        pytest.param(signal.SIGTERM, "frozen", 4, id="frozen", marks=pytest.mark.grid),
        pytest.param(signal.SIGTERM, "one", 3, id="one-tensor", marks=pytest.mark.grid),
    ],
)
def test_a_ddp_job_that_is_told_to_end_loses_no_step(
    number: signal.Signals, kind: str, ranks: int, tmp_path: Path
) -> None:
    running = start(tmp_path / "run", kind, ranks, pace=100.0)
    running.wait_for_step(5)
    running.popen.send_signal(number)
    ended = running.wait()
    assert ended.code == 1 and "run/snapshots; --run-dir" in ended.output, ended.explain()
    check_clean(ended)
    job = gone_on(tmp_path, kind, ranks)
    assert job.gone_on_from_snapshots()[0] >= 6


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("one", 2, id="one-tensor"),
        pytest.param("mlp", 4, id="as-many-as-ranks", marks=pytest.mark.grid),
        pytest.param("frozen", 4, id="frozen", marks=pytest.mark.grid),
    ],
)
def test_a_rank_without_a_tensor_to_copy_leaves_a_snapshot_too(kind: str, ranks: int, tmp_path: Path) -> None:
    running = start(tmp_path / "run", kind, ranks, pace=100.0, config=ALWAYS)
    running.wait_for_step(5)
    running.popen.kill()
    running.wait()
    gone_on(tmp_path, kind, ranks, config=ALWAYS)


@pytest.mark.grid
def test_a_script_that_fails_in_the_same_step_leaves_what_the_others_hold(tmp_path: Path) -> None:
    """One of them is gone, with its random numbers: they are in its page."""
    running = start(tmp_path / "run", "mlp", 2, env={"FLASHRECOVERY_TEST_BUG": "5"})
    ended = running.wait()
    assert ended.code == 1 and "the state of step 5 " in ended.output, ended.explain()
    job = gone_on(tmp_path, "mlp", 2)
    assert job.gone_on_from_snapshots() == [5]


@pytest.mark.grid
def test_a_rank_that_is_stopped_leaves_what_its_page_has(tmp_path: Path) -> None:
    config = {"timeouts": {"stopped_s": 60.0, "last_save_s": 6.0}}
    running = start(tmp_path / "run", "mlp", 2, pace=100.0, config=config)
    running.wait_for_step(5)
    os.kill(running.ranks()[1], signal.SIGSTOP)
    running.popen.terminate()
    ended = running.wait()
    assert "--resume goes on from there" in ended.output, ended.explain()
    gone_on(tmp_path, "mlp", 2)


@pytest.mark.grid
def test_what_is_asked_for_is_not_quietly_begun_anew(tmp_path: Path) -> None:
    first = start(tmp_path / "run", "mlp", 2, "--resume").wait()
    assert first.code == 0 and "run: starts at step 0" in first.output, first.explain()
    again = start(tmp_path / "run", "mlp", 2, "--resume").wait()
    assert again.code == 1 and f"had come to step {STEPS}, and in" in again.output, again.explain()


@pytest.mark.grid
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_other_signals_end_a_job_in_order(number: signal.Signals, tmp_path: Path) -> None:
    running = start(tmp_path / "run", "mlp", 2, pace=100.0)
    running.wait_for_step(5)
    running.popen.send_signal(number)
    ended = running.wait()
    assert f"stopped by {number.name}" in ended.output and "--resume goes on" in ended.output, ended.explain()
    check_clean(ended)


@pytest.mark.grid
def test_a_script_that_handles_the_signal_ends_by_itself(tmp_path: Path) -> None:
    config = {"timeouts": {"signal_grace_s": 60.0}}
    handles = {"FLASHRECOVERY_TEST_HANDLES": "leave"}
    running = start(tmp_path / "run", "mlp", 2, pace=100.0, config=config, env=handles)
    running.wait_for_step(5)
    running.popen.terminate()
    ended = running.wait()
    assert ended.code == 1 and ended.output.count("saved by the script") == 2, ended.explain()
    assert "all ranks have ended by themselves" in ended.output
    check_clean(ended)


@pytest.mark.grid
def test_a_notice_is_passed_on_and_the_job_goes_on(tmp_path: Path) -> None:
    running = start(tmp_path / "run", "mlp", 2, pace=100.0, env={"FLASHRECOVERY_TEST_HANDLES": "say"})
    running.wait_for_step(5)
    running.popen.send_signal(signal.SIGUSR1)
    job = running.wait()
    assert job.code == 0 and job.output.count(f"handler {int(signal.SIGUSR1)}") == 2, job.explain()
    assert job.digests == whole(tmp_path, "mlp", 2).digests

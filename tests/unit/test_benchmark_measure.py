"""What the recovery benchmark counts, on logs written by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import harness
import recovery
from peers import Peer
from workload import Job

PEER = Peer(name="test", start=lambda job, launch: None, settings="", first=3, whole=4)


def write(job: Job, pid: int, rank: int, steps: Iterable[tuple[int, float]]) -> None:
    lines = "".join(json.dumps({"rank": rank, "step": s, "t": t}) + "\n" for s, t in steps)
    (Path(job.directory) / f"steps.{pid}.jsonl").write_text(lines)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Four ranks have done steps 0..9, one a second; rank 1 dies at 9.5 s in step 10."""
    job = Job(directory=str(tmp_path))
    for rank in range(4):
        write(job, 100 + rank, rank, [(s, float(s)) for s in range(10)])
    job.kill_file.write_text(json.dumps({"t": 9.5, "step": 10}))
    return job


def test_before_the_kill_only_the_step_time_is_known(job: Job) -> None:
    job.kill_file.unlink()
    trial = recovery.measure(PEER, job)
    assert (trial.first, trial.whole, trial.step, trial.warm) == (None, None, 1.0, True)


def test_first_step_and_whole_again_count_different_ranks(job: Job) -> None:
    history = [(s, float(s)) for s in range(10)]
    write(job, 100, 0, [*history, (10, 12.0), (11, 13.0)])
    write(job, 102, 2, [*history, (10, 12.5)])
    assert recovery.measure(PEER, job).first is None
    write(job, 103, 3, [*history, (10, 12.25)])
    assert recovery.measure(PEER, job).first == 3.0
    write(job, 201, 1, [(11, 14.0)])  # the replacement
    trial = recovery.measure(PEER, job)
    assert (trial.first, trial.whole) == (3.0, 4.5)


def test_repeated_and_late_steps_are_no_progress(job: Job) -> None:
    history = [(s, float(s)) for s in range(9)]
    for rank in (0, 2, 3):
        write(job, 100 + rank, rank, [*history, (9, 9.6)])  # finished after the kill, but not newly
        write(job, 300 + rank, rank, [(8, 11.0), (9, 12.0)])  # repeated from a checkpoint
    assert recovery.measure(PEER, job).first is None


def test_a_line_that_is_still_being_written_is_left_out(job: Job) -> None:
    path = Path(job.directory) / "steps.100.jsonl"
    with path.open("a") as f:
        f.write('{"rank": 0, "step": 10,')
    assert [r.step for r in harness.read_records(Path(job.directory)) if r.pid == 100] == list(range(10))
    job.kill_file.write_text('{"t": 9.5')
    assert recovery.measure(PEER, job).first is None


def test_goals_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    good = recovery.Trial(first=0.5, whole=0.5, step=0.1, phases={"replace": 0.3, "redo": 0.2})
    assert recovery.report({"ours": [good] * 3}, imports=2.0)
    assert "The largest phase is replace" in capsys.readouterr().out
    assert not recovery.report({"ours": [good, good, replace(good, first=2.5)]}, imports=2.0)
    assert not recovery.report({"ours": [good, replace(good, first=None)]}, imports=2.0)

"""Whatever ends a job before its last step writes what the living ranks hold, and ``--resume`` goes on from there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.redundancy.checkpoint.published import published
from flashrecovery.snapshot.files import FOLDER, LAST_CHECKPOINT
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_clean

pytestmark = pytest.mark.timeout(900)
SCRIPTS = ROOT / "tests" / "scripts"
STEPS, HELD = 16, 6
"""A job that is asked to end is held in this step, until it has heard it."""
ALWAYS = {"snapshots": {"keep": "always"}}
LONG_S = 300.0
"""For what comes by itself, however busy the machine is."""


def start(run_dir: Path, kind: str, ranks: int, *options: str, pace: float = 0.0, **kwargs: Any) -> RunningJob:
    layout = Layout(kind, "", nproc=ranks)
    flags = [str(STEPS), kind, str(pace)]
    script = SCRIPTS / "few_tensors.py"
    return RunningJob(
        run_dir, layout, standby=0, script=script, flags=flags, options=["--log", "all", *options], **kwargs
    )


def start_elastic(run_dir: Path, script: str, *options: str, flags: Sequence[str] = (), **kwargs: Any) -> RunningJob:
    return RunningJob(
        run_dir,
        Layout("elastic", "", nproc=2),
        standby=0,
        script=SCRIPTS / script,
        flags=["--steps", str(STEPS), *flags],
        options=["--log", "all", "--elastic", "1:2", *options],
        **kwargs,
    )


def end_it(running: RunningJob, number: signal.Signals = signal.SIGTERM) -> Job:
    """Send the signal to the launcher, in a step that ends when that has been heard."""
    running.hold(HELD)
    running.wait_for_step(HELD - 1, LONG_S)
    running.popen.send_signal(number)
    running.wait_for("job_failed", LONG_S)
    running.hold(None)
    return running.wait(LONG_S)


Digests = Callable[[str, int], dict[int, str]]
"""Of a job that nothing has disturbed, by model and number of ranks."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    @cache
    def digests(kind: str, ranks: int) -> dict[int, str]:
        job = start(tmp_path_factory.mktemp("undisturbed") / "run", kind, ranks).wait(LONG_S)
        assert job.code == 0 and len(job.digests) == ranks, job.explain()
        return job.digests

    return digests


def gone_on(path: Path, kind: str, ranks: int, undisturbed: Digests, **kwargs: Any) -> Job:
    """The next launch, which has gone on from a version and comes to the same end."""
    job = start(path / "run", kind, ranks, "--resume", **kwargs).wait(LONG_S)
    (version,) = job.gone_on_from_snapshots()
    assert f"resumed at step {version} from the snapshots of" in job.output
    assert job.code == 0 and job.digests == undisturbed(kind, ranks), job.explain()
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
    number: signal.Signals, kind: str, ranks: int, tmp_path: Path, undisturbed: Digests
) -> None:
    ended = end_it(start(tmp_path / "run", kind, ranks), number)
    assert ended.code == 1 and "run/snapshots; --run-dir" in ended.output, ended.explain()
    check_clean(ended)
    job = gone_on(tmp_path, kind, ranks, undisturbed)
    assert job.gone_on_from_snapshots()[0] >= HELD


def resumed_from(job: Job) -> int:
    """The step of the last checkpoint from which this launch has gone on."""
    (said,) = [notice["text"] for notice in job.notices("resumed")]
    step, _, path = said.removeprefix("resumed at step ").partition(" from checkpoint ")
    assert path.endswith(f"step-{int(step):010d}"), said
    return int(step)


ELASTIC = {
    "ddp": ("elastic.py", signal.SIGTERM, [], {}),
    "fsdp2": ("elastic_fsdp2.py", signal.SIGINT, [], {}),
    "ddp-bug": ("elastic.py", None, [], {"FLASHRECOVERY_TEST_BUG": str(HELD)}),
}


@pytest.mark.parametrize(
    "case", ["ddp", *(pytest.param(name, marks=pytest.mark.grid) for name in ("fsdp2", "ddp-bug"))]
)
def test_an_elastic_job_leaves_a_checkpoint(case: str, tmp_path: Path) -> None:
    script, number, flags, env = ELASTIC[case]
    running = start_elastic(tmp_path / "run", script, flags=flags, env=env)
    ended = running.wait(LONG_S) if number is None else end_it(running, number)
    left = tmp_path / "run" / LAST_CHECKPOINT
    assert ended.code == 1 and f"is in checkpoint {left}" in ended.output, ended.explain()
    check_clean(ended)
    refused = start_elastic(tmp_path / "run", script, flags=flags).wait(LONG_S)
    assert refused.code == 2 and "it would be lost: give --resume" in refused.output, refused.explain()
    job = start_elastic(tmp_path / "run", script, "--resume", flags=flags).wait(LONG_S)
    assert HELD <= resumed_from(job) < STEPS
    other = start_elastic(tmp_path / "whole", script, flags=flags).wait(LONG_S)
    assert job.code == 0 and job.digests == other.digests and len(job.digests) == 2, job.explain()
    check_clean(job)
    assert not left.exists(), "the job has come to its end"


@pytest.mark.grid
@pytest.mark.parametrize("case", ["mlp-term", "mlp-bug", "fsdp-interrupt", "fsdp-bug"])
def test_where_there_is_a_directory_for_checkpoints_a_last_one_is_written(
    case: str, tmp_path: Path, undisturbed: Digests
) -> None:
    """It has also what only a rank that is gone had, and another run directory can go on from it."""
    kind, _, why = case.partition("-")
    saved = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(saved), "--checkpoint-interval", "100000")
    bug = {"FLASHRECOVERY_TEST_BUG": str(HELD)} if why == "bug" else {}
    running = start(tmp_path / "run", kind, 2, *options, env=bug)
    number = signal.SIGINT if why == "interrupt" else signal.SIGTERM
    ended = running.wait(LONG_S) if bug else end_it(running, number)
    ((version, path),) = published(saved)
    assert f"the state of step {version} is in checkpoint {path}" in ended.output, ended.explain()
    check_clean(ended)
    job = start(tmp_path / "other", kind, 2, "--resume", *options).wait(LONG_S)
    assert resumed_from(job) == version >= HELD - 1
    assert job.code == 0 and job.digests == undisturbed(kind, 2), job.explain()
    check_clean(job)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("one", 2, id="one-tensor"),
        pytest.param("mlp", 4, id="as-many-as-ranks", marks=pytest.mark.grid),
        pytest.param("frozen", 4, id="frozen", marks=pytest.mark.grid),
    ],
)
def test_a_rank_without_a_tensor_to_copy_leaves_a_snapshot_too(
    kind: str, ranks: int, tmp_path: Path, undisturbed: Digests
) -> None:
    running = start(tmp_path / "run", kind, ranks, config=ALWAYS)
    running.hold(HELD)
    running.wait_for_step(HELD - 1, LONG_S)
    running.popen.kill()
    running.wait(LONG_S)
    running.hold(None)
    gone_on(tmp_path, kind, ranks, undisturbed, config=ALWAYS)


@pytest.mark.grid
def test_a_script_that_fails_in_the_same_step_leaves_what_the_others_hold(tmp_path: Path, undisturbed: Digests) -> None:
    """One of them is gone, with its random numbers: they are in its page."""
    running = start(tmp_path / "run", "mlp", 2, env={"FLASHRECOVERY_TEST_BUG": "5"})
    ended = running.wait(LONG_S)
    assert ended.code == 1 and "the state of step 5 " in ended.output, ended.explain()
    job = gone_on(tmp_path, "mlp", 2, undisturbed)
    assert job.gone_on_from_snapshots() == [5]


@pytest.mark.grid
def test_a_rank_that_is_stopped_leaves_what_its_page_has(tmp_path: Path, undisturbed: Digests) -> None:
    config = {"timeouts": {"stopped_s": 60.0, "last_save_s": 6.0}}
    running = start(tmp_path / "run", "mlp", 2, pace=100.0, config=config)
    running.wait_for_step(5, LONG_S)
    os.kill(running.ranks()[1], signal.SIGSTOP)
    running.popen.terminate()
    ended = running.wait(LONG_S)
    assert "--resume goes on from there" in ended.output, ended.explain()
    gone_on(tmp_path, "mlp", 2, undisturbed)


@pytest.mark.grid
def test_what_is_asked_for_is_not_quietly_begun_again(tmp_path: Path) -> None:
    first = start(tmp_path / "run", "mlp", 2, "--resume").wait(LONG_S)
    assert first.code == 0 and "run: starts at step 0" in first.output, first.explain()
    again = start(tmp_path / "run", "mlp", 2, "--resume").wait(LONG_S)
    assert again.code == 1 and f"had come to step {STEPS}, and in" in again.output, again.explain()


@pytest.mark.grid
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_other_signals_end_a_job_in_order(number: signal.Signals, tmp_path: Path) -> None:
    ended = end_it(start(tmp_path / "run", "mlp", 2), number)
    assert f"stopped by {number.name}" in ended.output and "--resume goes on" in ended.output, ended.explain()
    check_clean(ended)


def signal_all(running: RunningJob, number: signal.Signals) -> None:
    """Send it to the launcher, in a step that ends when the ranks have handled it."""
    running.hold(HELD)
    running.wait_for_step(HELD - 1, LONG_S)
    running.popen.send_signal(number)
    deadline = time.monotonic() + LONG_S
    while sum(f"handler {int(number)}" in log.read_text() for log in running.logs()) < 2:
        assert time.monotonic() < deadline and running.popen.poll() is None, running.wait(1).explain()
        time.sleep(0.02)
    running.hold(None)


@pytest.mark.grid
def test_a_script_that_handles_the_signal_ends_by_itself(tmp_path: Path) -> None:
    config = {"timeouts": {"signal_grace_s": 60.0}}
    handles = {"FLASHRECOVERY_TEST_HANDLES": "leave"}
    running = start(tmp_path / "run", "mlp", 2, config=config, env=handles)
    signal_all(running, signal.SIGTERM)
    ended = running.wait(LONG_S)
    assert ended.code == 1 and ended.output.count("saved by the script") == 2, ended.explain()
    assert "all ranks have ended by themselves" in ended.output
    check_clean(ended)


@pytest.mark.grid
def test_a_notice_is_passed_on_and_the_job_goes_on(tmp_path: Path, undisturbed: Digests) -> None:
    running = start(tmp_path / "run", "mlp", 2, env={"FLASHRECOVERY_TEST_HANDLES": "say"})
    signal_all(running, signal.SIGUSR1)
    job = running.wait(LONG_S)
    assert job.code == 0 and job.output.count(f"handler {int(signal.SIGUSR1)}") == 2, job.explain()
    assert job.digests == undisturbed("mlp", 2)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "launcher"),
        (signal.SIGUSR1, "launcher"),
        pytest.param(signal.SIGUSR1, "rank", marks=pytest.mark.grid),
        pytest.param(signal.SIGUSR2, "loader", marks=pytest.mark.grid),
        pytest.param(signal.SIGTERM, "loader", marks=pytest.mark.grid),
        pytest.param(0, "file", marks=pytest.mark.grid),
    ],
)
def test_a_script_asks_whether_its_node_leaves(number: int, whom: str, tmp_path: Path) -> None:
    """All ranks leave in one step, since they agree on it. ``rank`` and ``loader``: rank 1 and one of its loader's
    workers, before anybody else is told."""
    notice = tmp_path / "preempted"
    config = {"timeouts": {"signal_grace_s": 60.0}, "notice": {"file": str(notice), "poll_s": 0.1}}
    asks = {"FLASHRECOVERY_TEST_HANDLES": str(HELD)}
    running = start(tmp_path / "run", "loader", 2, config=config, env=asks)
    running.wait_for_step(HELD - 1, LONG_S)
    rank = running.ranks()[1]
    if whom == "file":
        notice.touch()
    else:
        os.kill({"launcher": running.popen.pid, "rank": rank, "loader": children_of(rank)[0]}[whom], number)
    job = running.wait(LONG_S)
    assert job.output.count(f"leaving in step {HELD}") == 2, job.explain()
    told_to_end = number == signal.SIGTERM and whom == "launcher"
    assert job.code == told_to_end, job.explain()
    assert ("all ranks have ended by themselves" in job.output) == told_to_end
    assert not job.of("failure_detected")
    check_clean(job)


@pytest.mark.parametrize(
    "order",
    [
        "ranks, launcher",
        *(
            pytest.param(order, marks=pytest.mark.grid)
            for order in ("launcher, ranks", "ranks", "loaders, ranks, launcher")
        ),
    ],
)
def test_a_scheduler_signals_all_processes(order: str, tmp_path: Path, undisturbed: Digests) -> None:
    """In any order: loader workers, ranks and the launcher get SIGTERM, and nothing is lost."""
    kind = "loader" if "loaders" in order else "mlp"
    running = start(tmp_path / "run", kind, 2)
    running.hold(HELD)
    running.wait_for_step(HELD - 1, LONG_S)
    ranks = [*running.ranks().values()]
    loaders = [child for rank in ranks for child in children_of(rank)]
    assert len(loaders) == (4 if kind == "loader" else 0)
    pids = {"loaders": loaders, "ranks": ranks, "launcher": [running.popen.pid]}
    for whom in order.split(", "):
        for pid in pids[whom]:
            os.kill(pid, signal.SIGTERM)
    running.wait_for("job_failed", LONG_S)
    running.hold(None)
    ended = running.wait(LONG_S)
    assert ended.code == 1 and "run/snapshots; --run-dir" in ended.output, ended.explain()
    assert not ended.of("failure_detected"), ended.explain()
    check_clean(ended)
    job = gone_on(tmp_path, kind, 2, undisturbed)
    assert job.gone_on_from_snapshots()[0] >= HELD


@pytest.mark.grid
def test_one_rank_that_is_told_to_end_is_replaced(tmp_path: Path, undisturbed: Digests) -> None:
    """Someone means this rank, and not the job."""
    running = start(tmp_path / "run", "mlp", 2)
    running.hold(HELD)
    running.wait_for_step(HELD - 1, LONG_S)
    os.kill(running.ranks()[1], signal.SIGTERM)
    found = running.wait_for("failure_detected", LONG_S)
    assert (found["rank"], found["kind"], found["evidence"]) == (1, "killed", "killed by SIGTERM")
    running.hold(None)
    job = running.wait(LONG_S)
    assert job.code == 0 and job.digests == undisturbed("mlp", 2), job.explain()
    check_clean(job)

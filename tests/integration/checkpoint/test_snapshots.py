"""State outlives every process: all workers at once, the launcher, the snapshot process itself. Bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from flashrecovery.cli.checkpoints import checkpoints
from flashrecovery.snapshot.files import FOLDER, listed
from tests.support.jobs import DDP, FSDP, HSDP, Job, Layout, References, RunningJob, check_clean, check_same, run_job

STEPS = 40
ALWAYS = {"snapshots": {"keep": "always"}}
KEPT = pytest.mark.parametrize(
    ("layout", "config"),
    [pytest.param(FSDP, {}, id="fsdp"), pytest.param(DDP, ALWAYS, id="ddp", marks=pytest.mark.grid)],
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    return References(
        lambda: tmp_path_factory.mktemp("reference"),
        lambda folder, layout: run_job(folder, layout, steps=STEPS, standby=0),
    )


def start(run_dir: Path, layout: Layout, config: dict[str, Any], *options: str, **kwargs: Any) -> RunningJob:
    return RunningJob(run_dir, layout, steps=STEPS, standby=0, config=config or None, options=options, **kwargs)


def snapshot_process(job: RunningJob) -> psutil.Process:
    children = psutil.Process(job.popen.pid).children()
    (found,) = [p for p in children if "flashrecovery.snapshot.process" in command_of(p)]
    return found


def command_of(process: psutil.Process) -> list[str]:
    """Empty if it has just ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def end_of(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def told_to_end(tmp_path: Path) -> Job:
    """A launch that has written its snapshots to disk."""
    running = start(tmp_path / "run", FSDP, {})
    running.wait_for_step(8)
    running.popen.terminate()
    return running.wait()


def kill_everything(job: RunningJob) -> None:
    """The launcher and all ranks at once; what else they have started ends with them."""
    pids = [job.popen.pid, *job.ranks().values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.popen.wait()


# -- all processes of the ranks ------------------------------------------------------------------


@KEPT
def test_all_ranks_die_at_once(
    layout: Layout, config: dict[str, Any], tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """No process lives that holds any state, there is no checkpoint, and not a step is lost."""
    running = start(tmp_path / "run", layout, config)
    for step in (5, 15):
        running.wait_for_step(step)
        running.kill(0, 1, 2, 3)
        running.wait_for("recovery_finished", count=1 + (step == 15))
    job = running.wait()
    check_same(job, reference(layout))
    assert {v for e in job.of("recovery_finished") for v in e["victims"]} == {0, 1, 2, 3}, job.explain()


OFTEN = {"snapshots": {"max_age_s": 0.4}}
ONCE = {"snapshots": {"max_age_s": 1000.0}}
"""At the start."""


def check_gone_back(job: Job, reference: Job) -> int:
    """All steps after a snapshot were done again, and alike. Returns the first of them."""
    assert job.code == 0 and job.digests == reference.digests, job.explain()
    again = job.of("recovery_finished")[-1]["resume_step"]
    assert 0 < again <= max(e["step"] for e in job.of("failure_detected")), job.explain()
    check_clean(job)
    return int(again)


@pytest.mark.parametrize("layout", [DDP, pytest.param(HSDP, marks=pytest.mark.grid)], ids=lambda one: one.name)
def test_all_replicas_die_at_once(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """No step makes copies, and snapshots are taken from time to time."""
    running = start(tmp_path / "run", layout, OFTEN, flags=["--step-time", "100"])
    for count, step in enumerate((8, 30), 1):
        running.wait_for_step(step)
        running.kill(0, 1, 2, 3)
        running.wait_for("recovery_finished", count=count)
    job = running.wait()
    assert check_gone_back(job, reference(layout)) > job.of("recovery_finished")[0]["resume_step"], job.explain()


@pytest.mark.grid
def test_replicas_and_the_launcher_die_at_once(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    running = start(tmp_path / "run", DDP, OFTEN, flags=["--step-time", "100"])
    running.wait_for_step(20)
    kill_everything(running)
    running.wait()
    job = start(tmp_path / "run", DDP, OFTEN, "--resume").wait()
    (version,) = job.gone_on_from_snapshots()
    assert 0 < version <= 30 and job.code == 0 and job.digests == reference(DDP).digests, job.explain()
    check_clean(job)


@pytest.mark.grid
def test_all_replicas_of_a_shard_die_at_once(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """The others have gone on, and cannot go back so far: the job ends, and its next launch goes on."""
    running = start(tmp_path / "run", HSDP, ONCE, flags=["--step-time", "200"])
    running.wait_for_step(20)
    running.kill(0, 2)
    job = running.wait()
    assert job.code == 1 and "--resume goes on from there" in job.output, job.explain()
    job = start(tmp_path / "run", HSDP, ONCE, "--resume").wait()
    (version,) = job.gone_on_from_snapshots()
    assert 0 < version <= 30 and job.code == 0 and job.digests == reference(HSDP).digests, job.explain()


def test_a_rank_and_the_one_that_keeps_its_copies_die_at_once(
    tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    running = start(tmp_path / "run", FSDP, {})
    running.wait_for_step(5)
    running.kill(1, 2)
    check_same(running.wait(), reference(FSDP))


@pytest.mark.grid
def test_ranks_die_before_their_copies_are_whole_again(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """A rank dies at its first hand-out after a recovery, together with the one whose copies it kept."""
    inject = ["rank=2,fault=sigkill,at=forward,step=6", "rank=2,fault=sigkill,at=between,step=6"]
    inject += ["rank=1,fault=sigkill,at=between,step=7"]
    job = run_job(tmp_path / "run", FSDP, steps=STEPS, standby=0, inject=inject)
    check_same(job, reference(FSDP))
    assert len(job.notices("fault_fired")) == 3, job.explain()


@pytest.mark.grid
def test_all_ranks_die_in_their_first_step(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """Nothing whole is held yet; only that step is lost."""
    running = start(tmp_path / "run", FSDP, {}, flags=["--step-time", "100"])
    running.wait_for("job_started")
    running.kill(0, 1, 2, 3)
    job = running.wait()
    assert job.code == 0 and job.digests == reference(FSDP).digests, job.explain()
    check_clean(job)


# -- the launcher ------------------------------------------------------------------------------------


@pytest.mark.grid
@KEPT
def test_everything_dies_and_the_next_launch_goes_on(
    layout: Layout, config: dict[str, Any], tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """No checkpoint, and nothing on disk: the snapshot process has what is needed."""
    running = start(tmp_path / "run", layout, config)
    running.wait_for_step(8)
    holder = snapshot_process(running)
    kill_everything(running)
    running.wait()
    assert holder.is_running() and not listed(tmp_path / "run" / FOLDER)
    job = start(tmp_path / "run", layout, config, "--resume").wait()
    (version,) = job.gone_on_from_snapshots()
    assert version >= 8
    check_same(job, reference(layout), launches=2)
    end_of(holder)


def test_a_job_that_is_told_to_end_loses_no_step(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    ended = told_to_end(tmp_path)
    assert ended.code != 0 and "--resume goes on from there" in ended.output
    check_clean(ended)
    assert {saved.rank for saved in listed(tmp_path / "run" / FOLDER)} == {0, 1, 2, 3}
    looked = CliRunner().invoke(checkpoints, [str(tmp_path / "run"), "--json"])
    whole = [saved["version"] for saved in json.loads(looked.output) if not saved["wrong"]]

    again = start(tmp_path / "run", FSDP, {}).wait()
    assert again.code != 0 and "has snapshots, and it would be lost: give --resume" in again.output
    job = start(tmp_path / "run", FSDP, {}, "--resume").wait()
    (version,) = job.gone_on_from_snapshots()
    assert version >= 8 and version == max(whole)
    check_same(job, reference(FSDP), launches=2)


@pytest.mark.grid
def test_nobody_comes_back_in_time(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """Then the snapshot process writes what it has, and ends."""
    config = {"snapshots": {"linger_s": 0.3}}
    running = start(tmp_path / "run", FSDP, config)
    running.wait_for_step(8)
    holder = snapshot_process(running)
    kill_everything(running)
    end_of(holder)
    check_clean(running.wait())
    job = start(tmp_path / "run", FSDP, config, "--resume").wait()
    assert job.gone_on_from_snapshots()
    check_same(job, reference(FSDP), launches=2)


@pytest.mark.grid
def test_what_is_damaged_on_disk_is_not_used(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """One bit of the newest version of one rank: the job goes on from the version before, if that is still whole, and
    otherwise says what is missing. It never starts again by itself."""
    told_to_end(tmp_path)
    folder = tmp_path / "run" / FOLDER
    newest = max((s for s in listed(folder) if s.rank == 2 and s.name.startswith("own")), key=lambda s: s.version)
    content = bytearray((folder / newest.file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / newest.file).write_bytes(content)
    job = start(tmp_path / "run", FSDP, {}, "--resume").wait()
    assert f"{newest.file} is damaged" in job.output
    if job.code == 0:
        assert job.gone_on_from_snapshots() == [newest.version - 1]
        check_same(job, reference(FSDP), launches=2)
    else:
        assert "there are snapshots of an earlier launch, but no version exists for every shard" in job.output
        assert not [log for log in job.logs if log.lines and log.lines[-1][0] == 0], "it has begun again"
        check_clean(job)


@pytest.mark.grid
def test_a_launch_with_another_number_of_ranks_does_not_take_them(tmp_path: Path) -> None:
    told_to_end(tmp_path)
    smaller = Layout("fsdp-2", FSDP.script, nproc=2)
    job = start(tmp_path / "run", smaller, {}, "--resume").wait()
    assert job.code != 0 and "of a job of 4 ranks, and this one has 2" in job.output, job.explain()
    assert len(listed(tmp_path / "run" / FOLDER)) >= 4, "they are still there"


# -- the snapshot process ----------------------------------------------------------------------------


@KEPT
def test_the_snapshot_process_dies(
    layout: Layout, config: dict[str, Any], tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """Training goes on; a new one is given what there is; then all ranks die."""
    running = start(tmp_path / "run", layout, config)
    running.wait_for_step(5)
    before = snapshot_process(running)
    before.kill()
    deadline = time.monotonic() + 20
    while not [e for e in running.events() if e["event"] == "notice" and "was restarted" in e["text"]]:
        assert time.monotonic() < deadline, running.wait(1).explain()
        time.sleep(0.02)
    running.wait_for_step(running.newest_step() + 3)
    running.kill(0, 1, 2, 3)
    job = running.wait()
    check_same(job, reference(layout))
    assert job.of("recovery_finished")
    assert snapshot_is_gone(before)


def snapshot_is_gone(process: psutil.Process) -> bool:
    return not process.is_running()


def test_nothing_is_kept_where_nobody_has_asked(tmp_path: Path) -> None:
    running = start(tmp_path / "run", DDP, {"snapshots": {"keep": "never"}})
    running.wait_for("job_started")
    with pytest.raises(ValueError, match="not enough values"):
        snapshot_process(running)
    running.kill(0, 1, 2, 3)
    job = running.wait()
    assert job.code != 0 or job.notices("start_again"), job.explain()
    check_clean(job)


@pytest.mark.grid
@pytest.mark.parametrize("attempt", range(20))
@pytest.mark.parametrize(("layout", "config"), [(FSDP, {}), (HSDP, ALWAYS), (DDP, ALWAYS)], ids=["fsdp", "hsdp", "ddp"])
def test_all_ranks_die_at_any_moment(
    layout: Layout, config: dict[str, Any], attempt: int, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    running = start(tmp_path / "run", layout, config)
    running.wait_for_step(2 + attempt)
    time.sleep(0.017 * attempt)
    running.kill(0, 1, 2, 3)
    check_same(running.wait(), reference(layout))

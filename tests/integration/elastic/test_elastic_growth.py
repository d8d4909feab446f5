"""Elastic jobs that have become smaller grow again: as a job that was resized by command at the same steps, bit for
bit, which goes on as a job that was started in that size from that step's state. And processes that do not come, or die
on their way in, disturb no other process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import (
    LONG,
    Course,
    changes,
    check_goes_on_alike,
    check_steps_alike,
    command,
    inject,
    long_flags,
    never,
    often,
    resized_by_command,
    sizes_of,
    start,
)
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

pytestmark = pytest.mark.timeout(300)
AT, BACK = 8, 30
Resized = Callable[[Sequence[tuple[int, int]]], Job]


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    """The job that is resized by command, undisturbed. Each is made once."""
    made: dict[tuple[tuple[int, int], ...], Job] = {}

    def job(sizes: Sequence[tuple[int, int]]) -> Job:
        key = tuple(sizes)
        if key not in made:
            made[key] = resized_by_command(tmp_path_factory.mktemp("resized") / "job", sizes)
        return made[key]

    return job


def check_as_commanded(job: Job, resized: Resized) -> None:
    """In all its sizes the job went the way of one that was resized by command at the same steps."""
    assert job.code == 0, job.explain()
    sizes = sizes_of(job)
    other = resized(sizes)
    for (step, size), (until, _) in zip(sizes, [*sizes[1:], (LONG, 0)], strict=True):
        check_steps_alike(job, other, step, until, size)
    check_goes_on_alike(job, other, *sizes[-1], LONG)
    check_clean(job)


def shrunk_by(running: RunningJob, *ranks: int) -> None:
    """These ranks are killed and have left."""
    running.wait_for_step(AT)
    running.kill(*ranks)
    running.wait_for("recovery_finished")


def grown(job: Job) -> dict[str, Any]:
    """The recovery in which ranks came in; nothing had failed."""
    (event,) = [e for e in job.of("recovery_finished") if e["cause"] == "resize" and not e["left"]]
    assert event["victims"] == [], job.explain()
    return event


@pytest.mark.parametrize("victims", often([(0,), (1,), (3,), (0, 2)], ()))
def test_killed_and_back(victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    running = start(tmp_path / "run", never(), *long_flags())
    shrunk_by(running, *victims)
    assert command(running, 4, BACK) == ""
    job = running.wait()
    assert [change.ranks for change in changes(job)][-1] == (0, 1, 2, 3), job.explain()
    assert changes(job)[-1].step >= BACK, job.explain()  # later if it was not there in time
    assert job.of("job_resized")[-1]["came"] == list(victims), job.explain()
    assert len(job.of("failure_detected")) == len(victims), job.explain()
    assert grown(job)["total_s"] < 2.0, job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_as_soon_as_they_are_there(tmp_path: Path, resized: Resized) -> None:
    """Without a step given. Training goes on meanwhile."""
    running = start(tmp_path / "run", never(1), *long_flags())
    shrunk_by(running, 1, 2, 3)
    before = running.newest_step()
    assert command(running, 4) == ""
    job = running.wait()
    (_, back) = changes(job)
    assert back.ranks == (0, 1, 2, 3) and back.step > before + 2, job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_by_command_alone_and_again(tmp_path: Path, resized: Resized) -> None:
    """4 -> 2 -> 4 -> 3 by command; the standby is taken for one of those that come."""
    running = start(tmp_path / "run", {"elastic": {"min": 1, "max": 4}}, *long_flags(), standby=1)
    running.wait_for("job_started")
    assert command(running, 2, AT) == ""
    running.wait_for("recovery_finished")
    assert command(running, 4, BACK) == ""
    at = running.wait_for("job_resized", count=2)["step"]
    running.wait_for("recovery_finished", count=2)
    assert command(running, 3, at + 8) == ""
    job = running.wait()
    assert [c.ranks for c in changes(job)] == [(0, 1), (0, 1, 2, 3), (0, 1, 2)], job.explain()
    assert at >= BACK and [c.step for c in changes(job)] == [AT, at, at + 8], job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_one_that_has_come_dies_and_is_replaced(tmp_path: Path, resized: Resized) -> None:
    """Later, as any other."""
    running = start(tmp_path / "run", {"elastic": {"min": 2, "max": 4}}, *long_flags(150))
    running.wait_for_step(AT)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    assert command(running, 4, BACK) == ""
    at = running.wait_for("job_resized", count=2)["step"]
    inject(running, rank=1, at="backward", step=at + 3)
    inject(running, rank=3, at="forward", step=at + 7)
    job = running.wait()
    check_fired(job, 2)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[], [], [1], [3]], job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_plain_modules(tmp_path: Path) -> None:
    """The script sums the gradients itself."""
    jobs = []
    for folder in ("one", "two"):
        running = start(tmp_path / folder, never(), *long_flags(), "--mode", "plain")
        if folder == "one":
            running.wait_for("job_started")
            assert command(running, 3, AT + 1) == ""
            running.wait_for("recovery_finished")
        else:
            shrunk_by(running, 3)
        assert command(running, 4, BACK) == ""
        jobs.append(running.wait())
    assert [c.ranks for c in changes(jobs[0])] == [(0, 1, 2), (0, 1, 2, 3)], jobs[0].explain()
    if changes(jobs[0]) == changes(jobs[1]):  # else one of the ranks was late
        check_goes_on_alike(jobs[0], jobs[1], BACK, 4, LONG)
    for job in jobs:
        assert job.code == 0 and len({*Course.of(job).ends.values()}) == 1, job.explain()
        check_clean(job)


# -- not there ----------------------------------------------------------------------------------------

SAID = {
    "die": "killed",
    "raise": "ValueError: this process does not come",
    "exit": "its script has ended before a first step",
    "hang": "it has not come to its first step within 3 s",
    "other-seed": "its batches are",
}


@pytest.mark.parametrize("how", often(SAID, ()))
def test_one_that_does_not_come(how: str, tmp_path: Path, resized: Resized) -> None:
    config = never(replacement_s=3.0, fence_s=1.0) if how == "hang" else None
    running = start(tmp_path / "run", config, *long_flags(200 if how == "hang" else 100), "--joining", how)
    shrunk_by(running, 2)
    assert command(running, 4) == ""
    job = running.wait()
    (notice,) = job.notices("joining_process_given_up")
    assert SAID[how] in notice["text"] and notice["rank"] == 2, job.explain()
    assert len(job.of("job_resized")) == len(job.of("recovery_finished")) == 1, job.explain()
    assert len(job.of("failure_detected")) == 1, job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_one_that_is_killed_as_soon_as_it_has_its_rank(tmp_path: Path, resized: Resized) -> None:
    """Asked for again, it comes."""
    running = start(tmp_path / "run", None, *long_flags(), inject=["rank=3,fault=sigkill,at=recovery:replacing"])
    running.wait_for_step(AT)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    assert command(running, 4, BACK) == ""
    while not any(e["kind"] == "joining_process_given_up" for e in running.events() if e["event"] == "notice"):
        assert running.popen.poll() is None
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert changes(job)[-1].ranks == (0, 1, 2, 3), job.explain()
    check_as_commanded(job, resized)


# -- on the way in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", often(("regrouping", "restoring", "verifying"), ()))
def test_the_joining_process_dies_while_it_comes_in(state: str, tmp_path: Path, resized: Resized) -> None:
    """It has left again before it has taken a step."""
    faults = [f"rank=3,fault=sigkill,at=recovery:{state}"]  # one that leaves by command does not come to this state
    running = start(tmp_path / "run", None, *long_flags(), inject=faults)
    running.wait_for_step(AT)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert [c.ranks for c in changes(job)][-1] == (0, 1, 2), job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_dies_while_one_comes_in(victim: int, state: str, tmp_path: Path, resized: Resized) -> None:
    running = start(tmp_path / "run", None, *long_flags())
    running.wait_for_step(AT)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    inject(running, rank=victim, at=f"recovery:{state}")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert {*changes(job)[-1].ranks} == {0, 1, 2, 3} - {victim}, job.explain()
    check_as_commanded(job, resized)


@pytest.mark.parametrize("replace", often(("never", "auto"), ()))
def test_a_member_dies_while_one_is_built_up(replace: str, tmp_path: Path, resized: Resized) -> None:
    """An ordinary recovery; a rank that is on the way comes in all the same."""
    config = {"elastic": {"min": 2, "max": 4, "replace": replace}}
    running = start(tmp_path / "run", config, *long_flags(), inject=[f"rank=0,fault=sigkill,at=backward,step={AT + 6}"])
    running.wait_for_step(AT)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished")
    assert command(running, 4, BACK) == ""
    job = running.wait()
    check_fired(job)
    assert changes(job)[-1].ranks == ((1, 2, 3) if replace == "never" else (0, 1, 2, 3)), job.explain()
    check_as_commanded(job, resized)


@pytest.mark.grid
def test_the_job_ends_while_one_is_built_up(tmp_path: Path) -> None:
    running = start(tmp_path / "run", None, *long_flags(), "--joining", "hang")
    shrunk_by(running, 1)
    assert command(running, 4) == ""
    job = running.wait()
    assert job.code == 0 and job.notices("joining_processes"), job.explain()
    assert len(job.of("job_resized")) == 1, job.explain()
    check_clean(job)


# -- refused ------------------------------------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    running = start(tmp_path / "run", None, *long_flags(), "--joining", "hang")
    shrunk_by(running, 1)
    assert "4 at most is allowed" in command(running, 5)
    assert "has begun already" in command(running, 4, 1)
    assert command(running, 4) == ""
    assert "rank 1 is on the way in; --to 3 calls that off" in command(running, 2)
    assert command(running, 3) == ""
    assert command(running, 2) == ""
    job = running.wait()
    assert [len(c.ranks) for c in changes(job)] == [3, 2] and job.code == 0, job.explain()
    check_clean(job)

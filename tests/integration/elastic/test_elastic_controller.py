"""The controller dies in the middle of a change of an elastic job's size, and another one is started. That one knows
nothing of what was under way: the job goes on as one that was resized by command, bit for bit, or says why it ends.

A rank stands still (SIGSTOP) in a state of the recovery, so that the controller is killed there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import elastic, elastic_fsdp2, elastic_sharded
from tests.support.controllers import WithController
from tests.support.elastic import changes, commanded
from tests.support.jobs import Job, check_clean

pytestmark = [pytest.mark.timeout(300), pytest.mark.grid]
SCRIPTS = {"ddp": elastic.SCRIPT, "fsdp2": elastic_fsdp2.SCRIPT}
NEVER = {"elastic": {"min": 1, "max": 4, "replace": "never"}}
AUTO = {"elastic": {"min": 1, "max": 4}}


def stands(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(true: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_as_commanded(kind: str, job: Job, folder: Path) -> None:
    """From the change on, it is the job that was resized by command at that step."""
    (change,) = changes(job)
    assert job.code == 0 and change.ranks == (0, 1, 2), job.explain()
    sharded = kind == "fsdp2"
    other = commanded(folder, change.step, 3, script=SCRIPTS[kind], sharded=sharded, started=False)
    alike = elastic_fsdp2.check_goes_on_alike if sharded else elastic.check_goes_on_alike
    alike(job, other, change.step, 3)
    check_clean(job)


MOMENTS = ["quiescing", "regrouping", "restoring", "reshaping", "resuming"]


@pytest.mark.parametrize(
    ("kind", "moment"),
    [(kind, moment) for kind in SCRIPTS for moment in MOMENTS if (kind, moment) != ("ddp", "reshaping")],
)
def test_amid_a_loss(kind: str, moment: str, tmp_path: Path) -> None:
    """Rank 3 is lost, rank 1 stands still in this state of the recovery, and the controller dies."""
    job = WithController(tmp_path / "job", SCRIPTS[kind], NEVER)
    job.wait_for("job_started")
    job.wait_for_step(2)
    stopped = job.pid(1)
    job.inject(1, f"recovery:{moment}", fault="sigstop")
    os.kill(job.pid(3), signal.SIGKILL)
    until(lambda: stands(stopped))
    job.kill()
    os.kill(stopped, signal.SIGCONT)
    time.sleep(0.3)
    job.begin()
    ended = job.result()
    assert ended.notices("taken_over"), ended.explain()
    check_as_commanded(kind, ended, tmp_path / "reference")


def test_a_command_is_forgotten(tmp_path: Path) -> None:
    """The job goes on in the size that it has, and a later command is carried out."""
    job = WithController(tmp_path / "job", SCRIPTS["ddp"], AUTO)
    job.wait_for("job_started")
    assert job.command(2, 8) == ""
    job.kill()
    job.begin()
    job.wait_for_step(9)
    assert job.command(3) == ""
    ended = job.result()
    assert [e["replicas"] for e in ended.of("job_resized")] == [3], ended.explain()
    assert not ended.of("failure_detected"), ended.explain()
    check_as_commanded("ddp", ended, tmp_path / "reference")


def test_who_is_on_the_way_is_ended(tmp_path: Path) -> None:
    """Of a growth that another controller has begun nothing is left, and it can be commanded again."""
    job = WithController(tmp_path / "job", SCRIPTS["ddp"], NEVER, "--step-time", "400")
    job.wait_for("job_started")
    job.wait_for_step(1)
    os.kill(job.pid(3), signal.SIGKILL)
    job.wait_for("recovery_finished")
    assert job.command(4) == ""
    job.kill()
    job.begin()
    ended = job.result()
    assert ended.notices("taken_over"), ended.explain()
    check_as_commanded("ddp", ended, tmp_path / "reference")


@pytest.mark.parametrize("kind", [elastic_sharded.FSDP2, elastic_sharded.zero(2)], ids=lambda kind: kind.name)
def test_a_rank_is_lost_long_after_it(kind: elastic_sharded.Kind, tmp_path: Path) -> None:
    """The job has changed its size, and its controller dies while all train. The next one knows what each rank has in
    the present size, also of one that dies before it has been stopped."""
    flags = ("--steps", str(elastic_sharded.END), *kind.flags)
    job = WithController(tmp_path / "job", kind.script, NEVER, *flags)
    job.wait_for("job_started")
    job.wait_for_step(3)
    os.kill(job.pid(3), signal.SIGKILL)
    job.wait_for("recovery_finished")
    first = max(step for step, _, _ in job.course.losses)
    job.wait_for_step(first + 3)
    job.kill()
    job.begin()
    job.wait_for_step(first + 8)
    os.kill(job.pid(1), signal.SIGKILL)
    ended = job.result()
    assert ended.notices("taken_over") and len(ended.of("job_resized")) == 2, ended.explain()
    elastic_sharded.check_as_commanded(
        kind, ended, lambda kind, sizes: elastic_sharded.resized_by_command(kind, tmp_path / "reference", sizes)
    )

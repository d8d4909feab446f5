"""The controller dies in the middle of a change of an elastic job's size, and another one is started. That one knows
nothing of what was under way: the job goes on as one that was resized by command, bit for bit, or says why it ends.

A rank stands still (SIGSTOP) in a state of the recovery, so that the controller is killed there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_controller_away import TOKEN, controller
from tests.support import elastic, elastic_divided, elastic_fsdp2
from tests.support.elastic import STEPS, Course, changes, command, commanded, inject
from tests.support.jobs import Job, Layout, RunningJob, check_clean, read_events

pytestmark = [pytest.mark.timeout(300), pytest.mark.grid]
SCRIPTS = {"ddp": elastic.SCRIPT, "fsdp2": elastic_fsdp2.SCRIPT}
NEVER = {"elastic": {"min": 1, "max": 4, "replace": "never"}}
AUTO = {"elastic": {"min": 1, "max": 4}}


class WithController:
    """A job on this host, and its controller, which is a process of its own."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        config: dict[str, Any],
        *flags: str,
        nproc: int = 4,
        env: Mapping[str, str] | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        folder.mkdir(exist_ok=True)
        self._nproc = nproc
        self._known = folder / "controller"
        self.job = RunningJob(
            folder / "run",
            Layout("elastic", "", nproc=nproc),
            standby=0,
            config=config,
            script=script,
            flags=["--steps", str(STEPS), "--step-time", "100", *flags],
            options=["--no-embed-controller", "--controller", self._address],
            env={**TOKEN, **(env or {})},
        )
        self.begin()
        # commands and faults go to the controller, whose run directory is its own
        self._tools = RunningJob.__new__(RunningJob)
        self._tools.run_dir, self._tools.popen = self._known, self.job.popen

    def begin(self) -> None:
        self._running = controller(self._known, self._address, self._nproc)
        self._process = self._running.__enter__()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        self._running.__exit__(None, None, None)

    def wait_for(self, event: str, count: int = 1, **having: Any) -> dict[str, Any]:
        return self._tools.wait_for(event, 60, count, **having)

    def events(self) -> list[dict[str, Any]]:
        return self._tools.events()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while max((s for s, _, _ in self.course.losses), default=0) < step:
            assert time.monotonic() < deadline, self.job.wait().explain()
            time.sleep(0.02)

    @property
    def course(self) -> Course:
        return Course.of(self.job)  # type: ignore[arg-type]  # it looks at the logs only

    def command(self, replicas: int, step: int | None = None) -> str:
        return command(self._tools, replicas, step)

    def inject(self, rank: int, at: str, step: int | None = None, fault: str = "sigkill") -> None:
        inject(self._tools, rank=rank, at=at, step=step, fault=fault)

    def pid(self, rank: int) -> int:
        table = json.loads((self._known / "ranktable.json").read_text())
        return int(next(r["pid"] for r in table["ranks"] if r["rank"] == rank))

    def result(self) -> Job:
        ended = self.job.wait(120)
        self.end()
        ended.events = read_events(self._known)
        return ended


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
    divided = kind == "fsdp2"
    other = commanded(folder, change.step, 3, script=SCRIPTS[kind], divided=divided, started=False)
    alike = elastic_fsdp2.check_goes_on_alike if divided else elastic.check_goes_on_alike
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
    """Of a growth that another controller has begun nothing is left, and it can be commanded anew."""
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


@pytest.mark.parametrize("kind", [elastic_divided.FSDP2, elastic_divided.zero(2)], ids=lambda kind: kind.name)
def test_a_rank_is_lost_long_after_it(kind: elastic_divided.Kind, tmp_path: Path) -> None:
    """The job has changed its size, and its controller dies while all train. The next one knows what each rank has in
    the present size, also of one that dies before it has been stopped."""
    flags = ("--steps", str(elastic_divided.END), *kind.flags)
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
    elastic_divided.check_as_commanded(
        kind, ended, lambda kind, sizes: elastic_divided.resized_by_command(kind, tmp_path / "reference", sizes)
    )

"""The controller dies while the ranks of a new parallel layout are on their way, or are let into their loops, and
another one is started: it finds where the state is, and the job is, bit for bit, one that was started so."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support import replan_megatron_lm as lm
from tests.support.controllers import TOKEN, controller
from tests.support.installed import skip_module_without
from tests.support.jobs import Layout, RunningJob, read_events
from tests.support.megatron import ENVIRONMENT
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import loop_environment
from tests.support.replan import SCRIPT, STEPS, TIMEOUT_S, Sizes, Training, command
from tests.support.replan_elastic import History, Stage, both, check_history

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), ("--use-distributed-optimizer", "--bf16"))
FLAGS = ("--steps", str(STEPS), "--dropout", "0.1", *PARTS.sizes.flags, *PARTS.flags)
LOOP = lm.Training("tp2-dp2-distributed-controller", PARTS.sizes, PARTS.flags, iterations=12)
OTHER = Sizes(1, 2, 2)
AT = 3


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("stages"))


class Running:
    """A job on this host, and its controller, which is a separate process."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *flags: str,
        script: Path = SCRIPT,
        arguments: Sequence[str] = FLAGS,
        env: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self.known = folder / "controller"
        self.job = RunningJob(
            folder / "run",
            Layout("replan", "", nproc=4),
            standby=0,
            config=config,
            script=script,
            flags=[*arguments, *flags],
            options=["--no-embed-controller", "--controller", self._address],
            env={**TOKEN, **env, "OMP_NUM_THREADS": "1"},
        )
        self.begin()
        self.tools = RunningJob.__new__(RunningJob)  # commands go to the controller, whose run directory is its own
        self.tools.run_dir, self.tools.popen = self.known, self.job.popen

    def begin(self) -> None:
        self._running = controller(self.known, self._address)
        self._process = self._running.__enter__()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pid(self, rank: int) -> int:
        table = json.loads((self.known / "ranktable.json").read_text())
        return next((int(r["pid"]) for r in table["ranks"] if r["rank"] == rank), 0)

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not what():
            assert time.monotonic() < deadline, self.end().explain()
            time.sleep(0.02)

    def end(self) -> Any:
        try:
            job = self.job.wait(TIMEOUT_S)
        finally:
            self._running.__exit__(None, None, None)
        job.events = read_events(self.known)
        return job


def changed(running: Running) -> Running:
    """It has been asked to change its layout, and its new ranks are being started."""
    running.wait_until(lambda: any(e["event"] == "job_started" for e in read_events(running.known)))
    assert command(running.tools, OTHER, AT) == ""
    running.wait_until(lambda: any(e["event"] == "job_replanned" for e in read_events(running.known)))
    return running


def check_went_on(running: Running, history: History) -> None:
    """In the new layout, from the same step, and without a checkpoint."""
    job = running.end()
    assert job.code == 0, job.explain()
    steps = {event["step"] for event in job.of("job_replanned")}
    assert steps == {AT} and not job.of("fallback_started"), job.explain()
    job.events = [e for e in job.events if e["event"] != "job_started" or e["step"] == 0]
    check_history(job, PARTS, history, [Stage(AT, OTHER, restarted=True)])


@pytest.mark.parametrize("config", ["replan", "both"])
def test_on_their_way_to_the_first_step(config: str, tmp_path: Path, history: History) -> None:
    """No rank is in its loop yet: all begin again, with what the nodes' memory has."""
    settings = {"parallelism": {"min": 1}} if config == "replan" else both(PARTS)
    running = changed(Running(tmp_path, settings, "--step-time", "150", "--mode", "late"))
    time.sleep(3.0)  # they are asleep before their first step
    running.kill()
    running.begin()
    check_went_on(running, history)


def test_as_they_are_let_into_their_loops(tmp_path: Path, history: History) -> None:
    """One stands still as it is to go on: not all have what they need, and no rank has copies yet."""
    running = Running(tmp_path, both(PARTS), "--step-time", "150", "--mode", "late")
    changed(running)
    elastic.inject(running.tools, rank=1, at="recovery:restoring", fault="sigstop")
    found: list[int] = []

    def stands() -> bool:
        pid = running.pid(1)
        if pid and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            found.append(pid)
        return bool(found)

    running.wait_until(stands)
    running.kill()
    os.kill(found[0], signal.SIGCONT)
    running.begin()
    check_went_on(running, history)


@needs_checkout
def test_in_megatron_lms_loop_after_a_replica_has_left(tmp_path: Path, history: History) -> None:
    """On their way to the first step, which takes some seconds there."""
    arguments = [f"--steps={LOOP.iterations}", *LOOP.arguments(LOOP.sizes)]
    running = Running(
        *(tmp_path, both(LOOP), "--step-time=1000"), script=lm.SCRIPT, arguments=arguments, env=loop_environment()
    )
    at = [LOOP.call("train", number) for number in (2, 5)]

    def count(name: str) -> int:
        return sum(event["event"] == name for event in read_events(running.known))

    running.wait_until(lambda: count("job_started") > 0)
    assert elastic.command(running.tools, 1, at[0]) == ""
    running.wait_until(lambda: count("recovery_finished") > 0)
    sizes = Sizes(1, 2, 1)
    assert command(running.tools, sizes, at[1]) == ""
    running.wait_until(lambda: count("job_replanned") > 0)
    time.sleep(3.0)
    running.kill()
    running.begin()
    job = running.end()
    assert job.code == 0 and not job.of("fallback_started"), job.explain()
    job.events = [e for e in job.events if e["event"] != "job_started" or e["step"] == 0]
    lm.check_loop(job, LOOP, history, [Stage(at[0], Sizes(2, 1, 1)), Stage(at[1], sizes, restarted=True)])

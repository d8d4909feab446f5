"""A zygote that is stopped, or dies, while it is asked to fork. All in the grid; what needs no job is in
``tests/unit/test_zygote_process.py`` and ``test_filling.py``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.agent.test_zygote import installed, zygotes
from tests.support.jobs import DDP, Job, RunningJob, check_clean, check_recovered, check_same, run_job

pytestmark = pytest.mark.grid

STRIKES = """
import os, signal, sys

def strike():
    asked = "torch" in sys.modules and open("/proc/self/comm").read() == "fr-zygote\\n"
    if asked and os.path.exists({armed!r}):
        os.rename({armed!r}, {struck!r})
        os.kill(os.getpid(), {number})

if "--zygote" in sys.orig_argv:
    os.register_at_fork(before=strike)
"""
"""The zygote that forks ranks gets a signal when it has read a request, and is about to carry it out."""
STEPS = 12


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four ranks without a fault, in new interpreters."""
    folder = tmp_path_factory.mktemp("reference")
    job = run_job(folder, DDP, steps=STEPS, standby=0, options=["--start-method", "spawn"])
    assert job.code == 0, job.explain()
    return job


class Struck:
    """A job whose zygote is struck once after :meth:`arm`; ``at_launch``: with the first rank."""

    def __init__(self, folder: Path, number: signal.Signals, *, at_launch: bool) -> None:
        self._armed, self._struck = folder / "armed", folder / "struck"
        text = STRIKES.format(armed=str(self._armed), struck=str(self._struck), number=int(number))
        if at_launch:
            self._armed.touch()
        env = installed(folder, sitecustomize=text)
        flags = ["--step-time", "200"]
        self.job = RunningJob(folder / "run", DDP, steps=STEPS, standby=0, own_imports=True, flags=flags, env=env)

    def arm(self) -> None:
        self._armed.touch()

    def wait(self) -> None:
        """Until it has been struck."""
        until(self._struck.exists)

    def asked(self) -> list[psutil.Process]:
        """Those that are stopped."""
        return [zygote for zygote in zygotes(self.job) if zygote.status() == psutil.STATUS_STOPPED]


def until(happened: Callable[[], object], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def how(job: RunningJob, *ranks: int) -> set[str]:
    """How the processes of these ranks were started."""
    table = job.ranks()
    return {psutil.Process(table[rank]).cmdline()[4] for rank in ranks}


def settled(job: RunningJob) -> None:
    """The zygote that has imported what ranks have, by the end of their first step, is the one that is asked."""
    job.wait_for_step(2)
    time.sleep(2)


def test_stopped_for_two_seconds_at_the_launch(reference: Job, tmp_path: Path) -> None:
    """All ranks are forked, none is started in a new interpreter."""
    it = Struck(tmp_path, signal.SIGSTOP, at_launch=True)
    it.wait()
    until(it.asked)
    time.sleep(2)
    for zygote in it.asked():
        zygote.resume()
    it.job.wait_for_step(1)
    assert how(it.job, 0, 1, 2, 3) == {"--zygote"}
    done = it.job.wait()
    check_same(done, reference)
    assert not done.of("failure_detected") and not done.notices("zygote"), done.explain()


@pytest.mark.parametrize("victims", [(1,), (0, 3)], ids=str)
@pytest.mark.parametrize("read", [True, False], ids=["in its work", "before it has read"])
def test_stopped_for_two_seconds_at_a_replacement(
    read: bool, victims: tuple[int, ...], reference: Job, tmp_path: Path
) -> None:
    """The second victim dies while the fork for the first one is under way."""
    it = Struck(tmp_path, signal.SIGSTOP, at_launch=False)
    settled(it.job)
    it.arm()
    if not read:
        for zygote in zygotes(it.job):
            zygote.suspend()
    for number, rank in enumerate(victims, 1):
        it.job.kill(rank)
        it.job.wait_for("failure_detected", count=number)
        time.sleep(1.0)
    if read:
        it.wait()
    time.sleep(2.0 - len(victims))
    assert it.asked()
    for zygote in it.asked():
        zygote.resume()
    if not read:
        it.wait()
        until(it.asked)
        it.asked()[0].resume()  # and again for a moment, when it does its work
    it.job.wait_for("recovery_finished")
    assert how(it.job, *victims) == {"--zygote"}
    done = it.job.wait()
    check_same(done, reference)
    check_recovered(done, victims)


@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "replacement"])
def test_killed_while_it_is_asked(at_launch: bool, reference: Job, tmp_path: Path) -> None:
    it = Struck(tmp_path, signal.SIGKILL, at_launch=at_launch)
    if at_launch:
        it.wait()
        it.job.wait_for_step(1)
        assert how(it.job, 0, 1, 2, 3) == {"--worker"}
    else:
        settled(it.job)
        it.arm()
        it.job.kill(1)
        it.wait()
        it.job.wait_for("recovery_finished")
        assert how(it.job, 1) == {"--worker"}
    done = it.job.wait()
    check_same(done, reference)
    assert at_launch or not check_recovered(done, {1})


@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "replacement"])
def test_stopped_for_ever(at_launch: bool, reference: Job, tmp_path: Path) -> None:
    """It is given up, and new interpreters are started."""
    it = Struck(tmp_path, signal.SIGSTOP, at_launch=at_launch)
    if not at_launch:
        settled(it.job)
        it.arm()
        it.job.kill(1)
    it.wait()
    until(it.asked)
    stopped = it.asked()
    if at_launch:
        it.job.wait_for_step(1)
        assert how(it.job, 0, 1, 2, 3) == {"--worker"}
    else:
        it.job.wait_for("recovery_finished")
        assert how(it.job, 1) == {"--worker"}
    assert not any(zygote.is_running() for zygote in stopped)
    done = it.job.wait()
    check_same(done, reference)
    assert at_launch or not check_recovered(done, {1})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "replacement"])
def test_the_end_of_the_agent_while_its_zygote_is_asked(
    at_launch: bool, number: signal.Signals, tmp_path: Path
) -> None:
    """Nothing is left of what was to be forked."""
    it = Struck(tmp_path, signal.SIGSTOP, at_launch=at_launch)
    if not at_launch:
        settled(it.job)
        it.arm()
        it.job.kill(1)
    it.wait()
    until(it.asked)
    began = time.monotonic()
    it.job.popen.send_signal(number)
    ended = it.job.wait(20)
    assert ended.code != 0 and time.monotonic() - began < 8, ended.explain()
    if number == signal.SIGKILL:
        time.sleep(0.5)
    check_clean(ended)

"""A host that was suspended has lost its leases, though its CLOCK_MONOTONIC knows nothing of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from flashrecovery.agent.controller_link import controller_watch
from flashrecovery.agent.peers.client import Asking
from flashrecovery.agent.peers.election import Election
from flashrecovery.config import Timeouts
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.plan.membership.electors import Elector
from flashrecovery.plan.membership.membership import NodeStatus, Port, Seen
from flashrecovery.plan.membership.quorum import Quorum
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Page
from flashrecovery.util.clock import lease_clock, lease_clock_ns
from tests.unit.test_electors import Job
from tests.unit.test_session_heartbeats import Scene, play

LIMITS = Timeouts()
HOUR_S = 3600.0


class Host:
    """The one on which all of this runs. It may be suspended: CLOCK_BOOTTIME knows, CLOCK_MONOTONIC does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._slept_ns = 0
        real = time.clock_gettime_ns
        monkeypatch.setattr(time, "clock_gettime_ns", lambda which: real(which) + self._slept_ns)

    def sleep(self, seconds: float) -> None:
        self._slept_ns += int(seconds * 1e9)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_the_clock_is_the_one_that_counts_suspension() -> None:
    assert abs(lease_clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1.0
    assert abs(lease_clock_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < 10**9


# -- worker ---------------------------------------------------------------------------------------

_WORKER = """
import sys
from flashrecovery.errors import StepInterrupted
from flashrecovery.runtime.page import Page
from flashrecovery.worker.control import gate as module
page = Page(int(sys.argv[1]))
gate = module.Gate(page)
waits = []
gate.lock.wait = lambda seconds: (waits.append(seconds), gate.stop(1, 0))  # instead of for ever
gate.begin()
try:
    gate.mutate()
    print("mutates")
except StepInterrupted:
    print("waits", len(waits))
"""


def _worker_after(page: Page, slept_s: int) -> str:
    """What a worker with this page does on a host that has slept for so long."""
    command = ["unshare", "--time", "--boottime", str(slept_s), sys.executable, "-c", _WORKER, str(page.fd)]
    os.set_inheritable(page.fd, True)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=(page.fd,))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def _has_time_namespaces() -> bool:
    """Whether processes can be given another CLOCK_BOOTTIME."""
    command = ["unshare", "--time", "--boottime", "1", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_time_namespaces(), reason="time namespaces need CAP_SYS_ADMIN")
def test_a_worker_that_wakes_up_begins_no_change_of_its_state() -> None:
    """For the kernel's own clocks: the worker is in a time namespace in which the host has slept since the lending."""
    page = Page.create("lent")
    page.lend(lease_clock() + 60.0)
    assert _worker_after(page, 0) == "mutates"
    assert _worker_after(page, 61) == "waits 1"
    page.close()


def test_a_page_is_not_lent_for_longer_than_that(host: Host) -> None:
    page = Page.create("lent")
    page.lend(lease_clock() + 0.5)
    assert not page.lease_over()
    host.sleep(0.6)
    assert page.lease_over()
    page.close()


# -- agent ----------------------------------------------------------------------------------------


def test_an_agent_that_wakes_up_has_not_heard_its_controller(tmp_path: Path, host: Host) -> None:
    """It vouches for no one, its workers do nothing; and it looks for the controller as patiently as ever."""

    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session = scene.session
        await scene.until(lambda: session._hearing.silent_s < 0.2)
        assert scene.agent.lent_until > lease_clock()
        host.sleep(HOUR_S)
        assert session._hearing.silent_s >= HOUR_S and scene.agent.lent_until < lease_clock()
        assert session._hearing.nothing_came_s() >= HOUR_S, "as an elector it may vote for another one"
        assert not await session.vouch(Asking("a", "first"), 1.0)
        assert LIMITS.controller_gone_s < HOUR_S
        session._give_up_if_late()
        await scene.until(lambda: session._hearing.silent_s < LIMITS.lease_s and scene.agent.lent_until > lease_clock())
        await scene.until(scene.by_datagram)
        assert session.joined

    play(tmp_path, act)


@pytest.mark.parametrize("port", [Port.ACCEPTS, Port.REFUSES])
def test_answers_from_before_it_slept_say_nothing(
    port: Port, tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were reached, and then the host was suspended before the verdict."""

    async def probe_port(*_: object) -> Port:
        return port

    async def probe_all(*_: object) -> list[Seen]:
        host.sleep(HOUR_S)
        return [Seen("b:1", True)]

    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session = scene.session
        monkeypatch.setattr(controller_watch, "probe_port", probe_port)
        monkeypatch.setattr(controller_watch, "probe_all", probe_all)
        monkeypatch.setattr(session, "_heard", lambda command: None)  # nothing comes any more
        session._fresh, session._hearing.heard_at = False, lease_clock() - 0.5
        await session._lookout.ask()
        assert session._lookout.node_status in (NodeStatus.MEMBER, NodeStatus.ORPHANED)
        assert scene.agent.lent_until < lease_clock()

    play(tmp_path, act)


# -- controller -----------------------------------------------------------------------------------


def test_a_controller_that_wakes_up_may_not_decide(host: Host) -> None:
    electors = tuple(Elector(n, f"{n}:1", f"{n}-life") for n in "abc")
    quorum = Quorum.elected("a", 2, electors, (), until=lease_clock())
    elector_set = ElectorSet(quorum, cast(JobState, Job.of("abc")), LIMITS)
    for name in "abc":
        elector_set.echoed(name, lease_clock())
    assert elector_set.may_decide(lease_clock()) and not elector_set.suspended(lease_clock())
    host.sleep(LIMITS.lease_s)
    assert not elector_set.may_decide(lease_clock())
    host.sleep(HOUR_S)
    assert elector_set.suspended(lease_clock())


def test_an_elector_that_wakes_up_defends_nobody(host: Host) -> None:
    came_at = lease_clock()
    agent = Election("b", lambda: "life", lambda: lease_clock() - came_at, LIMITS.lease_s, lambda: None)
    agent.learn(pb.Electors(term=1, version=1, electors=[pb.Elector(node="b", peer="b:1", incarnation="life")]))
    request = pb.VoteRequest(term=2, version=1, candidate="c", voter="b", incarnation="life", preliminary=True)
    assert not agent.vote(request).granted
    host.sleep(HOUR_S)
    assert agent.vote(request).granted

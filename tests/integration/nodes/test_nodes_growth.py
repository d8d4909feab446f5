"""Elastic jobs on several hosts: a node is lost, there is no spare one, and the job shrinks; the node comes back, and
it grows. The hosts are network namespaces.

``FLASHRECOVERY_EVENTS=100`` makes the loops at the end as long as that.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.elastic import (
    SCRIPT,
    Course,
    check_batches,
    check_goes_on_alike,
    check_steps_alike,
    resized_by_command,
)
from tests.support.hosts import Host, Network
from tests.support.jobs import Layout
from tests.support.nodes import NodesJob, hosts_of_a_test

EVENTS = int(os.environ.get("FLASHRECOVERY_EVENTS", "6"))
pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400 + 30 * EVENTS),
    pytest.mark.slow,
]
END = 110
two_hosts, three_hosts, four_hosts = hosts_of_a_test(2), hosts_of_a_test(3), hosts_of_a_test(4)


def job_on(net: Network, run_dir: Path, nproc: int, *, steps: int = END, least: int = 1, spare: int = 0) -> NodesJob:
    nnodes = len(net.hosts) - spare
    return NodesJob(
        net,
        run_dir,
        Layout("elastic", str(SCRIPT), nproc=nproc),
        nnodes=nnodes,
        steps=steps,
        step_ms=150,
        options=("--elastic", f"{least}:{nproc}"),
        flags=("--show-batches",),
    )


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_node_returns(how: str, two_hosts: Network, tmp_path: Path) -> None:
    """Killed, its agent is started again; cut off, it comes back by itself. As a job that was resized by command at the
    same steps."""
    job = job_on(two_hosts, tmp_path / "run", 4, least=2)
    job.wait_for_step(7)
    first, lost = two_hosts.hosts
    if how == "killed":
        job.kill_node(lost)
    else:
        two_hosts.cut(lost)
    job.wait_for("job_resized")
    job.wait_for("recovery_finished")
    if how == "killed":
        job.start_again(lost)
    else:
        two_hosts.heal(lost)
    job.wait_for("job_resized", 2)
    job.wait_for("recovery_finished", 2)
    assert set(job.rank_hosts().values()) == {first, lost}
    ended = job.wait()
    assert ended.code == 0, ended.explain()
    smaller, larger = ended.of("job_resized")
    assert (smaller["ranks"], smaller["left"]) == ([0, 1], [2, 3]), ended.explain()
    assert (larger["ranks"], larger["came"]) == ([0, 1, 2, 3], [2, 3]), ended.explain()
    (growth,) = [e for e in ended.of("recovery_finished") if e["cause"] == "resize"]
    assert growth["total_s"] < 2.0 and growth["victims"] == [], ended.explain()
    sizes = [(smaller["step"], 2), (larger["step"], 4)]
    reference = resized_by_command(tmp_path / "reference", sizes, end=END)
    check_steps_alike(ended, reference, smaller["step"], larger["step"], 2)
    check_goes_on_alike(ended, reference, larger["step"], 4, END)
    check_batches(ended, END)


def test_the_node_dies_again_while_its_ranks_are_built_up(two_hosts: Network, tmp_path: Path) -> None:
    job = job_on(two_hosts, tmp_path / "run", 4, least=2)
    job.wait_for_step(7)
    first, lost = two_hosts.hosts
    job.kill_node(lost)
    job.wait_for("recovery_finished")
    job.start_again(lost)
    job.wait_for_notice("joining_processes")
    job.kill_node(lost)
    job.wait_for_notice("joining_process_given_up")
    ended = job.wait(of=[first])
    assert ended.code == 0 and len(ended.of("job_resized")) == 1, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["left"] == [2, 3], ended.explain()
    step = ended.of("job_resized")[0]["step"]
    check_goes_on_alike(ended, resized_by_command(tmp_path / "reference", [(step, 2)], end=END), step, 2, END)


def test_the_controllers_node_is_lost_while_ranks_are_built_up(three_hosts: Network, tmp_path: Path) -> None:
    """The next controller knows nothing of them: they are ended, and the node has room for the rank that was lost."""
    job = job_on(three_hosts, tmp_path / "run", 3, steps=250)
    job.wait_for_step(7)
    first, second, third = three_hosts.hosts
    job.kill_node(third)
    job.wait_for("recovery_finished")
    job.start_again(third)
    job.wait_for_notice("joining_processes")
    job.kill_node(first)
    job.wait_for("recovery_finished", 2)
    assert job.rank_hosts() == {0: third, 1: second}
    printing = [os.readlink(f"/proc/{pid}/fd/1") for pid in job.pids(third)]
    assert any("/rank0." in log for log in printing), printing
    assert not any("/rank2." in log for log in printing), "one that was on its way in is still there"
    ended = job.stop()
    states = Course.of(ended).states
    assert all(len(digests) == 1 for digests in states.values()), ended.explain()


def test_nodes_leave_and_return(four_hosts: Network, tmp_path: Path) -> None:
    """Again and again, one or two at a time. Every step of the job has had its samples, all of them, and the ranks are
    equal after each."""
    pick = random.Random(7)
    job = job_on(four_hosts, tmp_path / "run", 4, steps=1_000_000)
    job.wait_for_step(5)
    others = four_hosts.hosts[1:]
    events, size = 0, 4
    while events < EVENTS:
        lost = pick.sample(others, pick.choice([1, 1, 2]))
        for host in lost:
            lose(job, host)
        size = wait_for_size(job, 4 - len(lost))
        for host in lost:
            job.start_again(host)
        size = wait_for_size(job, 4)
        events += 2 * len(lost)
    at = job.newest_step(four_hosts.hosts[0])
    job.wait_for_step(at + 3)
    failed = job.of("job_failed")
    ended = job.stop()
    assert size == 4 and not failed, ended.explain()
    assert not ended.notices("joining_process_given_up"), ended.explain()
    states = Course.of(ended).states
    assert all(len(digests) == 1 for digests in states.values()), "the ranks differ"
    check_batches(ended, at)
    stalls = [e["total_s"] for e in ended.of("recovery_finished") if e["cause"] == "resize"]
    print(f"{events} events, {at} steps; stalls of growth: {sorted(stalls)}")


def test_nodes_leave_and_return_with_a_spare_one(four_hosts: Network, tmp_path: Path) -> None:
    """The same where three of the four nodes hold ranks: one that is lost is replaced by the spare one, of two only one
    is, and the job shrinks. A node that returns is spare, or has the job grow."""
    pick = random.Random(11)
    job = job_on(four_hosts, tmp_path / "run", 3, steps=1_000_000, spare=1)
    job.wait_for_step(5)
    first, *others = four_hosts.hosts
    came = dict.fromkeys(others, 1)
    events, sizes = 0, set()
    while events < EVENTS:
        lost = pick.sample(others, pick.choice([1, 1, 2]))
        living = [host for host in four_hosts.hosts if host not in lost]
        for host in lost:
            lose(job, host)
        sizes.add(wait_until_on(job, living, min(3, len(living))))
        for host in lost:
            job.start_again(host)
            came[host] += 1
            job.wait_for_join(host, came[host])
        wait_until_on(job, four_hosts.hosts, 3)
        events += 2 * len(lost)
    at = job.newest_step(first)
    job.wait_for_step(at + 3)
    failed = job.of("job_failed")
    ended = job.stop()
    assert not failed and 3 in sizes, ended.explain()
    states = Course.of(ended).states
    assert all(len(digests) == 1 for digests in states.values()), "the ranks differ"
    check_batches(ended, at)
    print(f"{events} events, {at} steps; {len(ended.of('job_resized'))} changes of the size")


def lose(job: NodesJob, host: Host) -> None:
    """The node is lost, and the controller has other electors. (Two of three at once, and it would decide nothing any
    more: docs/nodes.md.)"""
    found = len(job.of("node_lost"))
    job.kill_node(host)
    job.wait_for("node_lost", found + 1)
    time.sleep(1.0)


def wait_until_on(job: NodesJob, living: list[Host], size: int) -> int:
    """Until that many ranks are on these hosts, and none elsewhere, and the job has gone on there."""
    deadline = time.monotonic() + 120
    while True:
        at, hosts_of_ranks = job.newest_step(living[0]), job.rank_hosts()
        if len(hosts_of_ranks) == size and set(hosts_of_ranks.values()) <= set(living):
            job.wait_for_step(at + 2)
            if job.rank_hosts() == hosts_of_ranks:
                return size
        assert time.monotonic() < deadline, f"{size} ranks have not come about\n{job.stop().explain()}"
        time.sleep(0.05)


def wait_for_size(job: NodesJob, size: int) -> int:
    """Until the job consists of that many ranks, and has gone on."""
    deadline = time.monotonic() + 120
    while True:
        events = job.events()
        changed = [n for n, event in enumerate(events) if event["event"] == "job_resized"]
        there = bool(changed) and events[changed[-1]]["replicas"] == size
        if there and any(event["event"] == "recovery_finished" for event in events[changed[-1] :]):
            return size
        assert time.monotonic() < deadline, f"{size} ranks have not come about\n{job.stop().explain()}"
        time.sleep(0.05)

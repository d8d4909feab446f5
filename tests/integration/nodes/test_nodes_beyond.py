"""Elastic jobs on several hosts grow beyond their launch: a node comes that the job has never had, the job has ranks on
it by itself, and it may be lost, and return, as any other. The hosts are network namespaces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.elastic import command as resize_command
from tests.support.elastic import start
from tests.support.elastic_nodes import DDP, FSDP2, ZERO2, Kind, launch, lose, of_kinds, sizes_of
from tests.support.hosts import Host, Network
from tests.support.jobs import Job, check_clean
from tests.support.nodes import NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(600),
    pytest.mark.grid,
]
two_hosts, three_hosts = hosts_of_a_test(2), hosts_of_a_test(3)
END = 130


def begin(net: Network, folder: Path, kind: Kind, nnodes: int, *, per_node: int = 1, most: int = 3) -> NodesJob:
    """On the first hosts; the others are not there yet."""
    elastic = {"max": most, "replace": "never"}
    return launch(net, folder, kind, per_node=per_node, nodes=nnodes, steps=END, step_ms=150, elastic=elastic, flags=())


def join(job: NodesJob, host: Host, number: int) -> None:
    """The node comes, as a scheduler would start it."""
    first = job.net.hosts[0]
    line, env = job._started[first.name]
    own = [*host.command, sys.executable, *line[line.index("-m") :]]
    own[own.index("--node-rank") + 1], own[own.index("--node-name") + 1] = str(number), host.name
    own[own.index("--spare-nodes") + 1] = "1"
    job._start(host, own, env)


def check_as_commanded(kind: Kind, job: Job, folder: Path, launched: int, most: int) -> None:
    """In all its sizes the job went the way of one on one host that was resized by command at the same steps."""
    assert job.code == 0, job.explain()
    sizes = sizes_of(job, kind)
    config = {"elastic": {"min": 1, "max": most}, "slots": most}
    flags = ["--steps", str(END), "--step-time", "150", *kind.flags]
    folder.mkdir()
    running = start(folder / "run", config, *flags, nproc=launched, script=kind.script, env=kind.env)
    running.wait_for("job_started", 180)
    for number, (step, size) in enumerate(sizes, 1):
        assert resize_command(running, size, step) == ""
        event = running.wait_for("job_resized", 120, count=number)
        assert (event["step"], event["replicas"]) == (step, size), running.wait(240).explain()
        running.wait_for("recovery_finished", count=number)
    other = running.wait(300)
    for (step, size), (until, _) in zip(sizes, [*sizes[1:], (END, 0)], strict=True):
        kind.steps_alike(job, other, step, until, size)
    check_clean(job)
    check_clean(other)


@pytest.mark.parametrize("kind", of_kinds(DDP, FSDP2, ZERO2))
def test_a_node_comes_leaves_and_returns(kind: Kind, three_hosts: Network, tmp_path: Path) -> None:
    """2 -> 3 -> 2 -> 3; then one of the launch is lost, too."""
    first, second, third = three_hosts.hosts
    job = begin(three_hosts, tmp_path / "job", kind, 2)
    job.wait_for("job_started")
    join(job, third, 2)
    job.wait_for("recovery_finished", 1)
    job.wait_for_step(job.newest_step() + 4)
    lose(job, third)
    job.wait_for("recovery_finished", 2)
    job.start_again(third)
    job.wait_for("recovery_finished", 3)
    job.wait_for_step(job.newest_step() + 4)
    lose(job, second)
    ended = job.wait(of=[first, third])
    assert [event["ranks"] for event in ended.of("job_resized")] == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 2]], (
        ended.explain()
    )
    check_as_commanded(kind, ended, tmp_path / "reference", 2, 3)


def test_the_controllers_node_is_lost_after_it(three_hosts: Network, tmp_path: Path) -> None:
    """The others elect another controller, and it knows the rank that the launch has not had."""
    first, second, third = three_hosts.hosts
    job = begin(three_hosts, tmp_path / "job", FSDP2, 2)
    job.wait_for("job_started")
    join(job, third, 2)
    job.wait_for("recovery_finished", 1)
    job.wait_for_step(job.newest_step() + 4)
    lose(job, first)
    ended = job.wait(of=[second, third])
    assert [event["ranks"] for event in ended.of("job_resized")] == [[0, 1, 2], [1, 2]], ended.explain()
    check_as_commanded(FSDP2, ended, tmp_path / "reference", 2, 3)


@pytest.mark.parametrize("kind", of_kinds(DDP, FSDP2))
def test_launched_on_one_host_it_grows_onto_the_spare_one(kind: Kind, two_hosts: Network, tmp_path: Path) -> None:
    """Without a command; copies, which one host alone would keep for itself, are on the other one then: it can be lost
    with all that it has."""
    first, second = two_hosts.hosts
    elastic = {"max": 4, "replace": "never"}
    job = launch(two_hosts, tmp_path / "job", kind, spare=1, steps=END, step_ms=150, elastic=elastic, flags=())
    job.wait_for("recovery_finished", 1)
    job.wait_for_step(job.newest_step() + 4)
    lose(job, second)
    ended = job.wait(of=[first])
    assert [event["ranks"] for event in ended.of("job_resized")] == [[0, 1, 2, 3], [0, 1]], ended.explain()
    check_as_commanded(kind, ended, tmp_path / "reference", 2, 4)

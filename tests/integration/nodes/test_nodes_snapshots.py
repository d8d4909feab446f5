"""Snapshots on several hosts (network namespaces): what survives when nodes and processes are lost together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, FSDP, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 30
KILL_AFTER = 8

net = hosts_of_a_test(3)
reference = references_of_a_module(STEPS, spare=1)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def ranks_on(job: NodesJob, *nodes: Host) -> list[int]:
    return [pid for node in nodes for pid in job.worker_pids(node)]


def test_all_ranks_of_all_nodes_die_at_once(net: Network, tmp_path: Path, reference: References) -> None:
    job = NodesJob(net, tmp_path / "run", FSDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    first, second, spare = net.hosts
    kill(ranks_on(job, first, second))
    ended = job.wait(of=[first, second, spare])
    assert {v for e in ended.of("recovery_finished") for v in e["victims"]} == {0, 1, 2, 3}, ended.explain()
    assert not ended.of("node_lost")
    check_same(ended, reference(FSDP))


def test_a_node_dies_together_with_the_ranks_that_keep_its_copies(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """What they kept for its ranks outlives them, for their successors; the lost ranks begin on the spare node."""
    job = NodesJob(net, tmp_path / "run", FSDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    first, lost, spare = net.hosts
    kill([*job.pids(lost), *ranks_on(job, first)])
    ended = job.wait(of=[first, spare])
    assert {v for e in ended.of("recovery_finished") for v in e["victims"]} == {0, 1, 2, 3}, ended.explain()
    assert [e["node"] for e in ended.of("node_lost")] == [lost.name]
    check_same(ended, reference(FSDP))


def test_all_launchers_and_ranks_die_at_once(net: Network, tmp_path: Path, reference: References) -> None:
    """The scheduler starts them again; each node's snapshot process has waited."""
    job = NodesJob(net, tmp_path / "run", FSDP, steps=STEPS, options=["--resume"])
    job.wait_for_step(KILL_AFTER)
    first, second, spare = net.hosts
    kill([*ranks_on(job, first, second), *(popen.pid for popen in job.popens.values())])
    for host in net.hosts:
        job.start_again(host)
    ended = job.wait(of=[first, second, spare])
    (version,) = ended.gone_on_from_snapshots()
    assert version >= KILL_AFTER
    check_same(ended, reference(FSDP), launches=2)


def test_a_job_without_snapshots_is_told_to_end(net: Network, tmp_path: Path, reference: References) -> None:
    """DDP: every shard has replicas, and nothing is kept while it trains. Each node writes its own part at the end."""
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS, options=["--resume"])
    job.wait_for_step(KILL_AFTER)
    job.signal_agent(net.hosts[0], signal.SIGTERM)
    for popen in job.popens.values():
        popen.wait(60)
    assert job.output().count("this node's part of the state of step") == 2, job.output()
    for host in net.hosts:
        job.start_again(host)
    ended = job.wait(of=[*net.hosts])
    (version,) = ended.gone_on_from_snapshots()
    assert version >= KILL_AFTER
    check_same(ended, reference(DDP), launches=2)

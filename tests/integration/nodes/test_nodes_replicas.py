"""Shards whose replicas are all on one node: they are lost with it, and so they are protected like what no other rank
holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Network
from tests.support.jobs import ROOT, Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
]
STEPS = 30
KILL_AFTER = 8
SCRIPT = str(ROOT / "tests" / "scripts" / "replicas_together.py")
TWO = Layout("replicas-together-on-two", SCRIPT, ("--replicate", "2"), nproc=4)
THREE = Layout("replicas-together-on-three", SCRIPT, ("--replicate", "2"), nproc=6)
NODES = {TWO.name: 2, THREE.name: 3}

net = hosts_of_a_test(4)
reference = references_of_a_module(STEPS, nnodes=lambda layout: NODES[layout.name])


@pytest.mark.parametrize(
    ("layout", "redundancy"),
    [
        pytest.param(TWO, "auto", id="neighbour"),
        pytest.param(THREE, "parity", id="parity", marks=pytest.mark.slow),
    ],
)
def test_a_node_is_lost_with_all_replicas_of_a_shard(
    layout: Layout, redundancy: str, net: Network, tmp_path: Path, reference: References
) -> None:
    nodes = NODES[layout.name]
    options = ["--redundancy", redundancy]
    job = NodesJob(net, tmp_path / "run", layout, nnodes=nodes, spare=1, steps=STEPS, options=options)
    job.wait_for_step(KILL_AFTER)
    lost = net.hosts[nodes - 1]
    job.kill_node(lost)
    ended = job.wait(of=[host for host in net.hosts[: nodes + 1] if host is not lost])
    assert [e["ranks"] for e in ended.of("node_lost")] == [[2 * nodes - 2, 2 * nodes - 1]], ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert (recovery["decoded_bytes"] > 0) is (redundancy == "parity"), recovery
    assert not ended.of("fallback_started")
    check_same(ended, reference(layout))

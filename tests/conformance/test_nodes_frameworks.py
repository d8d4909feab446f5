"""DeepSpeed and Megatron on three hosts, one of them spare: a whole node dies, with the only live copies it had."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support import megatron as mg
from tests.support.hosts import Network
from tests.support.jobs import Layout, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]
ZERO2 = Layout("zero2", "train_deepspeed.py", ("--zero", "2"))


net = hosts_of_a_test(3)


def lose_a_node(net: Network, folder: Path, layout: Layout, env: dict[str, str]) -> None:
    reference = NodesJob(net, folder / "reference", layout, steps=16, env=env).wait(400)
    job = NodesJob(net, folder / "run", layout, steps=16, env=env)
    job.wait_for_step(5, 240)
    job.kill_node(net.hosts[1])
    ended = job.wait(400, of=[net.hosts[0], net.hosts[2]])
    (gone,) = ended.of("node_lost")
    assert gone["ranks"] == [2, 3]
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["bytes"] > 0
    assert not ended.of("fallback_started")
    check_same(ended, reference)


@pytest.mark.deepspeed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_zero2(net: Network, tmp_path: Path) -> None:
    lose_a_node(net, tmp_path, ZERO2, {})


@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_a_node_with_all_replicas_of_a_pipelines_stage(net: Network, tmp_path: Path) -> None:
    lose_a_node(net, tmp_path, mg.PP2_DP2, dict(mg.ENVIRONMENT))


@pytest.mark.megatron
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatrons_distributed_optimizer(net: Network, tmp_path: Path) -> None:
    lose_a_node(net, tmp_path, mg.DP4_DISTRIBUTED, dict(mg.ENVIRONMENT))

"""A rank in uninterruptible sleep on one of several hosts: SIGKILL does not end it, so its node is given up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import frozen, hosts
from tests.support.hosts import Network
from tests.support.jobs import FSDP, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.skipif(not frozen.available(), reason="needs the first version of control groups"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 40

net = hosts_of_a_test(3)
reference = references_of_a_module(STEPS)


def test_its_rank_goes_to_another_node(net: Network, tmp_path: Path, reference: References) -> None:
    first, stuck, spare = net.hosts
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"timeouts": {"fence_s": 2.0, "hang_step_s": 4.0}}))
    job = NodesJob(net, tmp_path / "run", FSDP, nnodes=2, spare=1, steps=STEPS, config=config)
    job.wait_for_step(8)
    rank = next(rank for rank, host in sorted(job.rank_hosts().items()) if host is stuck)
    pids = {entry["rank"]: entry["pid"] for entry in job._rank_table()["ranks"]}
    with frozen.frozen(pids[rank]):
        ended = job.wait(of=[first, spare])
        (lost,) = ended.of("node_lost")
        assert lost["node"] == stuck.name and f"pid {pids[rank]} of rank {rank}" in lost["evidence"], ended.explain()
        (said,) = ended.notices("process_never_ends")
        assert "is in uninterruptible sleep" in said["text"]
    assert not ended.of("fallback_started")
    check_same(ended, reference(FSDP))

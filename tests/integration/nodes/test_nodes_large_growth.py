"""A node comes back to an elastic job with much state, and a rank that sends to it dies meanwhile.

What is replicated comes in ranges from all hosts, what is sharded is sharded otherwise. The sizes are real ones: the
least size of a range is as it is.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.elastic_nodes import (
    DDP,
    FSDP2,
    Kind,
    Resized,
    check_as_commanded,
    launch,
    lose,
    of_kinds,
    resized_once,
)
from tests.support.hosts import Network
from tests.support.nodes import hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]
WIDE = 5000
STATE_BYTES = 12 * WIDE * WIDE
"""Parameters and two moments, in fp32: 300 MB."""
END, PATIENCE_S, LINK_MB_S = 30, 600, 60
KINDS = [
    replace(kind, name=f"{kind.name}-of-300-mb", flags=(*kind.flags, f"--wide={WIDE}", "--micro-batch=6"))
    for kind in (DDP, FSDP2)
]
three_hosts = hosts_of_a_test(3)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("kind", of_kinds(*KINDS))
def test_a_source_dies_while_a_rank_that_comes_gets_its_state(
    kind: Kind, three_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    job = launch(three_hosts, tmp_path, kind, per_node=1, steps=END)
    first, source, lost = three_hosts.hosts
    job.wait_for_step(2, PATIENCE_S)
    lose(job, lost)
    job.wait_for("recovery_finished", timeout_s=PATIENCE_S)
    job.start_again(lost)
    job.wait_for("job_resized", 2, PATIENCE_S)
    for host in (first, source):
        host.shape(LINK_MB_S)
    begun, deadline = source.sent_bytes(), time.monotonic() + PATIENCE_S
    while source.sent_bytes() - begun < STATE_BYTES / 32:
        assert time.monotonic() < deadline and len(job.of("recovery_finished")) == 1, job.events()[-10:]
        time.sleep(0.005)
    job.kill_worker(source, 1)
    assert len(job.of("recovery_finished")) == 1, "it came too late"
    job.wait_for("recovery_finished", 2, PATIENCE_S)
    for host in (first, source):
        host.shape(1000)
    ended = job.wait(PATIENCE_S)
    assert any(1 in event["victims"] for event in ended.of("recovery_finished")), ended.explain()
    assert ended.of("recovery_finished")[-1]["bytes"] >= STATE_BYTES / 3, ended.explain()
    check_as_commanded(kind, ended, 3, resized, end=END)

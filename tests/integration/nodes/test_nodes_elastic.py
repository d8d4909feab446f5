"""Elastic jobs on several hosts: a whole node is lost, there is no spare one, and training goes on without it.

The hosts are network namespaces. The reference is a job of one host that was resized by command at the same step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.elastic import SCRIPT, STEPS, check_goes_on_alike, commanded
from tests.support.hosts import Network
from tests.support.jobs import Layout
from tests.support.nodes import NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
KILL_AFTER = 7
two_hosts, three_hosts = hosts_of_a_test(2), hosts_of_a_test(3)


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_node_without_a_spare_one(how: str, two_hosts: Network, tmp_path: Path) -> None:
    job = NodesJob(
        two_hosts,
        tmp_path / "run",
        Layout("elastic", str(SCRIPT), nproc=4),
        steps=STEPS,
        step_ms=200,
        options=("--elastic", "2:4"),
    )
    job.wait_for_step(KILL_AFTER)
    first, lost = two_hosts.hosts
    if how == "killed":
        job.kill_node(lost)
    else:
        two_hosts.cut(lost)
    ended = job.wait(of=[first])
    assert ended.code == 0, ended.explain()
    (event,) = ended.of("job_resized")
    assert event["ranks"] == [0, 1] and event["left"] == [2, 3], ended.explain()
    assert not ended.notices("waiting_for_node"), ended.explain()
    step = event["step"]
    check_goes_on_alike(ended, commanded(tmp_path / "reference", step, 2), step, 2)


def test_the_node_with_the_controller(three_hosts: Network, tmp_path: Path) -> None:
    """The others elect another controller, and go on without its ranks. One more process dies, on a node that has room
    for its replacement: that comes into the smaller job, with what the other node keeps for it."""
    job = NodesJob(
        three_hosts,
        tmp_path / "run",
        Layout("elastic", str(SCRIPT), nproc=3),
        nnodes=3,
        steps=STEPS,
        step_ms=300,
        options=("--elastic", "2:3"),
    )
    job.wait_for_step(KILL_AFTER)
    lost, second, third = three_hosts.hosts
    job.kill_node(lost)
    event = job.wait_for("job_resized")
    job.wait_for("recovery_finished")
    job.kill_worker(third, 2)
    ended = job.wait(of=[second, third])
    assert ended.code == 0 and event["ranks"] == [1, 2] and event["left"] == [0], ended.explain()
    assert [e["victims"] for e in ended.of("recovery_finished")] == [[0], [2]], ended.explain()
    step = event["step"]
    check_goes_on_alike(ended, commanded(tmp_path / "reference", step, 2, launched=3), step, 2)

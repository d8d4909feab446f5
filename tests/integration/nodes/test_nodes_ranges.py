"""A replacement gets its state in ranges from two other hosts at once, each of which sends what its link carries."""

from __future__ import annotations

import time

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
]
STEPS = 14
KILL_AFTER = 4
LARGE = Layout("ddp-of-40-mb", "train_ddp.py", ("--width=256", "--layers=4"), nproc=3)
SLOW_MB_S = 15
STATE_BYTES = 12 * 4 * 12 * 256 * 256
"""At least: parameters and two moments, in fp32, of four layers."""

net = hosts_of_a_test(3)
reference = references_of_a_module(STEPS, nnodes=lambda layout: 3)


def _job(net: Network, tmp_path: object, slow: list[Host]) -> NodesJob:
    job = NodesJob(net, tmp_path / "run", LARGE, nnodes=3, steps=STEPS)  # type: ignore[operator]
    job.wait_for_step(KILL_AFTER)
    for host in slow:
        host.shape(SLOW_MB_S)
    return job


@pytest.mark.grid
def test_the_faster_link_carries_more(net: Network, tmp_path: object, reference: References) -> None:
    fast, slow, lost = net.hosts
    job = _job(net, tmp_path, [slow])
    before = fast.sent_bytes(), slow.sent_bytes()
    job.kill_worker(lost, 2)
    job.wait_for("recovery_finished")
    sent = fast.sent_bytes() - before[0], slow.sent_bytes() - before[1]
    ended = job.wait()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["bytes"] > STATE_BYTES, recovery
    assert set(recovery["sources"]) == {"0", "1"}, recovery
    # Training takes the same of both; half of the state each would be no difference.
    assert sent[0] - sent[1] > recovery["bytes"] / 2, (sent, recovery)
    check_same(ended, reference(LARGE))


@pytest.mark.grid
def test_what_is_damaged_on_the_way_comes_again_from_one_rank(
    net: Network, tmp_path: object, reference: References
) -> None:
    faults = ["rank=2,at=backward,step=4", "rank=2,fault=corrupt,at=recovery:restoring"]
    options = [option for fault in faults for option in ("--inject", fault)]
    job = NodesJob(net, tmp_path / "run", LARGE, nnodes=3, steps=STEPS, options=options)  # type: ignore[operator]
    ended = job.wait()
    assert ended.notices("digest_mismatch"), ended.explain()
    assert set(ended.of("recovery_finished")[0]["sources"]) == {"0", "1"}
    check_same(ended, reference(LARGE))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_a_holder_dies_while_it_sends(net: Network, tmp_path: object, reference: References, victim: int) -> None:
    """Everything comes again, from the one that is left."""
    *holders, lost = net.hosts
    job = _job(net, tmp_path, holders)
    job.kill_worker(lost, 2)
    dying, begun = holders[victim], holders[victim].sent_bytes()
    deadline = time.monotonic() + 60
    # No collective is under way by then, and its rank has got some of the ranges.
    while dying.sent_bytes() - begun < STATE_BYTES / 8:
        assert time.monotonic() < deadline and not job.of("recovery_finished"), job.events()[-10:]
        time.sleep(0.01)
    assert not job.of("recovery_finished")
    job.kill_worker(dying, victim)
    ended = job.wait()
    recoveries = ended.of("recovery_finished")
    assert {rank for one in recoveries for rank in one["victims"]} == {2, victim}, ended.explain()
    check_same(ended, reference(LARGE))

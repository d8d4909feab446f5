"""Parity on several hosts (network namespaces): nodes are lost, and their ranks begin on spare ones with what is
decoded from the rest of their groups."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from flashrecovery.redundancy.checkpoint.verify import checkpoints_in
from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import FSDP, HSDP, Job, Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
]
STEPS = 30
KILL_AFTER = 8
THREE = Layout("fsdp-on-three", FSDP.script, nproc=3)
SIX = Layout("fsdp-six", FSDP.script, nproc=6)
"""Two ranks on each of three nodes: two groups."""
FOUR = Layout("fsdp-on-four", FSDP.script, nproc=4)
REPLICAS = Layout("hsdp-on-four", HSDP.script, HSDP.flags, nproc=4)
NODES = {THREE.name: 3, SIX.name: 3, FOUR.name: 4, REPLICAS.name: 4}

net = hosts_of_a_test(6)
reference = references_of_a_module(STEPS, nnodes=lambda layout: NODES[layout.name])


def launch(
    net: Network, folder: Path, layout: Layout, losses: int = 1, spare: int = 1, options: tuple[str, ...] = ()
) -> NodesJob:
    parity = ("--redundancy", "parity", "--parity", str(losses), *options)
    return NodesJob(
        net, folder / "run", layout, nnodes=NODES[layout.name], spare=spare, steps=STEPS, options=list(parity)
    )


def check(ended: Job, reference: References, layout: Layout, lost: list[Host]) -> None:
    """The lost nodes' ranks were replaced, and the job ended with the bits of the launch without a fault."""
    assert sorted(e["node"] for e in ended.of("node_lost")) == sorted(host.name for host in lost), ended.explain()
    assert not ended.of("fallback_started")
    check_same(ended, reference(layout))


@pytest.mark.slow
def test_a_node_of_three_is_lost(net: Network, tmp_path: Path, reference: References) -> None:
    first, second, lost, spare, *_ = net.hosts
    job = launch(net, tmp_path, THREE)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(lost)
    check(job.wait(of=[first, second, spare]), reference, THREE, [lost])


@pytest.mark.grid
def test_any_two_nodes_of_four_are_lost_at_once(net: Network, tmp_path: Path, reference: References) -> None:
    first, second, third, fourth, *spares = net.hosts
    job = launch(net, tmp_path, FOUR, losses=2, spare=2)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(second)
    job.kill_node(third)
    check(job.wait(of=[first, fourth, *spares]), reference, FOUR, [second, third])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SIX, REPLICAS], ids=lambda layout: layout.name)
def test_a_node_with_members_of_several_groups_is_lost(
    layout: Layout, net: Network, tmp_path: Path, reference: References
) -> None:
    """Of HSDP no shard is without a replica: there is nothing for parity to do."""
    nodes = net.hosts[: NODES[layout.name] + 1]
    job = launch(net, tmp_path, layout)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(nodes[1])
    check(job.wait(of=[nodes[0], *nodes[2:]]), reference, layout, [nodes[1]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_node_is_lost_at_a_random_moment_and_later_another_one(
    seed: int, net: Network, tmp_path: Path, reference: References
) -> None:
    """While parity is encoded, too."""
    chance = random.Random(seed)
    first, second, third, *spares = net.hosts
    job = launch(net, tmp_path, THREE, spare=2)
    lost = [second, third]
    chance.shuffle(lost)
    for number, host in enumerate(lost):
        job.wait_for_step(KILL_AFTER * (number + 1))
        time.sleep(chance.uniform(0, 0.1))
        job.kill_node(host)
        job.wait_for("recovery_finished", number + 1)
    check(job.wait(of=[first, *spares[:2]]), reference, THREE, lost)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["recovery_started", "replace", "regroup", "restore"])
def test_a_second_node_is_lost_in_the_recovery_from_the_first(
    moment: str, net: Network, tmp_path: Path, reference: References
) -> None:
    """While what the first one had is decoded, too."""
    first, second, third, fourth, *spares = net.hosts
    job = launch(net, tmp_path, FOUR, losses=2, spare=2)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(second)
    deadline = time.monotonic() + 120
    while not any(moment in (e["event"], e.get("name")) for e in job.events()):
        assert time.monotonic() < deadline, job.stop().explain()
        time.sleep(0.001)
    job.kill_node(third)
    check(job.wait(of=[first, fourth, *spares]), reference, FOUR, [second, third])


@pytest.mark.slow
@pytest.mark.parametrize("redundancy", ["parity", "neighbor"])
def test_a_node_is_lost_while_a_checkpoint_is_written(
    redundancy: str, net: Network, tmp_path: Path, reference: References
) -> None:
    """That checkpoint is never complete; those before and after it are whole, and none of them is needed."""
    first, second, lost, spare, *_ = net.hosts
    saved = tmp_path / "checkpoints"
    config = tmp_path / "config.yaml"
    config.write_text(f"redundancy: {redundancy}\ncheckpoint: {{dir: {saved}, interval_s: 0.2, keep: 100}}\n")
    job = NodesJob(net, tmp_path / "run", THREE, nnodes=3, steps=STEPS, config=config)
    job.wait_for_step(KILL_AFTER)
    seen = {path.name for path in saved.glob(".pending-*")}
    deadline = time.monotonic() + 60
    while not (begun := {path.name for path in saved.glob(".pending-*")} - seen):
        assert time.monotonic() < deadline, job.stop().explain()
    job.kill_node(lost)
    ended = job.wait(of=[first, second, spare])
    check(ended, reference, THREE, [lost])
    whole = list(checkpoints_in(saved))
    assert len(whole) >= 2 and not any(one.wrong for one in whole), whole
    assert whole[-1].version > max(int(name.removeprefix(".pending-").split(".")[0]) for name in begun)


@pytest.mark.slow
def test_a_node_is_lost_with_all_ranks_of_the_others(net: Network, tmp_path: Path, reference: References) -> None:
    """What these held is in their nodes' snapshots, parity included."""
    first, second, lost, spare, *_ = net.hosts
    job = launch(net, tmp_path, THREE)
    job.wait_for_step(KILL_AFTER)
    doomed = [*job.pids(lost), *job.worker_pids(first), *job.worker_pids(second)]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    check(job.wait(of=[first, second, spare]), reference, THREE, [lost])


@pytest.mark.slow
def test_groups_are_formed_again_where_two_members_have_come_to_be_on_one_node(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """There is no spare node, but room for two ranks on each. Losing the node with two is survived, too: by then they
    are in different groups."""
    controller, *nodes = net.hosts[:5]
    config = tmp_path / "config.yaml"
    config.write_text("redundancy: parity\n")
    job = NodesJob(
        net,
        tmp_path / "run",
        FOUR,
        nnodes=4,
        spare=0,
        steps=STEPS,
        config=config,
        options=["--slots", "2"],
        alone=True,
    )
    job.wait_for_step(KILL_AFTER)
    job.kill_node(nodes[3])
    job.wait_for("recovery_finished")
    job.wait_for_step(KILL_AFTER + 6)
    (crowded,) = (host for host in nodes if len(job.worker_pids(host)) == 2)
    job.kill_node(crowded)
    left = [host for host in nodes[:3] if host != crowded]
    check(job.wait(of=[*left, controller]), reference, FOUR, [nodes[3], crowded])


@pytest.mark.slow
def test_more_nodes_are_lost_than_parity_covers(net: Network, tmp_path: Path) -> None:
    """It ends, and says what is lost."""
    first, second, third, *_ = net.hosts
    job = launch(net, tmp_path, THREE, spare=2)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(second)
    job.kill_node(third)
    ended = job.wait(of=[first])
    assert ended.code != 0
    assert any("cannot be recovered" in e["reason"] for e in ended.of("job_failed")), ended.explain()

"""A job on three hosts, one of them spare: whole nodes die or are cut off, and training goes on with the same bits.

The hosts are network namespaces; a cut link is silent. The reference is the same launch without a fault.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from flashrecovery.controller.storage.node_failure_file import FILE_NAME, add_marks, read_marks
from flashrecovery.plan.membership.node_failures import NodeMark
from tests.support import hosts, warner
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, FSDP, HSDP, Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 30
LONG = Layout("ddp-long", DDP.script, ("--steps", "60"))
LONGER = Layout("ddp-longer", DDP.script, ("--steps", "200"))
KILL_AFTER = 8
LOSSES = ("killed", "cut", "frozen")


def lose(how: str, net: Network, job: NodesJob, host: Host) -> None:
    """The host dies, loses its link, or stands still."""
    if how == "killed":
        job.kill_node(host)
    elif how == "cut":
        net.cut(host)
    else:
        job.signal_node(host, signal.SIGSTOP)


def bring_back(how: str, net: Network, job: NodesJob, host: Host) -> None:
    """A host that has not died goes on where it was."""
    if how == "cut":
        net.heal(host)
    else:
        job.signal_node(host, signal.SIGCONT)


net = hosts_of_a_test(3)
reference = references_of_a_module(STEPS, spare=1)


@pytest.mark.parametrize("layout", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_node(how: str, layout: Layout, net: Network, tmp_path: Path, reference: References) -> None:
    """Its ranks go to the spare node as a whole, with their state from the other nodes."""
    job = NodesJob(net, tmp_path / "run", layout, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    first, lost, spare = net.hosts
    lose(how, net, job, lost)
    stopped_at = -1
    if how != "killed":
        job.wait_for("recovery_finished")
        stopped_at = job.newest_step(lost)
        bring_back(how, net, job, lost)
        job.wait_for("node_joined", 4)  # fenced, and back as a spare
    ended = job.wait(of=[first, spare])
    (gone,) = ended.of("node_lost")
    assert gone["node"] == lost.name and gone["ranks"] == [2, 3]
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["cause"] == "node_lost"
    assert recovery["generation"] == 1
    check_same(ended, reference(layout))
    if how != "killed":
        assert job.newest_step(lost) == stopped_at, "the side without the controller has gone on"


def test_a_lost_node_that_had_one_of_two_stores(net: Network, tmp_path: Path, reference: References) -> None:
    """The groups of two ranks are spread over the stores of both nodes; the next generation has one on the spare."""
    several = tmp_path / "stores.yaml"
    several.write_text("stores: 2\n")
    job = NodesJob(net, tmp_path / "run", HSDP, steps=STEPS, options=("--config", str(several)))
    job.wait_for_step(KILL_AFTER)
    first, lost, spare = net.hosts
    job.kill_node(lost)
    ended = job.wait(of=[first, spare])
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["generation"] == 1
    check_same(ended, reference(HSDP))


@pytest.mark.parametrize("how", LOSSES)
def test_the_node_with_the_controller_is_lost(how: str, net: Network, tmp_path: Path, reference: References) -> None:
    """The other nodes elect another controller, which gives the lost ranks to the spare node."""
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    lost, second, spare = net.hosts
    lose(how, net, job, lost)
    stopped_at = -1
    if how != "killed":
        job.wait_for("recovery_finished")
        stopped_at = job.newest_step(lost)
        bring_back(how, net, job, lost)
    ended = job.wait(of=[second, spare])
    assert [e["kind"] for e in ended.of("notice")].count("controller_elected") == 1, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [0, 1] and recovery["generation"] == 1
    check_same(ended, reference(DDP))
    if how != "killed":
        assert job.newest_step(lost) == stopped_at, "the side without the controller has gone on"


def test_an_elected_controller_knows_the_checkpoints(net: Network, tmp_path: Path, reference: References) -> None:
    """Whichever node had published the newest one: all ranks die at once, and it is what is left."""
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-interval", "0.5")
    job = NodesJob(net, tmp_path / "run", LONG, steps=60, options=options)
    saved = job.wait_for("checkpoint_saved", 2)
    job.kill_node(net.hosts[0])
    job.wait_for("recovery_finished")
    for rank, host in job.rank_hosts().items():
        job.kill_worker(host, rank)
    ended = job.wait(of=net.hosts[1:])
    (fallback,) = ended.of("fallback_started")
    assert fallback["version"] >= saved["version"], ended.explain()
    check_same(ended, reference(LONG))


def test_a_node_that_is_started_again(net: Network, tmp_path: Path, reference: References) -> None:
    """As by a scheduler, with the same command and name: it joins as a spare node, and takes over in its turn."""
    job = NodesJob(net, tmp_path / "run", LONGER)
    job.wait_for_step(KILL_AFTER)
    first, lost, spare = net.hosts
    job.kill_node(lost)
    job.wait_for("recovery_finished")
    job.start_again(lost)
    job.wait_for("node_joined", 4)
    job.kill_node(spare)
    ended = job.wait(of=[first, lost])
    assert [(e["node"], e["ranks"]) for e in ended.of("node_lost")] == [(lost.name, [2, 3]), (spare.name, [2, 3])]
    assert [e["generation"] for e in ended.of("recovery_finished")] == [1, 2]
    table = {r["rank"]: r["node"] for r in json.loads((job.run_dir / "ranktable.json").read_text())["ranks"]}
    assert table == {0: first.name, 1: first.name, 2: lost.name, 3: lost.name}
    check_same(ended, reference(LONGER))


def test_the_controllers_node_is_started_again_before_another_is_elected(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """It begins as the job's first node, with a controller for which no process comes; the others elect another one."""
    job = NodesJob(net, tmp_path / "run", LONGER)
    job.wait_for_step(KILL_AFTER)
    lost, second, spare = net.hosts
    for host in (second, spare):
        job.signal_node(host, signal.SIGSTOP)
    job.kill_node(lost)
    job.start_again(lost)
    job.wait_for("node_joined", 4)  # its own, to its own controller
    for host in (second, spare):
        job.signal_node(host, signal.SIGCONT)
    ended = job.wait(of=[lost, second, spare])
    assert [e["kind"] for e in ended.of("notice")].count("controller_elected") == 1, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [0, 1] and recovery["generation"] == 1
    check_same(ended, reference(LONGER))


def test_a_node_that_comes_back_with_another_address(net: Network, tmp_path: Path, reference: References) -> None:
    """As a pod that is re-created. There is no spare node: its ranks have waited for it."""
    job = NodesJob(net, tmp_path / "run", LONG, nnodes=2, spare=0)
    job.wait_for_step(KILL_AFTER)
    first, lost, _ = net.hosts
    job.kill_node(lost)
    job.wait_for("node_lost")
    net.readdress(lost, "10.77.0.99")
    job.start_again(lost)
    ended = job.wait(of=[first, lost])
    assert [e["host"] for e in ended.of("node_joined") if e["node"] == lost.name] == [lost.address, "10.77.0.99"]
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3]
    check_same(ended, reference(LONG))


def test_a_controller_that_is_killed_and_started_again(net: Network, tmp_path: Path, reference: References) -> None:
    """Training goes on without it; the new one finds the job running, and recovers its next failure."""
    job = NodesJob(net, tmp_path / "run", LONG, alone=True)
    job.wait_for_step(KILL_AFTER)
    job.kill_agent(net.hosts[0])
    without = job.newest_step()
    job.wait_for_step(without + 5)
    assert not [e for e in job.of("notice") if e["kind"] == "taken_over"]
    job.start_controller()
    job.wait_for("notice", 2)  # how the ranks are protected, and taken_over
    job.kill_worker(net.hosts[1], rank=1)
    ended = job.wait()
    assert [e["kind"] for e in ended.of("notice")][-1] == "taken_over"
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [1] and recovery["generation"] == 1
    check_same(ended, reference(LONG))


def test_a_hang_is_blamed_on_its_culprit_on_another_node(net: Network, tmp_path: Path, reference: References) -> None:
    """Three of four ranks wait, one of them on the same node; the others are with the controller."""
    options = ("--hang-timeout", "3", "--inject", f"rank=3,fault=hang,at=backward,step={KILL_AFTER}")
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS, options=options)
    ended = job.wait()
    (failure,) = ended.of("failure_detected")
    assert failure["kind"] == "hang" and failure["rank"] == 3, ended.explain()
    assert "3 ranks wait for it in group" in failure["evidence"], failure
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [3]
    check_same(ended, reference(DDP))


def test_a_warned_node_is_replaced_as_a_whole_with_the_next_failure(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """A device plugin warns of the second node; then one of its ranks dies. Both move to the spare node."""
    (tmp_path / "fast.yaml").write_text("timeouts: {health_s: 0.1}\n")
    options = ("--health", "warner", "--config", str(tmp_path / "fast.yaml"))
    job = NodesJob(net, tmp_path / "run", FSDP, steps=STEPS, options=options, env=warner.installed(tmp_path / "site"))
    job.wait_for_step(KILL_AFTER)
    _, warned, spare = net.hosts
    (job.run_dir / "nodes" / warned.name / warner.FILE).touch()
    job.wait_for_notice("health_warning")
    job.kill_worker(warned, rank=3)
    ended = job.wait()
    (recovery,) = ended.of("recovery_finished")
    assert sorted(recovery["victims"]) == [2, 3] and recovery["cause"] == "killed", ended.explain()
    (notice,) = ended.notices("node_replaced")
    assert f"ranks 2 and 3 go to node {spare.name}" in notice["text"] and "about to break" in notice["text"]
    assert not ended.of("node_lost") and ended.of("node_joined")[-1]["node"] == warned.name
    check_same(ended, reference(FSDP))


def test_a_short_break_is_none(net: Network, tmp_path: Path, reference: References) -> None:
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    for host in net.hosts[1:]:
        net.cut(host)
        time.sleep(0.3)
        net.heal(host)
        time.sleep(1.0)
    ended = job.wait()
    assert not ended.of("node_lost") and not ended.of("recovery_started")
    check_same(ended, reference(DDP))


def test_a_node_that_has_failed_in_other_jobs(net: Network, tmp_path: Path, reference: References) -> None:
    """It is excluded: at the launch the spare node stands in for it. When that one is lost, and no other node has come
    in the time for it, the excluded one takes its ranks after all. The loss is remembered for the next job."""
    first, bad, spare = net.hosts
    file, now = tmp_path / FILE_NAME, time.time()
    add_marks(file, [NodeMark(now - 3600 * i, bad.name, "device", f"job{i}") for i in range(4)])
    (tmp_path / "short.yaml").write_text("timeouts: {node_wait_s: 3}\n")
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS, config=tmp_path / "short.yaml")
    job.wait_for_step(KILL_AFTER)
    table = json.loads((job.run_dir / "ranktable.json").read_text())["ranks"]
    assert [entry["node"] for entry in table] == [first.name, first.name, spare.name, spare.name]
    job.kill_node(spare)
    ended = job.wait(of=[first, bad])
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["cause"] == "node_lost", ended.explain()
    said = [notice["text"] for notice in ended.notices("node_excluded")]
    assert len(said) == 2 and "4 x device in 4 jobs" in said[0] and "although it is excluded" in said[1], said
    (waiting,) = ended.notices("waiting_for_node")
    assert f"node {bad.name} is excluded" in waiting["text"]
    check_same(ended, reference(DDP))
    newest = read_marks(file).marks[-1]
    assert (newest.node, newest.kind, newest.job) == (spare.name, "node_lost", str(job.run_dir))

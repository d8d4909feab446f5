"""Elastic jobs on several hosts whose state is sharded among the ranks, or whose replicas have several ranks: a whole
node is lost or leaves, there is no spare one, and the others go on, bit for bit as a job of one host that was resized
by command at the same step. The hosts are network namespaces.

A node is lost in a phase by a fault ``sigstop`` that freezes one of its ranks there; then the whole node is killed, or
its link is cut.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.elastic_nodes import (
    DDP,
    DISTRIBUTED,
    FSDP2,
    HSDP,
    LONG,
    REPLICAS,
    SHARDED,
    TENSOR,
    TP2,
    ZERO2,
    ZERO3,
    Kind,
    Resized,
    check_as_commanded,
    drain,
    inject,
    launch,
    lose,
    of_kinds,
    resize,
    resized_once,
    wait_until_frozen,
)
from tests.support.hosts import Network
from tests.support.nodes import NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(600),
    pytest.mark.grid,
]
AT = 7
NEVER_GROWS = {"grow": "never"}
"""A node that comes is spare: the size stays as it is."""
two_hosts, three_hosts = hosts_of_a_test(2), hosts_of_a_test(3)
four_hosts, five_hosts = hosts_of_a_test(4), hosts_of_a_test(5)
PHASES = ("forward", "backward", "optimizer", "commit")


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("how", ["killed", "cut"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", of_kinds(*SHARDED, *REPLICAS))
def test_a_node_of_two(kind: Kind, phase: str, how: str, two_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """Half of the job: what its two ranks had is on the other node. Those that stay are neighbours on one node."""
    first, lost = two_hosts.hosts
    job = launch(two_hosts, tmp_path, kind, faults=[f"rank=2,fault=sigstop,at={phase},step={AT}"])
    wait_until_frozen(job, lost)
    lose(job, lost, how)
    ended = job.wait(of=[first])
    check_as_commanded(kind, ended, 4 // kind.each, resized)
    assert {rank for event in ended.of("job_resized") for rank in event["left"]} == {2, 3}, ended.explain()
    assert ended.of("node_lost") and not ended.notices("waiting_for_node"), ended.explain()


@pytest.mark.parametrize("kind", of_kinds(*SHARDED, *REPLICAS))
def test_one_after_the_other(kind: Kind, three_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """The copies of those that stay are on other nodes in the new size, too: a second node can be lost."""
    first, second, third = three_hosts.hosts
    faults = [f"rank=2,fault=sigstop,at=backward,step={AT}"]
    job = launch(three_hosts, tmp_path, kind, faults=faults)
    wait_until_frozen(job, second)
    lose(job, second)
    job.wait_for("recovery_finished")
    inject(job, 5, "optimizer")
    wait_until_frozen(job, third)
    lose(job, third)
    ended = job.wait(of=[first])
    check_as_commanded(kind, ended, 6 // kind.each, resized)
    assert [event["left"] for event in ended.of("job_resized")] == [[2, 3], [4, 5]], ended.explain()


STATES = ("quiescing", "regrouping", "restoring", "reshaping", "verifying", "resuming")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO2))
def test_a_second_node_during_the_change(
    kind: Kind, state: str, four_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """Neither has the other's copies."""
    first, second, third, fourth = four_hosts.hosts
    faults = [f"rank=1,fault=sigstop,at=backward,step={AT}", f"rank=3,fault=sigstop,at=recovery:{state}"]
    job = launch(four_hosts, tmp_path, kind, per_node=1, faults=faults)
    wait_until_frozen(job, second)
    lose(job, second)
    wait_until_frozen(job, fourth)
    lose(job, fourth)
    ended = job.wait(of=[first, third])
    check_as_commanded(kind, ended, 4, resized)
    assert {rank for event in ended.of("job_resized") for rank in event["left"]} == {1, 3}, ended.explain()


@pytest.mark.parametrize("kind", of_kinds(*SHARDED, *REPLICAS))
def test_the_node_with_the_controller(kind: Kind, three_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """The others elect another one, which knows what the lost ranks had from their copies."""
    first, second, third = three_hosts.hosts
    job = launch(three_hosts, tmp_path, kind, faults=[f"rank=0,fault=sigstop,at=backward,step={AT}"])
    wait_until_frozen(job, first)
    lose(job, first)
    ended = job.wait(of=[second, third])
    check_as_commanded(kind, ended, 6 // kind.each, resized)
    assert {rank for event in ended.of("job_resized") for rank in event["left"]} == {0, 1}, ended.explain()


@pytest.mark.parametrize("kind", of_kinds(FSDP2, HSDP))
def test_the_node_with_the_controller_returns(
    kind: Kind, three_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """To another controller, with the command with which it had begun the job."""
    first, second, third = three_hosts.hosts
    job = launch(three_hosts, tmp_path, kind, steps=LONG)
    job.wait_for_step(AT)
    lose(job, first)
    job.wait_for("recovery_finished")
    job.start_again(first)
    job.wait_for("job_resized", 2)
    job.wait_for("recovery_finished", 2)
    assert [job.rank_hosts()[rank] for rank in (0, 2, 4)] == [first, second, third]
    ended = job.wait(of=[second, third])
    sizes = check_as_commanded(kind, ended, 6 // kind.each, resized, end=LONG)
    assert [size * kind.each for _, size in sizes] == [4, 6], ended.explain()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO2))
def test_the_node_with_the_controller_during_the_change(
    kind: Kind, state: str, five_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """A node is lost, and then the one with the controller and a rank, whose part is on another node."""
    first, second, third, fourth, fifth = five_hosts.hosts
    faults = [f"rank=3,fault=sigstop,at=backward,step={AT}", f"rank=0,fault=sigstop,at=recovery:{state}"]
    job = launch(five_hosts, tmp_path, kind, per_node=1, faults=faults, flags=("--global-batch", "120"))
    wait_until_frozen(job, fourth)
    lose(job, fourth)
    wait_until_frozen(job, first)
    lose(job, first)
    ended = job.wait(of=[second, third, fifth])
    check_as_commanded(replace(kind, flags=(*kind.flags, "--global-batch", "120")), ended, 5, resized)
    assert ended.of("job_resized")[-1]["ranks"] == [1, 2, 4], ended.explain()


@pytest.mark.parametrize("how", ["killed", "cut"])
@pytest.mark.parametrize("kind", of_kinds(*SHARDED, *REPLICAS))
def test_a_node_returns(kind: Kind, how: str, two_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """Its ranks are built up there, and get their parts over the network."""
    _, lost = two_hosts.hosts
    faults = [f"rank=2,fault=sigstop,at=backward,step={AT}"]
    job = launch(two_hosts, tmp_path, kind, steps=LONG, faults=faults)
    wait_until_frozen(job, lost)
    lose(job, lost, how)
    job.wait_for("recovery_finished")
    if how == "killed":
        job.start_again(lost)
    else:
        two_hosts.heal(lost)
    job.wait_for("job_resized", 2)
    job.wait_for("recovery_finished", 2)
    assert {rank: host.name for rank, host in job.rank_hosts().items()} == {
        0: "host0",
        1: "host0",
        2: "host1",
        3: "host1",
    }
    ended = job.wait()
    sizes = check_as_commanded(kind, ended, 4 // kind.each, resized, end=LONG)
    assert [size * kind.each for _, size in sizes] == [2, 4], ended.explain()
    (growth,) = [e for e in ended.of("recovery_finished") if e["cause"] == "resize"]
    assert growth["victims"] == [] and growth["bytes"] > 0, growth
    if kind in SHARDED:  # each byte that a rank lacked has gone once
        assert 0 < growth["lacking_bytes"] <= growth["reshaped_bytes"] <= 1.05 * growth["lacking_bytes"], growth
    print(f"{kind}: pause of the growth {growth['total_s']:.2f} s, {growth['phases']}")


@pytest.mark.parametrize("order", [(3, 2, 1), (1, 2, 3)])
@pytest.mark.parametrize("kind", of_kinds(DDP, FSDP2, ZERO3))
def test_down_to_one_and_back(
    kind: Kind, order: tuple[int, ...], four_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """One node after the other is lost, and then all come back. The one that was lost last was kept in mind by nodes
    that had been lost before; or the one that was lost first by nodes that were lost after it."""
    first, *others = four_hosts.hosts
    job = launch(four_hosts, tmp_path, kind, per_node=1, steps=130, elastic=NEVER_GROWS)
    job.wait_for_step(5)
    for number, host in enumerate((four_hosts.hosts[at] for at in order), 1):
        lose(job, host)
        job.wait_for("recovery_finished", number)
        job.wait_for_step(job.newest_step(first) + 2)
    for host in others:
        job.start_again(host)
    for host in others:
        job.wait_for_join(host, 2)
    assert resize(job, 4) == ""
    job.wait_for("recovery_finished", 4)
    ended = job.wait(timeout_s=240)
    assert ended.code == 0 and not ended.notices("joining_process_given_up"), ended.explain()
    sizes = check_as_commanded(kind, ended, 4, resized, end=130)
    assert [size for _, size in sizes] == [3, 2, 1, 4], ended.explain()


@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO2, HSDP, TP2))
def test_drained_without_a_spare_node(kind: Kind, two_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """Its ranks leave at a step boundary, and no step is done again."""
    first, left = two_hosts.hosts
    job = launch(two_hosts, tmp_path, kind)
    job.wait_for_step(AT)
    assert drain(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=90)
    assert job.popens[left.name].wait(20) == 0, "its agent has ended well"
    ended = job.wait(of=[first])
    check_as_commanded(kind, ended, 4 // kind.each, resized)
    assert not ended.of("failure_detected") and not ended.of("node_lost"), ended.explain()


@pytest.mark.parametrize("state", ("regrouping", "restoring", "reshaping", "verifying", "resuming"))
@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO2))
def test_a_members_node_is_lost_while_another_one_comes_in(
    kind: Kind, state: str, three_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """Of six ranks there are four, and those that come, and then those without the node."""
    first, second, third = three_hosts.hosts
    job = launch(three_hosts, tmp_path, kind, steps=LONG)
    job.wait_for_step(AT)
    lose(job, third)
    job.wait_for("recovery_finished")
    inject(job, 2, f"recovery:{state}")
    job.start_again(third)
    wait_until_frozen(job, second)
    lose(job, second)
    ended = job.wait(of=[first, third])
    check_as_commanded(kind, ended, 6 // kind.each, resized, end=LONG)
    assert ended.of("job_resized")[-1]["ranks"] == [0, 1, 4, 5], ended.explain()
    assert not ended.notices("joining_process_given_up"), ended.explain()


def of_three_with_a_spare_node(net: Network, folder: Path, kind: Kind) -> NodesJob:
    """A job of four that has lost its last node, which has come back as a spare one."""
    *_, last = net.hosts
    job = launch(net, folder, kind, per_node=1, steps=LONG, elastic=NEVER_GROWS)
    job.wait_for_step(AT)
    lose(job, last)
    job.wait_for("recovery_finished")
    job.start_again(last)
    job.wait_for_join(last, 2)
    return job


@pytest.mark.parametrize("kind", of_kinds(DDP, *SHARDED))
def test_replaced_in_the_new_size_on_another_node(
    kind: Kind, four_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """A node is lost, comes back as a spare one, and takes the rank of another one that is lost then."""
    _, second, _, fourth = four_hosts.hosts
    job = of_three_with_a_spare_node(four_hosts, tmp_path, kind)
    inject(job, 1, "optimizer")
    wait_until_frozen(job, second)
    lose(job, second)
    job.wait_for("recovery_finished", 2)
    assert job.rank_hosts()[1] == fourth
    ended = job.wait(of=[four_hosts.hosts[0]])
    check_as_commanded(kind, ended, 4, resized, end=LONG)
    assert [e["victims"] for e in ended.of("recovery_finished")] == [[3], [1]], ended.explain()
    assert [e["left"] for e in ended.of("job_resized")] == [[3]], ended.explain()


@pytest.mark.parametrize("kind", of_kinds(DDP, *SHARDED))
def test_the_node_with_the_controller_is_replaced_in_the_new_size(
    kind: Kind, four_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """The next controller does not know what its rank had, which is filled on a spare node: the copies tell."""
    first, second, third, fourth = four_hosts.hosts
    job = of_three_with_a_spare_node(four_hosts, tmp_path, kind)
    inject(job, 0, "optimizer")
    wait_until_frozen(job, first)
    lose(job, first)
    ended = job.wait(of=[second, third, fourth])
    check_as_commanded(kind, ended, 4, resized, end=LONG)
    assert {rank for e in ended.of("job_resized") for rank in e["left"]} == {3}, ended.explain()
    assert [e["victims"] for e in ended.of("recovery_finished")] == [[3], [0]], ended.explain()


@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO2))
def test_two_nodes_with_room_for_one(kind: Kind, five_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """Lost at once, with one spare node: one of the two ranks is filled there, the other one leaves."""
    first, second, third, fourth, spare = five_hosts.hosts
    job = launch(five_hosts, tmp_path, kind, per_node=1, spare=1, steps=LONG)
    job.wait_for_step(AT)
    lose(job, second)
    lose(job, fourth)
    ended = job.wait(of=[first, third, spare])
    check_as_commanded(kind, ended, 4, resized, end=LONG)
    (last,) = {tuple(event["ranks"]) for event in ended.of("job_resized")[-1:]}
    assert len(last) == 3 and {0, 2} < {*last}, ended.explain()


@pytest.mark.parametrize("kind", of_kinds(FSDP2, ZERO3, DISTRIBUTED, HSDP, TP2))
def test_drained_in_the_new_size_with_a_spare_node(
    kind: Kind, three_hosts: Network, tmp_path: Path, resized: Resized
) -> None:
    """Its ranks move at a step boundary, with the parts that they have in the new size, and no step is done again."""
    first, second, third = three_hosts.hosts
    job = launch(three_hosts, tmp_path, kind, steps=LONG, elastic=NEVER_GROWS)
    job.wait_for_step(AT)
    lose(job, third)
    job.wait_for("recovery_finished")
    job.start_again(third)
    job.wait_for_join(third, 2)
    assert drain(job, second) == ""
    job.wait_for_notice("node_left", timeout_s=90)
    assert job.popens[second.name].wait(20) == 0, "its agent has ended well"
    assert set(job.rank_hosts().values()) == {first, third}
    ended = job.wait(of=[first])
    check_as_commanded(kind, ended, 6 // kind.each, resized, end=LONG)
    assert [e["cause"] for e in ended.of("recovery_finished")] == ["node_lost", "handoff"], ended.explain()
    for log in ended.run_dir.rglob("rank0.*.log"):
        steps = [line.split()[0] for line in log.read_text().splitlines() if line.startswith("step=")]
        assert len(steps) - len({*steps}) <= 1, f"more was done again than the step of the loss: {log}"


@pytest.mark.parametrize("kind", of_kinds(*REPLICAS, TENSOR))
def test_a_replica_on_two_nodes(kind: Kind, four_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    """Its other rank, which is on the node with the controller, leaves with exit code 0; the job goes on on two other
    nodes, and grows when the lost one comes back."""
    _, second, third, fourth = four_hosts.hosts
    faults = [f"rank=1,fault=sigstop,at=backward,step={AT}"]
    job = launch(four_hosts, tmp_path, kind, per_node=1, steps=LONG, faults=faults)
    wait_until_frozen(job, second)
    lose(job, second)
    job.wait_for("recovery_finished")
    assert set(job.rank_hosts().values()) == {third, fourth}
    job.start_again(second)
    job.wait_for("job_resized", 2)
    job.wait_for("recovery_finished", 2)
    assert {*job.rank_hosts().values()} == {*four_hosts.hosts}
    ended = job.wait()
    sizes = check_as_commanded(kind, ended, 2, resized, end=LONG)
    assert [size for _, size in sizes] == [1, 2], ended.explain()
    (left,) = (n["text"] for n in ended.notices("rank_left") if n["rank"] == 0)
    assert left.endswith("exit code 0"), ended.explain()


def test_replicas_that_all_lose_something_with_a_node_are_refused(two_hosts: Network, tmp_path: Path) -> None:
    """The ranks at the same place of the two replicas are on one node."""
    kind = Kind("stride", TENSOR.script, ("--kind", "tensor", "--stride"), TENSOR.steps_alike, each=2)
    ended = launch(two_hosts, tmp_path, kind).wait()
    assert ended.code != 0, ended.explain()
    assert "one node has all that there is of some state" in ended.of("job_failed")[0]["reason"], ended.explain()

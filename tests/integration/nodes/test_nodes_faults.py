"""Nodes, links and controllers that fail in the middle of a recovery, one after the other, or only half."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, Job, Layout, References, check_same, read_events
from tests.support.nodes import PORT, NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 40
KILL_AFTER = 8
THREE = Layout("ddp-on-three", DDP.script, nproc=3)
"""On three nodes: the rank that dies first does not keep what the lost node takes with it."""
LOSSY = Layout("ddp-lossy", DDP.script, ("--steps", "150"))
PEER_ERROR_WAIT_S = 1.5
DECISIONS = ("failure_detected", "node_lost", "recovery_started")
"""Events of a controller that does something about a failure."""
MOMENTS = ("recovery_started", "quiesce", "replace", "regroup", "restore")
"""The end of one phase of a recovery is the beginning of the next one."""


net = hosts_of_a_test(4)
reference = references_of_a_module(STEPS, nnodes=lambda layout: 3 if layout is THREE else 2)


def await_moment(job: NodesJob, moment: str) -> None:
    def has_come() -> bool:
        return any(moment in (e["event"], e.get("name")) for e in job.events())

    deadline = time.monotonic() + 120
    while not has_come():
        assert time.monotonic() < deadline, f"{moment} has not come\n{job.stop().explain()}"
        time.sleep(0.001)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_node_is_lost_during_a_recovery(moment: str, net: Network, tmp_path: Path, reference: References) -> None:
    first, second, third, fourth = net.hosts
    job = NodesJob(net, tmp_path / "run", THREE, nnodes=3, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    job.kill_worker(first, rank=0)
    await_moment(job, moment)
    job.kill_node(second)
    ended = job.wait(of=[first, third, fourth])
    assert [e["ranks"] for e in ended.of("node_lost")] == [[1]]
    assert sorted({v for e in ended.of("recovery_finished") for v in e["victims"]}) == [0, 1]
    check_same(ended, reference(THREE))


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_controllers_node_is_lost_during_a_recovery(
    moment: str, net: Network, tmp_path: Path, reference: References
) -> None:
    first, second, third, fourth = net.hosts
    job = NodesJob(net, tmp_path / "run", THREE, nnodes=3, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    job.kill_worker(third, rank=2)
    await_moment(job, moment)
    job.kill_node(first)
    ended = job.wait(of=[second, third, fourth])
    assert [e["kind"] for e in ended.of("notice")].count("controller_elected") == 1, ended.explain()
    check_same(ended, reference(THREE))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_controller_is_killed_during_a_recovery(
    moment: str, net: Network, tmp_path: Path, reference: References
) -> None:
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS, alone=True)
    job.wait_for_step(KILL_AFTER)
    job.kill_worker(net.hosts[2], rank=3)
    await_moment(job, moment)
    job.kill_agent(net.hosts[0])
    time.sleep(0.5)
    job.start_controller()
    ended = job.wait()
    assert "taken_over" in [e["kind"] for e in ended.of("notice")]
    check_same(ended, reference(DDP))


def test_two_ranks_on_two_nodes_that_miss_one_deadline_are_one_recovery(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """They are stopped, and a third one is killed: neither of them answers that it holds. State T alone is no failure
    here."""
    config = tmp_path / "config.yaml"
    config.write_text("timeouts: {stopped_s: 300, stop_ack_s: 5, mutation_grace_s: 1}\n")
    job = NodesJob(net.part(2), tmp_path / "run", DDP, steps=STEPS, config=config)
    first, second = net.hosts[:2]
    job.wait_for_step(KILL_AFTER)
    job.signal_worker(first, 1, signal.SIGSTOP)
    job.signal_worker(second, 2, signal.SIGSTOP)
    job.kill_worker(second, rank=3)
    ended = job.wait()
    found = [(e["rank"], e["kind"]) for e in ended.of("failure_detected")]
    assert found == [(3, "killed"), (1, "unresponsive"), (2, "unresponsive")], ended.explain()
    assert [e["victims"] for e in ended.of("recovery_started")] == [[3], [3, 1, 2]], ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [3, 1, 2] and recovery["generation"] == 1
    check_same(ended, reference(DDP))


@pytest.mark.parametrize("then", ["started again", "elected"])
def test_a_rank_dies_while_no_controller_is_there(
    then: str, net: Network, tmp_path: Path, reference: References
) -> None:
    """Its peers wait for one, longer than they would wait for its word. No more is replaced than the dead rank, or
    where another controller is elected, its node, which stands still with the first one."""
    config = tmp_path / "config.yaml"
    config.write_text(f"timeouts: {{peer_error_wait_s: {PEER_ERROR_WAIT_S}}}\n")
    alone = then == "started again"
    job = NodesJob(net.part(3), tmp_path / "run", DDP, steps=STEPS, config=config, alone=alone)
    first, second, third = net.hosts[:3]
    job.wait_for_step(KILL_AFTER)
    job.signal_agent(first, signal.SIGKILL if alone else signal.SIGSTOP)
    job.kill_worker(third if alone else first, rank=3 if alone else 1)
    if alone:
        time.sleep(4 * PEER_ERROR_WAIT_S)
        job.start_controller()
    else:
        job.wait_for("recovery_finished")
        job.kill_node(first)
    ended = job.wait(of=[second, third])
    took_over = "taken_over" if alone else "controller_elected"
    assert [e["kind"] for e in ended.of("notice")].count(took_over) == 1, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == ([3] if alone else [0, 1]) and recovery["generation"] == 1, ended.explain()
    check_same(ended, reference(DDP))


def test_a_controller_that_comes_back_decides_nothing(net: Network, tmp_path: Path, reference: References) -> None:
    """It stood still while another one was elected. What its electors had sent to it comes only now, out of its
    sockets, and so does the death of a rank of its own host."""
    job = NodesJob(net.part(3), tmp_path / "run", DDP, steps=STEPS)
    first, second, spare = net.hosts[:3]
    job.wait_for_step(KILL_AFTER)
    job.signal_agent(first, signal.SIGSTOP)
    job.kill_worker(first, rank=0)
    job.wait_for("recovery_finished")
    job.signal_agent(first, signal.SIGCONT)
    job.wait_for_join(first, 2)  # fenced, and back as a spare
    ended = job.wait(of=[second, spare])
    _check_one_decides(job, ended)
    check_same(ended, reference(DDP))


def test_a_controller_that_comes_back_amid_an_election_does_not_take_its_term(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """An elector has voted, and the node that it has elected stands still before it can say that it leads. The first
    one hears of the promise, and what its electors had sent to it before they voted."""
    job = NodesJob(net.part(3), tmp_path / "run", DDP, steps=STEPS)
    first, second, spare = net.hosts[:3]
    job.wait_for_step(KILL_AFTER)
    job.signal_agent(first, signal.SIGSTOP)
    job.kill_worker(first, rank=0)
    elected = _await_vote(job, (second, spare))
    job.signal_agent(elected, signal.SIGSTOP)
    assert not _elections(job), "it has said that it leads"
    job.signal_agent(first, signal.SIGCONT)
    time.sleep(2.0)
    job.signal_agent(elected, signal.SIGCONT)
    ended = job.wait(of=[second, spare])
    _check_one_decides(job, ended)
    check_same(ended, reference(DDP))


def _await_vote(job: NodesJob, electors: Sequence[Host]) -> Host:
    """Whom one of them has voted for, as soon as it has."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for candidate in electors:
            if any(f"votes for node {candidate.name} as controller" in job.output_of(h) for h in electors):
                return candidate
        time.sleep(0.001)
    raise AssertionError(f"no node has voted\n{job.stop().explain()}")


def _elections(job: NodesJob) -> int:
    return sum(e["kind"] == "controller_elected" for e in job.of("notice"))


def _check_one_decides(job: NodesJob, ended: Job) -> None:
    """One controller has been elected, and the first one, which had stood still, has decided nothing since."""
    assert _elections(job) == 1, ended.explain()
    decided = [e for e in read_events(job.run_dir) if e["event"] in DECISIONS]
    assert not decided, f"the first controller has decided: {decided}\n{ended.explain()}"
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] in ([0], [0, 1]) and recovery["generation"] == 1, ended.explain()


def test_two_nodes_are_lost_one_after_the_other(net: Network, tmp_path: Path, reference: References) -> None:
    """There is one spare node only; the second one's ranks wait until a node is started again."""
    first, second, third, _ = net.hosts
    job = NodesJob(net.part(3), tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    job.kill_node(second)
    job.wait_for("recovery_finished")
    job.kill_node(third)
    job.wait_for("node_lost", 2)
    job.start_again(second)
    ended = job.wait(of=[first, second])
    assert "waiting_for_node" in [e["kind"] for e in ended.of("notice")]
    assert [e["victims"] for e in ended.of("recovery_finished")] == [[2, 3], [2, 3]]
    check_same(ended, reference(DDP))


def test_two_nodes_are_started_again_before_a_controller_is_elected(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """The lost controller's node begins as the job's first one, and a spare node comes to it. Both find the one that is
    elected then."""
    lost, second, third, fourth = net.hosts
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    for host in (second, third):
        job.signal_node(host, signal.SIGSTOP)
    for host in (lost, fourth):
        job.kill_node(host)
    for host, joined in ((lost, 5), (fourth, 6)):
        job.start_again(host)
        job.wait_for("node_joined", joined)
    for host in (second, third):
        job.signal_node(host, signal.SIGCONT)
    ended = job.wait(of=[lost, second, third, fourth])
    assert [e["kind"] for e in ended.of("notice")].count("controller_elected") == 1, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [0, 1] and recovery["generation"] == 1
    check_same(ended, reference(DDP))


def test_a_link_is_down_for_three_seconds(net: Network, tmp_path: Path, reference: References) -> None:
    first, second, third, fourth = net.hosts
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    net.cut(second)
    time.sleep(3.0)
    net.heal(second)
    ended = job.wait(of=[first, third, fourth])
    assert [e["ranks"] for e in ended.of("node_lost")] == [[2, 3]]
    check_same(ended, reference(DDP))


@pytest.mark.skipif(not hosts.can_lose(), reason="needs nft")
@pytest.mark.parametrize("way", ["to", "from"])
def test_packets_are_lost_one_way(way: str, net: Network, tmp_path: Path, reference: References) -> None:
    """A node that is heard but hears nothing, or the other way round, is lost, and knows it in time."""
    first, second, third, fourth = net.hosts
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    net.lose(second, 100, to_host=way == "to", from_host=way == "from")
    job.wait_for("recovery_finished")
    stopped_at = job.newest_step(second)
    net.lose(second, 0)
    job.wait_for("node_joined", 5)
    ended = job.wait(of=[first, third, fourth])
    assert [e["ranks"] for e in ended.of("node_lost")] == [[2, 3]]
    check_same(ended, reference(DDP))
    assert job.newest_step(second) == stopped_at


@pytest.mark.skipif(not hosts.can_lose(), reason="needs nft")
def test_some_packets_are_lost_for_a_minute(net: Network, tmp_path: Path, reference: References) -> None:
    job = NodesJob(net, tmp_path / "run", LOSSY, step_ms=500)
    job.wait_for_step(KILL_AFTER)
    for host in net.hosts:
        net.lose(host, 2.5)  # of what it sends and of what it gets: 5 % of each packet's way
    time.sleep(60)
    assert all(p.poll() is None for p in job.popens.values()), "the job has ended before"
    for host in net.hosts:
        net.lose(host, 0)
    ended = job.wait()
    assert not ended.of("node_lost") and not ended.of("recovery_started"), ended.explain()
    check_same(ended, reference(LOSSY))


def test_strangers_are_refused_and_harmless(net: Network, tmp_path: Path, reference: References) -> None:
    """A node with another token, and garbage on every port of controller and agents."""
    first, second, third, stranger = net.hosts
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS, tokens={stranger.name: "another-token-of-16"})
    job.wait_for_step(KILL_AFTER)
    assert job.popens[stranger.name].wait(60) != 0
    assert "token" in job.output_of(stranger)
    sent = 0
    for host in (first, second, third):
        for port in job.agent_ports(host):
            for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00"):
                _send_from(stranger, host, port, data)
                sent += 1
    assert sent >= 9 and PORT in job.agent_ports(first)
    ended = job.wait(of=[first, second, third])
    assert not ended.of("node_lost") and not ended.of("recovery_started"), ended.explain()
    check_same(ended, reference(DDP))


def _send_from(source: hosts.Host, to: hosts.Host, port: int, data: bytes) -> None:
    program = (
        "import socket, sys\n"
        f"with socket.create_connection(({to.address!r}, {port}), 2) as s:\n"
        "    s.settimeout(0.5)\n"
        "    try:\n"
        "        s.sendall(sys.stdin.buffer.read())\n"
        "        s.recv(100)\n"
        "    except OSError as e:\n"
        "        print(e)\n"
    )
    subprocess.run([*source.command, "python3", "-c", program], input=data, check=True, capture_output=True, timeout=20)

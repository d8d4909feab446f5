"""Agents that speak to the controller through others: what is lost and found does not depend on which of them carries
which.

Four hosts of which two may speak to the controller themselves: the first, which has it and carries no one, and another
one, which carries the other two.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, Job, Layout, References, check_same
from tests.support.nodes import PORT, NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 40
KILL_AFTER = 8
THREE = Layout("ddp-on-three", DDP.script, nproc=3)
"""On three nodes, with a spare one: at least one node with a rank is carried."""
net = hosts_of_a_test(4)
reference = references_of_a_module(STEPS, nnodes=lambda layout: 3)


class RelayedJob(NodesJob):
    """One whose agents have found their ways."""

    def __init__(self, net: Network, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("max_direct_agents: 2\n")
        super().__init__(net, tmp_path / "run", THREE, nnodes=3, steps=STEPS, options=["--config", str(config)])
        self.wait_for_step(KILL_AFTER)
        self.relay, self.carried = self._ways()

    def _ways(self) -> tuple[Host, list[Host]]:
        """The one that carries the others: only it speaks to the controller on the first host; and those."""
        deadline = time.monotonic() + 20
        controller, *others = self.net.hosts
        while len(straight := [h for h in others if speaks_to(h, f"{controller.address}:{PORT}")]) != 1:
            assert time.monotonic() < deadline, f"{straight}\n{self.stop().explain()}"
            time.sleep(0.1)
        return straight[0], [h for h in others if h is not straight[0]]

    def carried_rank(self) -> tuple[Host, int]:
        """A host that is carried, and its rank."""
        return next((h, rank) for h in self.carried if (rank := self.rank_on(h)) is not None)

    def rank_on(self, host: Host) -> int | None:
        return next((rank for rank, at in self.rank_hosts().items() if at is host), None)


def speaks_to(host: Host, address: str) -> bool:
    """Whether a process of ``host`` has a TCP connection to ``address``."""
    command = [*host.command, "ss", "-tnH", "state", "established", "dst", address]
    return bool(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def check_recovered(ended: Job, victims: list[list[int]], reference: Job) -> None:
    assert [e["victims"] for e in ended.of("recovery_finished")] == victims, ended.explain()
    check_same(ended, reference)


def test_a_carried_rank_is_killed(net: Network, tmp_path: Path, reference: References) -> None:
    job = RelayedJob(net, tmp_path)
    host, rank = job.carried_rank()
    job.kill_worker(host, rank)
    ended = job.wait()
    assert not ended.of("node_lost")
    check_recovered(ended, [[rank]], reference(THREE))


@pytest.mark.parametrize("how", ["killed", "cut", "frozen"])
def test_the_node_that_carries_others_is_lost(how: str, net: Network, tmp_path: Path, reference: References) -> None:
    """It alone is declared dead."""
    job = RelayedJob(net, tmp_path)
    rank = job.rank_on(job.relay)
    if how == "killed":
        job.kill_node(job.relay)
    elif how == "cut":
        net.cut(job.relay)
    else:
        job.signal_node(job.relay, signal.SIGSTOP)
    job.wait_for("node_lost")
    ended = job.wait(of=[net.hosts[0], *job.carried])
    assert [e["node"] for e in ended.of("node_lost")] == [job.relay.name], ended.explain()
    check_recovered(ended, [[rank]] if rank is not None else [], reference(THREE))


def test_a_carried_node_is_lost(net: Network, tmp_path: Path, reference: References) -> None:
    job = RelayedJob(net, tmp_path)
    host, rank = job.carried_rank()
    net.cut(host)
    ended = job.wait(of=[h for h in net.hosts if h is not host])
    assert [e["node"] for e in ended.of("node_lost")] == [host.name]
    check_recovered(ended, [[rank]], reference(THREE))


def test_the_relay_is_lost_while_it_carries_a_recovery(net: Network, tmp_path: Path, reference: References) -> None:
    job = RelayedJob(net, tmp_path)
    relays_rank = job.rank_on(job.relay)
    keeper = (relays_rank + 1) % THREE.nproc if relays_rank is not None else None
    rank, host = next((r, h) for r, h in sorted(job.rank_hosts().items()) if r not in (relays_rank, keeper))
    job.kill_worker(host, rank)  # not the one that keeps what the relay's node takes with it
    job.wait_for("recovery_started")
    job.kill_node(job.relay)
    ended = job.wait(of=[net.hosts[0], *job.carried])
    assert [e["node"] for e in ended.of("node_lost")] == [job.relay.name]
    victims = {v for e in ended.of("recovery_finished") for v in e["victims"]}
    assert victims == {rank} | ({relays_rank} if relays_rank is not None else set()), ended.explain()
    check_same(ended, reference(THREE))


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
def test_the_way_to_the_relay_is_lost(net: Network, tmp_path: Path, reference: References) -> None:
    """Both live, and are heard; what the carried agents say before they find another way is said again."""
    job = RelayedJob(net, tmp_path)
    host, rank = job.carried_rank()
    (port,) = job.agent_ports(job.relay)
    rules = f"table ip wall {{ chain input {{ type filter hook input priority 0; tcp dport {port} drop; }}\n}}\n"
    subprocess.run([*job.relay.command, "nft", "-f", "-"], input=rules, text=True, check=True)
    job.kill_worker(host, rank)
    ended = job.wait()
    assert set(job.codes().values()) == {0}, "one has not heard of the job's end"
    assert not ended.of("node_lost"), ended.explain()
    check_recovered(ended, [[rank]], reference(THREE))


def test_the_relays_agent_is_killed(net: Network, tmp_path: Path, reference: References) -> None:
    """Its workers die with it; the others come straight at once and are carried again by no one."""
    job = RelayedJob(net, tmp_path)
    job.kill_agent(job.relay)
    ended = job.wait(of=[net.hosts[0], *job.carried])
    assert [e["node"] for e in ended.of("node_lost")] == [job.relay.name]
    check_same(ended, reference(THREE))


def test_the_controllers_node_is_lost(net: Network, tmp_path: Path, reference: References) -> None:
    """Everybody follows the elected one, whichever way it had heard the one before."""
    job = RelayedJob(net, tmp_path)
    job.kill_node(net.hosts[0])
    ended = job.wait(of=net.hosts[1:])
    assert [e["kind"] for e in ended.of("notice")].count("controller_elected") == 1, ended.explain()
    check_recovered(ended, [[0]], reference(THREE))

"""A firewall that answers for a node with resets: its connections break, and any process that knocks is refused, but it
lives.

That is no proof of a node's death, nor of a controller's: its workers are halted before its ranks are given away.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flashrecovery.agent.processes.procfs import is_stopped
from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.skipif(not hosts.can_lose(), reason="needs nft"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 40
KILL_AFTER = 8
ON_ONE = Layout("ddp-on-one", DDP.script)
"""All ranks on one node."""

net = hosts_of_a_test(3)
reference = references_of_a_module(STEPS, nnodes=lambda layout: 1 if layout is ON_ONE else 2, spare=1)


class Halted:
    """Looks on: since when have all of these processes been stopped?"""

    def __init__(self, pids: list[int]) -> None:
        self.since = float("inf")
        self._over = False
        self._pids = pids
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over:
            stopped = all(is_stopped(pid) for pid in self._pids)
            self.since = min(self.since, time.monotonic()) if stopped else float("inf")
            time.sleep(0.005)

    def end(self) -> float:
        """CLOCK_MONOTONIC seconds."""
        self._over = True
        self._thread.join()
        return self.since


@pytest.mark.parametrize("how", ["refused", "reset, then silent"])
@pytest.mark.parametrize("who", ["a node", "the node with the controller"])
def test_a_node_halts_before_its_ranks_are_given_away(
    who: str, how: str, net: Network, tmp_path: Path, reference: References
) -> None:
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(KILL_AFTER)
    lost: Host = net.hosts[1] if who == "a node" else net.hosts[0]
    others = [host for host in net.hosts if host is not lost]
    halted = Halted(job.worker_pids(lost))
    net.refuse(lost)
    if how != "refused":
        time.sleep(0.3)
        net.cut(lost)
    began = "node_lost" if who == "a node" else "recovery_started"
    given_away_at = job.wait_for(began)["monotonic"]
    halted_at = halted.end()
    stopped_at = job.newest_step(lost)
    job.wait_for("recovery_finished")
    net.refuse(lost, on=False)
    net.heal(lost)
    ended = job.wait(of=others)
    assert halted_at < given_away_at, f"halted {halted_at - given_away_at:.3f} s after its ranks were given away"
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == ([2, 3] if who == "a node" else [0, 1])
    check_same(ended, reference(DDP))
    assert job.newest_step(lost) == stopped_at, "a rank has lived twice"


def test_a_node_that_has_all_ranks_halts_before_they_are_given_away(
    net: Network, tmp_path: Path, reference: References
) -> None:
    """No other node has any, but it knows of the spare one, and does not reach it. Two whole jobs would write into one
    checkpoint directory."""
    config = tmp_path / "config.yaml"
    config.write_text(f"checkpoint: {{dir: {tmp_path / 'checkpoints'}, interval_s: 0.5}}\n")
    job = NodesJob(net, tmp_path / "run", ON_ONE, nnodes=1, steps=STEPS, config=config, alone=True)
    job.wait_for("checkpoint_saved", 2)
    controller, lost, spare = net.hosts
    halted = Halted(job.worker_pids(lost))
    net.refuse(lost)
    given_away_at = job.wait_for("node_lost")["monotonic"]
    halted_at = halted.end()
    stopped_at = job.newest_step(lost)
    job.wait_for("recovery_finished")
    assert job.newest_step(lost) == stopped_at, "a rank has lived twice"
    net.refuse(lost, on=False)
    job.wait_for("node_joined", 3)  # fenced, and back as a spare
    ended = job.wait(of=[controller, spare])
    assert halted_at < given_away_at, f"halted {halted_at - given_away_at:.3f} s after its ranks were given away"
    assert [(e["node"], e["ranks"]) for e in ended.of("node_lost")] == [(lost.name, [0, 1, 2, 3])]
    assert len(ended.of("fallback_started")) == 1, ended.explain()
    check_same(ended, reference(ON_ONE))
    assert job.newest_step(lost) == stopped_at, "a rank has lived twice"


@pytest.mark.parametrize("layout", [DDP, ON_ONE], ids=["the other one has ranks", "the other one is a spare one"])
def test_training_goes_on_without_a_controller_of_its_own_host(
    layout: Layout, net: Network, tmp_path: Path, reference: References
) -> None:
    """Its port is closed, and the other node is reached: no node is halted, however long it takes."""
    nnodes = 1 if layout is ON_ONE else 2
    job = NodesJob(net, tmp_path / "run", layout, nnodes=nnodes, steps=STEPS, alone=True)
    job.wait_for_step(KILL_AFTER)
    job.kill_agent(net.hosts[0])
    step = job.newest_step()
    time.sleep(2.0)
    assert job.newest_step() > step + 3
    job.start_controller()
    ended = job.wait()
    assert not ended.of("recovery_started"), ended.explain()
    check_same(ended, reference(layout))

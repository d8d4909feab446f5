"""Many faults in a row, chosen at random, of ranks, agents, nodes, links and the controller's node, in one job.

At the end the same bits as without any, and nothing is left behind. Once every agent has a stream to the controller,
once one carries two others, once no rank holds what another one has, and parity protects it.
``FLASHRECOVERY_CHAOS_FAULTS`` and ``FLASHRECOVERY_CHAOS_SEED`` change the number and the
choice.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, FSDP, Layout, check_same
from tests.support.nodes import NodesJob

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(4 * 3600),
    pytest.mark.chaos,
]
FAULTS = int(os.environ.get("FLASHRECOVERY_CHAOS_FAULTS", "200"))
SEED = int(os.environ.get("FLASHRECOVERY_CHAOS_SEED", "1"))
STEPS_A_FAULT = 30
STEP_MS = 150
"""So that the job outlasts its faults."""
SPARE_STEPS = 200
RECOVERY_S = 120.0


class Chaos:
    """A running job and what can be done to it. Each method waits until the job is whole again."""

    def __init__(self, net: Network, job: NodesJob, rng: random.Random) -> None:
        self.net = net
        self.job = job
        self.rng = rng
        self.hit_at = 0.0

    def detected_s(self) -> float | None:
        """Seconds from the last fault to the first event that says so; None if it was none."""
        signs = ("failure_detected", "node_lost")
        found = [
            e["monotonic"]
            for e in self.job.events()
            if e["monotonic"] > self.hit_at and (e["event"] in signs or e.get("kind") == "controller_elected")
        ]
        return min(found) - self.hit_at if found else None

    def rank_killed(self) -> None:
        self._hit_rank(signal.SIGKILL)

    def rank_stopped(self) -> None:
        self._hit_rank(signal.SIGSTOP)

    def agent_killed(self) -> None:
        self._node(self._holding(), lambda h: self.job.kill_agent(h))

    def node_killed(self) -> None:
        self._node(self._holding(), self.job.kill_node)

    def spare_killed(self) -> None:
        used = {h.name for h in self.job.rank_hosts().values()} | {self.job.controller_host().name}
        spare = [h for h in self.net.hosts if h.name not in used]
        if spare:
            self._node(self.rng.choice(spare), self.job.kill_node, recovers=False)

    def controllers_node_killed(self) -> None:
        host = self.job.controller_host()
        holds = host in self.job.rank_hosts().values()
        elections = self._notices("controller_elected")
        self._node(host, self.job.kill_node, recovers=holds)
        assert self._notices("controller_elected") == elections + 1

    def link_cut(self) -> None:
        host = self._holding()
        recovered, joined = self._count("recovery_finished"), self._count("node_joined")
        self.hit_at = time.monotonic()
        self.net.cut(host)
        self._await("recovery_finished", recovered + 1)
        self.net.heal(host)
        self._await("node_joined", joined + 1)

    def short_break(self) -> None:
        before, self.hit_at = self._count("recovery_started"), time.monotonic()
        host = self.rng.choice(self.net.hosts)
        self.net.cut(host)
        time.sleep(0.25)
        self.net.heal(host)
        time.sleep(1.5)
        assert self._count("recovery_started") == before, "a short break is no failure"

    def _hit_rank(self, number: signal.Signals) -> None:
        rank, host = self.rng.choice(sorted(self.job.rank_hosts().items()))
        recovered = self._count("recovery_finished")
        self.hit_at = time.monotonic()
        self.job.signal_worker(host, rank, number)
        self._await("recovery_finished", recovered + 1)

    def _node(self, host: Host, kill, *, recovers: bool = True) -> None:  # type: ignore[no-untyped-def]
        """Kill it, wait for what must follow, start it again and wait until it is back."""
        recovered, lost = self._count("recovery_finished"), self._count("node_lost")
        self.hit_at = time.monotonic()
        kill(host)
        self.job.popens[host.name].wait()
        if recovers:
            self._await("recovery_finished", recovered + 1)
        elif host == self.job.controller_host():
            time.sleep(5.0)
        else:
            self._await("node_lost", lost + 1)
        joined = self._count("node_joined")
        self.job.start_again(host)
        self._await("node_joined", joined + 1)

    def _holding(self) -> Host:
        """A node with ranks that has not the controller."""
        controller = self.job.controller_host()
        return self.rng.choice(sorted({h for h in self.job.rank_hosts().values() if h != controller}, key=str))

    def _count(self, event: str) -> int:
        return len(self.job.of(event))

    def _notices(self, kind: str) -> int:
        return sum(e["kind"] == kind for e in self.job.of("notice"))

    def _await(self, event: str, count: int) -> None:
        self.job.wait_for(event, count, RECOVERY_S)


THREE = Layout("fsdp-on-three", FSDP.script, nproc=3)
CHOICE = (
    *(Chaos.rank_killed,) * 3,
    Chaos.rank_stopped,
    Chaos.agent_killed,
    Chaos.node_killed,
    Chaos.spare_killed,
    Chaos.controllers_node_killed,
    *(Chaos.link_cut,) * 2,
    *(Chaos.short_break,) * 2,
)


@pytest.mark.parametrize(
    ("layout", "nnodes", "settings"),
    [(DDP, 2, "max_direct_agents: 64"), (DDP, 2, "max_direct_agents: 2"), (THREE, 3, "redundancy: parity")],
    ids=["streams", "relays", "parity"],
)
def test_chaos(layout: Layout, nnodes: int, settings: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"{settings}\n")
    steps = FAULTS * STEPS_A_FAULT + SPARE_STEPS
    layout = Layout("chaos", layout.script, ("--steps", str(steps)), nproc=layout.nproc)
    rng = random.Random(SEED)
    times: dict[str, list[float]] = defaultdict(list)
    detections: dict[str, list[float]] = defaultdict(list)
    with hosts.network(nnodes) as net:
        reference = NodesJob(net, tmp_path / "reference", layout, nnodes=nnodes, step_ms=0).wait(4 * 3600)
    with hosts.network(4) as net:
        job = NodesJob(net, tmp_path / "run", layout, nnodes=nnodes, step_ms=STEP_MS, config=config)
        job.wait_for_step(5)
        chaos = Chaos(net, job, rng)
        for number in range(FAULTS):
            assert job.newest_step() < steps - SPARE_STEPS, "the job has overtaken its faults"
            fault = rng.choice(CHOICE)
            began = time.monotonic()
            fault(chaos)
            times[fault.__name__].append(time.monotonic() - began)
            detected_s = chaos.detected_s()
            if detected_s is not None:
                detections[fault.__name__].append(detected_s)
            print(
                f"fault {number + 1}: {fault.__name__}: {times[fault.__name__][-1]:.1f} s, "
                f"step {job.newest_step()} of {steps}",
                flush=True,
            )
            time.sleep(1.5)  # the electors settle, and the copies are whole again
        ended = job.wait(4 * 3600)
    print("| fault | number | detected after, s: median | worst |\n|---|---|---|---|")
    for name in sorted(times):
        seen = detections[name]
        measured = f"{statistics.median(seen):.2f} | {max(seen):.2f}" if seen else "- | -"
        print(f"| {name.replace('_', ' ')} | {len(times[name])} | {measured} |")
    check_same(ended, reference)

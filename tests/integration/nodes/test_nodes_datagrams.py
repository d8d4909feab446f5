"""Heartbeats between hosts whose firewall lets no UDP through, or stops to do so: no node is declared dead."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP
from tests.support.nodes import PORT, NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
STEPS = 50
RULES = """
flush ruleset
table ip firewall {{
  chain input {{
    type filter hook input priority 0;
    udp dport {port} counter {verdict}
  }}
}}
"""


net = hosts_of_a_test(2)


def heartbeats(host: Host, verdict: str) -> None:
    """What ``host`` does with datagrams to the controller's port: ``accept`` or ``drop``; counts from 0."""
    rules = RULES.format(port=PORT, verdict=verdict)
    subprocess.run([*host.command, "nft", "-f", "-"], input=rules, text=True, check=True)


def counted(host: Host) -> int:
    """Datagrams since :func:`heartbeats`."""
    listed = subprocess.run([*host.command, "nft", "-j", "list", "ruleset"], capture_output=True, text=True, check=True)
    rules = [item["rule"]["expr"] for item in json.loads(listed.stdout)["nftables"] if "rule" in item]
    return sum(part["counter"]["packets"] for expressions in rules for part in expressions if "counter" in part)


@pytest.mark.parametrize("first", ["drop", "accept"])
def test_a_firewall_that_stops_datagrams(first: str, net: Network, tmp_path: Path) -> None:
    """With ``accept`` first they get through, then the firewall is closed in the middle, then opened again."""
    controller = net.hosts[0]
    heartbeats(controller, first)
    job = NodesJob(net, tmp_path / "run", DDP, steps=STEPS)
    job.wait_for_step(5)
    assert counted(controller) > 2
    for verdict in ("drop", "accept"):
        heartbeats(controller, verdict)
        time.sleep(2.0)
        assert counted(controller) >= 4  # it is tried again and again
    ended = job.wait()
    assert ended.code == 0, ended.explain()
    assert not ended.of("node_lost") and not ended.of("recovery_started")


def test_datagrams_can_be_switched_off(net: Network, tmp_path: Path) -> None:
    controller = net.hosts[0]
    heartbeats(controller, "accept")
    config = tmp_path / "config.yaml"
    config.write_text("datagrams: false\n")
    job = NodesJob(net, tmp_path / "run", DDP, steps=20, options=["--config", str(config)])
    ended = job.wait()
    assert ended.code == 0, ended.explain()
    assert counted(controller) == 0

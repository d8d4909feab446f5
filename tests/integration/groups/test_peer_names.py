"""torch asks the name server for the name of any process that connects to a TCPStore; processes of ours do not let
it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Host
from tests.support.jobs import ROOT

SCRIPT = Path(__file__).parents[2] / "scripts" / "count_name_queries.py"

pytestmark = pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN")


@contextmanager
def own_name_server(host: Host) -> Iterator[None]:
    """What runs on ``host`` asks itself: `ip netns exec` mounts this file."""
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    config = folder / "resolv.conf"
    config.write_text("nameserver 127.0.0.1\n")
    try:
        yield
    finally:
        config.unlink()
        folder.rmdir()


def test_who_asks_for_names() -> None:
    """torch alone does, a server of ours and a rank do not."""
    with hosts.network(1) as net, own_name_server(net.hosts[0]):
        done = subprocess.run(
            [*net.hosts[0].command, sys.executable, str(SCRIPT)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PYTHONPATH": f"{ROOT / 'common'}:{ROOT}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
    asked = {how: int(number) for how, number in (line.split() for line in done.stdout.splitlines())}
    assert asked.keys() == {"torch", "server", "rank"} and done.returncode == 0, done.stderr
    assert asked["torch"] > 0 and asked["server"] == asked["rank"] == 0, asked

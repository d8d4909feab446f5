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


@pytest.mark.parametrize("how", ["torch", "server", "rank"])
def test_who_asks_for_names(how: str) -> None:
    """torch alone does, a server of ours and a rank do not."""
    with hosts.network(1) as net, own_name_server(net.hosts[0]):
        done = subprocess.run(
            [*net.hosts[0].command, sys.executable, str(SCRIPT), how],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PYTHONPATH": f"{ROOT / 'common'}:{ROOT}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
    assert done.returncode == 0, done.stderr
    asked = int(done.stdout.split()[-1])
    assert asked > 0 if how == "torch" else asked == 0, done.stdout
    assert "cannot be retrieved" not in done.stderr

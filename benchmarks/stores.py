"""Establishing the TCPStore (for :mod:`scale`): by all ranks, and by one new rank while the others are connected.

FlashRecovery's figure 10 shows what the first costs when ranks do it one after the other, and when p do at a time. The
store belongs to an agent and not to a rank, so survivors keep the connection that they have made in their first
recovery; in later ones only who is new connects, unless the store's node is lost.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import harness
from flashrecovery.agent.store import StoreServer

AT_ONCE = 4
"""Processes that connect clients at the same time: this machine's cores set the limit."""


def _clients(port: int, count: int) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("store_clients.py"))
    return subprocess.Popen(
        [sys.executable, script, str(port), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=harness.environment(),
    )


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _seconds(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def store_seconds(devices: int) -> tuple[float, float]:
    """(all ``devices`` clients, several at a time; one more while these are connected), in seconds."""
    with closing(StoreServer("127.0.0.1", 0)) as server:
        share = [devices // AT_ONCE + (i < devices % AT_ONCE) for i in range(AT_ONCE)]
        processes = [_clients(server.port, n) for n in share if n] + [_clients(server.port, 1)]
        try:
            *launch, late = processes
            for process in launch:
                _go(process)
            at_launch = max(_seconds(process) for process in launch)
            _go(late)
            return at_launch, _seconds(late)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.close()
                process.stdout.close()

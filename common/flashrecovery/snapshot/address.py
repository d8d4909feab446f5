"""Where the snapshot process of a node is found."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import xxhash

from flashrecovery.runtime import local_socket

SNAPSHOT_ENV = "FLASHRECOVERY_SNAPSHOTS"
"""The name of this node's snapshot process, for its ranks."""


def name_for(run_dir: Path) -> str:
    """The snapshot process of the agent that writes into ``run_dir`` has this name, and so has the next launch's."""
    return f"flashrecovery-snapshots-{os.getuid()}-{xxhash.xxh3_128_hexdigest(str(run_dir.resolve()).encode())}"


def listen(name: str) -> socket.socket:
    """See :func:`.local_socket.listen`."""
    return local_socket.listen(name, socket.SOCK_SEQPACKET)


def call(name: str) -> socket.socket | None:
    """See :func:`.local_socket.call`."""
    return local_socket.call(name, socket.SOCK_SEQPACKET)

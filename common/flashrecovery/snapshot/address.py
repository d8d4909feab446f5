"""Where the snapshot process of a node is found: a socket without a file, so that nothing can be left behind."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import xxhash

from flashrecovery.errors import AuthenticationError

SNAPSHOT_ENV = "FLASHRECOVERY_SNAPSHOTS"
"""The name of this node's snapshot process, for its ranks."""
_CREDENTIALS = struct.Struct("3i")


def name_for(run_dir: Path) -> str:
    """The snapshot process of the agent that writes into ``run_dir`` has this name, and so has the next launch's."""
    return f"flashrecovery-snapshots-{os.getuid()}-{xxhash.xxh3_128_hexdigest(str(run_dir.resolve()).encode())}"


def listen(name: str) -> socket.socket:
    """A socket on which the snapshot process of this name is called. Raises OSError if there is one already."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(f"\0{name}")
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def call(name: str) -> socket.socket | None:
    """A connection to the snapshot process of this name; None if there is none. Raises AuthenticationError if another
    user has taken the name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{name}")
    except ConnectionRefusedError:
        sock.close()
        return None
    if not is_ours(sock):
        sock.close()
        raise AuthenticationError(f"the socket {name!r} belongs to another user")
    return sock


def is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return bool(uid == os.getuid())

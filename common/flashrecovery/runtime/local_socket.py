"""Sockets of this host that have a name and no file, so that nothing can be left behind. For one user only."""

from __future__ import annotations

import os
import socket
import struct

from flashrecovery.errors import AuthenticationError

_CREDENTIALS = struct.Struct("3i")
_WAITING = 1024


def listen(name: str, kind: socket.SocketKind) -> socket.socket:
    """A socket on which the process of this name is called. Raises OSError if there is one already."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.bind(f"\0{name}")
        sock.listen(_WAITING)
    except OSError:
        sock.close()
        raise
    return sock


def call(name: str, kind: socket.SocketKind) -> socket.socket | None:
    """A connection to the process of this name; None if there is none. Raises AuthenticationError if another user has
    taken the name."""
    sock = socket.socket(socket.AF_UNIX, kind)
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

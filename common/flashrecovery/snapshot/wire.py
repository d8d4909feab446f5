"""Messages to and from the snapshot process: JSON and file descriptors, one packet each."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MESSAGE_BYTES = 64 << 10
_DESCRIPTORS = 64


def send(sock: socket.socket, words: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Raises OSError if the other end is gone."""
    socket.send_fds(sock, [json.dumps(words).encode()], list(descriptors))


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the descriptors that came with it; None at the end of the connection. Raises OSError."""
    data, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return (json.loads(data) if data else None), descriptors

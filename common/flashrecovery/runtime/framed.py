"""Length-prefixed messages on a stream socket of this host, with file descriptors beside them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
_DESCRIPTORS = 8


class Framed:
    """One end. ``descriptors``: those that have arrived and belong to messages not taken yet, in their order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self.descriptors: list[int] = []

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError: the other end is gone, or (TimeoutError) does not read."""
        head = _LENGTH.pack(len(message))
        if descriptors:
            socket.send_fds(self._sock, [head], descriptors)
            self._sock.sendall(message)
        else:
            self._sock.sendall(head + message)

    def arrived(self) -> list[bytes]:
        """Whole messages that can be read now, none if there are none yet; waits as the socket does.

        Raises:
            OSError: the connection has ended, or (TimeoutError) nothing has come in the socket's time.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _CHUNK, _DESCRIPTORS)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("it has ended")
        self.descriptors += descriptors
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

"""The worker's end of its connection to the agent: length-prefixed protobuf messages on an inherited socket pair.

No gRPC here: a training process forks (data loaders), and gRPC's threads do not survive a fork. The socket pair has
no name and no address, so no other process can connect to it; when the agent dies, ``receive`` returns None.
"""

from __future__ import annotations

import os
import socket
import struct
import threading

from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb

CHANNEL_ENV = "FLASHRECOVERY_CHANNEL_FD"
PAGE_ENV = "FLASHRECOVERY_PAGE_FD"
_LENGTH = struct.Struct("<I")


class Channel:
    """Blocking, thread-safe for senders; one reader."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    @staticmethod
    def from_env() -> Channel:
        """The channel that the agent handed over. Raises ConfigError outside ``flashrecovery run``."""
        fd = os.environ.get(CHANNEL_ENV)
        if fd is None:
            raise ConfigError(f"{CHANNEL_ENV} is not set: only an agent starts this program; use `flashrecovery run`")
        sock = socket.socket(fileno=int(fd))
        os.set_inheritable(sock.fileno(), False)
        return Channel(sock)

    def send(self, message: pb.FromWorker) -> None:
        """Raises OSError when the agent is gone."""
        data = message.SerializeToString()
        with self._lock:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> pb.ToWorker | None:
        """The next message; None at the end of the connection."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        data = self._read(_LENGTH.unpack(head)[0])
        return None if data is None else pb.ToWorker.FromString(data)

    def _read(self, n: int) -> bytes | None:
        chunks = bytearray()
        while len(chunks) < n:
            try:
                part = self._sock.recv(n - len(chunks))
            except ConnectionResetError:
                return None
            if not part:
                return None
            chunks += part
        return bytes(chunks)

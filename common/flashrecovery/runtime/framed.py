"""Length-prefixed messages on a stream socket of this host, with file descriptors beside them."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
_DESCRIPTORS = 8


class Framed:
    """One end. ``descriptors``: those that have arrived and belong to messages not taken yet, in their order. It sends
    with :meth:`send`, as the socket waits, or with :meth:`post`, without waiting; never with both."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: deque[_Unsent] = deque()
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

    def post(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send what a socket that does not block takes now. What it does not take is sent by :meth:`flush`: False if
        there is such. The descriptors may be closed as soon as this returns.

        Raises:
            OSError: the other end is gone, or the kernel has no room; nothing of this message is sent later, either.
        """
        added = _Unsent(_LENGTH.pack(len(message)) + message)
        try:
            added.take(descriptors)
            self._unsent.append(added)
            return len(self._unsent) == 1 and self.flush()
        except OSError:
            added.close()
            raise

    def flush(self) -> bool:
        """Send what the socket takes now: True if nothing is left. Raises OSError, as :meth:`post`. If the message was
        sent in part then, the connection has ended."""
        while self._unsent:
            first = self._unsent[0]
            try:
                first.send(self._sock)
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.popleft().close()
                if first.begun:  # the other end cannot read what would come after it
                    self._sock.shutdown(socket.SHUT_RDWR)
                raise
            if not first.data:
                self._unsent.popleft()
        return True

    def drop(self) -> None:
        """Nothing that was posted is sent any more."""
        while self._unsent:
            self._unsent.popleft().close()

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


class _Unsent:
    """A message that was posted, and duplicates of its descriptors, which go with its first byte."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.begun = False
        self._descriptors: list[int] = []

    def take(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            self._descriptors.append(os.dup(descriptor))

    def send(self, sock: socket.socket) -> None:
        """As much as the socket takes at once. Raises OSError."""
        beside = self._descriptors
        sent = socket.send_fds(sock, [self.data], beside) if beside else sock.send(self.data)
        self.begun = True
        self.data = self.data[sent:]
        self.close()

    def close(self) -> None:
        """The duplicates."""
        while self._descriptors:
            os.close(self._descriptors.pop())

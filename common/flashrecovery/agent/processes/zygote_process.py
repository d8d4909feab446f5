"""One zygote (:mod:`flashrecovery.worker.startup.zygote`) as its agent sees it, and the children that it forks.

A fork never blocks the event loop: it is requested, and the answer is a message like any other. On a very busy host
the answer comes late, which is no reason to start new interpreters there. A zygote that stays silent for seconds is
stopped and given up.

A child only waits until it receives its rank, and exits when its channel closes. So a child that was never reported,
because its zygote was killed before it could answer, exits by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.framed import Framed

_ANSWER_S = 10.0
"""A fork takes milliseconds, on a very busy host seconds. A zygote that is asked, and says nothing for so long, is
stopped."""


class Child(Protocol):
    """As much of ``subprocess.Popen`` as is needed of a child process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...


class Adopted:
    """A child of this process that another one has forked. It stays a zombie until :meth:`poll` has seen its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ZygoteLostError(Exception):
    """A zygote has ended, or does not answer."""


class Zygote:
    """One process. ``said``: it has imported, or cannot be forked; ``lost``: it has ended, or does not answer, and has
    been closed."""

    def __init__(
        self,
        child: Child,
        sock: socket.socket,
        said: Callable[[Zygote, pb.FromZygote], None],
        lost: Callable[[Zygote], None],
    ) -> None:
        self._child = child
        self._sock = sock
        self._said = said
        self._lost = lost
        self._framed = Framed(sock)
        self._number = 0
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._patience: asyncio.TimerHandle | None = None
        self._retired = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    @property
    def pid(self) -> int:
        return self._child.pid

    def fork(self, request: pb.Fork, descriptors: Sequence[int]) -> asyncio.Future[int]:
        """Ask for a new child of this process, and do not wait: the future has its pid, and is not to be cancelled.
        The descriptors may be closed as soon as this returns.

        Raises:
            OSError: it cannot be asked, or (from the future) the kernel has no room for another process.
            ZygoteLostError: from the future: it has ended, does not answer, or was closed.
        """
        self._number += 1
        request.number = self._number
        try:
            if not self._framed.post(request.SerializeToString(), descriptors):
                self._loop.add_writer(self._sock, self._write)
        except (BrokenPipeError, ConnectionResetError):
            pass  # :meth:`_read` reaches the end of the stream, after all earlier messages
        asked: asyncio.Future[int] = self._loop.create_future()
        self._asked[self._number] = asked
        if self._patience is None:
            self._wait_on()
        return asked

    def _write(self) -> None:
        try:
            if self._framed.flush():
                self._loop.remove_writer(self._sock)
        except OSError as e:
            self._end(str(e))

    def _read(self) -> None:
        try:
            for message in self._arrived():
                if message.HasField("forked"):
                    self._answered(message.forked)
                else:
                    self._said(self, message)
        except ZygoteLostError as e:
            self._end(str(e))

    def _arrived(self) -> list[pb.FromZygote]:
        """What can be read without waiting. Raises ZygoteLostError at the end of the connection."""
        try:
            return [pb.FromZygote.FromString(data) for data in self._framed.arrived()]
        except OSError as e:
            raise ZygoteLostError(str(e)) from e
        except DecodeError as e:
            raise ZygoteLostError(f"it says something unknown: {e}") from e

    def _answered(self, forked: pb.Forked) -> None:
        asked = self._asked.pop(forked.number, None)
        if asked is None:
            raise ZygoteLostError(f"it answers what it was not asked: {forked.number}")
        if forked.error:
            asked.set_exception(OSError(forked.error))
        else:
            asked.set_result(forked.pid)
        self._wait_on()
        if self._retired and not self._asked:
            self.close("")

    def _wait_on(self) -> None:
        """From now on for the next answer, if there is one to come."""
        if self._patience is not None:
            self._patience.cancel()
        silent = f"it has not answered for {_ANSWER_S:g} s"
        self._patience = self._loop.call_later(_ANSWER_S, self._end, silent) if self._asked else None

    def _end(self, reason: str) -> None:
        if not self._closed:
            self.close(reason)
            self._lost(self)

    def retire(self) -> None:
        """It is asked nothing more, and ends with its last answer."""
        self._retired = True
        if not self._asked:
            self.close("")

    def close(self, reason: str) -> None:
        """It ends at once, and is reaped as soon as it has (:meth:`reaped`). ``reason``: for callers that still
        wait."""
        if self._closed:
            return
        self._closed = True
        if self._patience is not None:
            self._patience.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._framed.drop()
        self._sock.close()
        for asked in self._asked.values():
            asked.set_exception(ZygoteLostError(reason))
        self._asked.clear()
        if self._child.returncode is None:
            os.kill(self._child.pid, signal.SIGKILL)  # not reaped yet, so the pid is its own

    def reaped(self) -> bool:
        """Whether nothing of it is left, once it has been closed."""
        return self._closed and self._child.poll() is not None

"""`python launcher.py FD PID FD PID ARGUMENTS`: `flashrecovery ARGUMENTS`, whose first zygote is the first process PID,
which waits for that at the other end of the socket FD; the second one is its store. What is replaced are the calls
that would start an interpreter for each."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

OWN = "its descriptor"
"""As in `image.py`, which is not imported here."""
_LENGTH = struct.Struct("<I")


class Waiting:
    """A process that waits for what it is to be. It can be used once."""

    def __init__(self, fd: int, pid: int) -> None:
        self._sock: socket.socket | None = socket.socket(fileno=fd)
        self._sock.set_inheritable(False)
        self.pid = pid

    def becomes(
        self, command: Sequence[str], env: Mapping[str, str], out: int, passed: int, *, store: bool = False
    ) -> bool:
        """``passed``: the one descriptor that it gets beside its output, whose number is ``OWN`` in the request."""
        if self._sock is None:
            return False
        request = {"command": command, "env": dict(env), "store": store, "cwd": os.getcwd()}
        data = json.dumps(request).encode()
        try:
            socket.send_fds(self._sock, [_LENGTH.pack(len(data))], [out, passed])
            self._sock.sendall(data)
            fits = self._sock.recv(1) == b"y"
        except OSError:
            return False
        if fits:
            self._sock.close()
            self._sock = None
        return fits


class Zygotes:
    """In place of ``subprocess`` where the agent starts zygotes."""

    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, first: Waiting) -> None:
        self._first = first

    def Popen(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], pass_fds: Sequence[int], **kw: Any
    ) -> Any:
        from flashrecovery.agent.processes.zygote_process import Adopted
        from flashrecovery.runtime.environment import ZYGOTE_ENV

        if self._first.becomes(command, {**env, ZYGOTE_ENV: OWN}, stdout.fileno(), *pass_fds):
            return Adopted(self._first.pid)
        return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **kw)


class Stores:
    """The same where it starts the store."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, first: Waiting) -> None:
        self._first = first

    def Popen(self, command: Sequence[str], *, pass_fds: Sequence[int], **kw: Any) -> Any:
        """The interpreter has imported all of torch, which the last argument says."""
        (listening,) = pass_fds
        shown = [OWN if word == str(listening) else word for word in command[:-1]]
        if self._first.becomes([*shown, "1"], os.environ, 1, listening, store=True):
            return _store(self._first.pid)
        return subprocess.Popen(command, pass_fds=pass_fds, **kw)


def _store(pid: int) -> Any:
    from flashrecovery.agent.processes.zygote_process import Adopted

    class Store(Adopted):
        def kill(self) -> None:
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

        def wait(self) -> None:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    return Store(pid)


def main() -> None:
    zygote, store = (Waiting(int(fd), int(pid)) for fd, pid in (sys.argv[1:3], sys.argv[3:5]))
    del sys.argv[1:5]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    from flashrecovery.agent.processes import zygote as zygotes
    from flashrecovery.agent.stores import store as stores

    zygotes.subprocess = Zygotes(zygote)  # type: ignore[attr-defined]
    stores.subprocess = Stores(store)  # type: ignore[attr-defined]
    runpy.run_module("flashrecovery.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

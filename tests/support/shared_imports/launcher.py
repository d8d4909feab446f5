"""`python launcher.py FD PID ARGUMENTS`: `flashrecovery ARGUMENTS`, whose first zygote is the process PID, which waits
for that at the other end of the socket FD. What is replaced is the call that would start an interpreter for it."""

from __future__ import annotations

import json
import os
import runpy
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

_LENGTH = struct.Struct("<I")


class Starter:
    """In place of ``subprocess.Popen`` for zygotes. The one that waits can be used once."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock: socket.socket | None = sock
        self._pid = pid

    def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], pass_fds: Sequence[int], **kw: Any
    ) -> Any:
        from flashrecovery.agent.processes.zygote_process import Adopted
        from flashrecovery.runtime.environment import ZYGOTE_ENV

        if self._sock is not None and self._asks(command, env, [stdout.fileno(), *pass_fds], ZYGOTE_ENV):
            self._sock.close()
            self._sock = None
            return Adopted(self._pid)
        return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **kw)

    def _asks(self, command: Sequence[str], env: Mapping[str, str], descriptors: list[int], name: str) -> bool:
        assert self._sock is not None
        own = {key: value for key, value in env.items() if key != name}
        request = {"command": command, "arguments": command[4:], "env": own, "socket": name, "cwd": os.getcwd()}
        data = json.dumps(request).encode()
        try:
            socket.send_fds(self._sock, [_LENGTH.pack(len(data))], descriptors)
            self._sock.sendall(data)
            return self._sock.recv(1) == b"y"
        except OSError:
            return False


def main() -> None:
    sock, pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    sock.set_inheritable(False)
    del sys.argv[1:3]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    from flashrecovery.agent.processes import zygote

    kinds = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    zygote.subprocess = SimpleNamespace(Popen=Starter(sock, pid), **kinds)  # type: ignore[attr-defined]
    runpy.run_module("flashrecovery.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

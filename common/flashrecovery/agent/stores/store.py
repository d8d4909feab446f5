"""The TCPStore of the job, in a separate process.

No rank hosts it, so no rank's death takes it away; each generation works under its own prefix. The agent binds and
listens itself and hands the socket over: the port is known, and reserved, before the store's process is up. It keeps
the socket, too, so that a store that has died is started again at the same address. What was in it is gone, which only
those miss that were just meeting there: they fail, and meet again in the next generation.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from flashrecovery.agent.processes.procfs import Exit
from flashrecovery.errors import ConfigError


class StoreServer:
    """``python -m flashrecovery.agent.stores.store_server``; clients that come early wait in the backlog. It listens on
    all interfaces, or on loopback only if ``host``, its address for the ranks, is there."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        here = host.startswith("127.")  # a job on one node: no other host needs the store, which has no access control
        self._sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() and not here else socket.AF_INET)
        if self._sock.family == socket.AF_INET6:
            self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._sock.bind(("127.0.0.1" if here else "", port))
        except OSError as e:
            self._sock.close()
            raise ConfigError(f"--master-port {port}: {e.strerror}; choose another port, or 0 for any free one") from e
        self._sock.listen(1024)
        self.port: int = self._sock.getsockname()[1]
        self._popen = self._start()

    def _start(self, again: bool = False) -> subprocess.Popen[bytes]:
        fd = self._sock.fileno()
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flashrecovery.agent.stores.store_server",
                str(fd),
                str(self.port),
                str(os.getpid()),
                str(int(again)),
            ],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def revive(self) -> str:
        """Start the process again if it has died; returns how it did, else nothing."""
        code = self._popen.poll()
        if code is None:
            return ""
        self._popen = self._start(again=True)
        return str(Exit.from_returncode(code))

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._sock.close()

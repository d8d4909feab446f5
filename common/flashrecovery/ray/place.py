"""One actor as the place of a rank: what its guard is started with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrecovery.rpc.token import TOKEN_ENV, new_token
from flashrecovery.runtime.environment import LAUNCHER_PID_ENV
from flashrecovery.runtime.task import JOB_ENV


@dataclass(frozen=True)
class Meeting:
    """What all ranks of one job have alike. ``host``, ``port``: of the controller, on the node of rank 0."""

    job: str
    token: str
    host: str
    port: int

    @staticmethod
    def here(host: str) -> Meeting:
        """A new job, led from this node."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind(("", 0))
            port = sock.getsockname()[1]
        return Meeting(f"ray-{uuid.uuid4().hex[:12]}", new_token(), host, port)

    def env(self, rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
        """For the guard of this rank."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            JOB_ENV: self.job,
            TOKEN_ENV: self.token,
        }


def start_guard(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """``flashrecovery adopt`` with these arguments. It ends with this thread, however that ends."""
    by_ray = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    own = {"PYTHONPATH": os.pathsep.join(by_ray), LAUNCHER_PID_ENV: str(os.getpid())}
    return subprocess.Popen(
        [sys.executable, "-m", "flashrecovery.cli.main", "adopt", *arguments],
        env={**os.environ, **own, **env},
        stdin=subprocess.DEVNULL,
    )

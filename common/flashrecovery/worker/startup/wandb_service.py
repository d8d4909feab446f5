"""W&B's own process, which has what a rank has logged and writes it every 15 s, finishes the run when that rank dies.

``wandb`` starts that process so that it ends at once when the rank is gone, with what it had not written yet. It can
start it detached (0.31 and later), and then a small process of ours asks it to end as after ``run.finish()``, as soon
as the rank is gone. So each row that a rank has logged before it died is in the run.
"""

from __future__ import annotations

import functools
import importlib
import struct
import subprocess
import sys
from types import ModuleType
from typing import Any

from flashrecovery.util.import_hooks import install

_LONGEST = "10m"
"""It ends by itself if nothing has been connected to it for so long, in its own notation."""
_FINISH = """
import socket, sys, time
sys.stdin.buffer.read()
try:
    with socket.socket(socket.AF_UNIX) as service:
        service.connect(sys.argv[1])
        time.sleep(1)
        service.sendall(bytes.fromhex(sys.argv[2]))
        while service.recv(4096):
            pass
except OSError:
    pass
"""
"""Waits for the rank's end, which closes its end of the pipe; in the second after that the service reads what the rank
has sent. If the rank has ended well, the service is gone by then."""
_UNIX = "-unix-"
"""Precedes the path of the socket in a token."""


def install_tracker_hook() -> None:
    """What W&B has been given is written when its rank dies."""
    install({"wandb.sdk.lib.service.service_process": finish_with_its_rank})


def finish_with_its_rank(module: ModuleType) -> None:
    """What :func:`install_tracker_hook` does to the module that starts its process. Other versions are left alone."""
    own = getattr(module, "start", None)
    detached = getattr(module, "start_detached", None)
    if own is None or detached is None:
        return
    waiting: list[subprocess.Popen[bytes]] = []

    @functools.wraps(own)
    def start(settings: Any) -> Any:
        teardown = _teardown()
        if not teardown:
            return own(settings)
        process = detached(settings, idle_timeout=_LONGEST)
        path = str(process.token.env_value).partition(_UNIX)[2]
        if path:
            command = [sys.executable, "-I", "-S", "-c", _FINISH, path, teardown.hex()]
            waiting.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        return process

    module.start = start  # type: ignore[attr-defined]


def _teardown() -> bytes:
    """The request to end, as it is sent; empty if this version has another one."""
    messages = importlib.import_module("wandb.proto.wandb_server_pb2")
    kind, part = getattr(messages, "ServerRequest", None), getattr(messages, "ServerInformTeardownRequest", None)
    if kind is None or part is None or "inform_teardown" not in kind.DESCRIPTOR.fields_by_name:
        return b""
    data = bytes(kind(inform_teardown=part(exit_code=1)).SerializeToString())
    return struct.pack("<BI", ord("W"), len(data)) + data

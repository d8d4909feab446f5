"""One import of torch for the jobs of many tests.

Every launch begins with a zygote, an interpreter that spends two seconds of a processor on `import torch` before it
forks the ranks. Here an interpreter imports it once, and each job's zygote is a fork of it, which then runs the
bootstrap as a new interpreter would: with the arguments, the environment and the descriptors that the agent gives it,
as a child of the launcher. All else is as without: the launcher is executed again for each job, ranks are forked by the
job's own zygote, and no part of a recovery knows. See `image.py` (the interpreter) and `launcher.py`.

Jobs whose environment differs from the interpreter's in more than the job's own variables have a new interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from flashrecovery.runtime.environment import OF_ZYGOTES
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS

IMAGE = Path(__file__).with_name("image.py")
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_ANSWER_S = 150.0
NOT_SHARED = "LD_PRELOAD"
"""With this variable, libraries of others (sanitizers, fakes of drivers) would be in a process that is cloned."""
MEGATRON = "FR_MEGATRON_CPU"
"""With this variable the adapter of Megatron imports megatron-core at once."""
COMPILER = "torch._inductor.compile_fx"
"""What zygotes import beside megatron-core and DeepSpeed."""
_IMAGES = 3
"""So many at a time, a quarter of a gigabyte each."""
OF_A_JOB = ("FLASHRECOVERY", "TORCHELASTIC_", "PYTEST_", "GLOO_")
"""How the names of variables begin that no import of the image reads."""
_ROOM = 32_768
"""Bytes for the arguments and the environment of a zygote, where /proc shows them."""


def possible(env: Mapping[str, str]) -> bool:
    """Whether a job in this environment can have such a zygote. An image has one thread, as OpenBLAS has with this
    number: what is cloned has no other."""
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return known and NOT_SHARED not in env and env.get("OMP_NUM_THREADS", "1") == "1"


def beside_torch(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """What else zygotes import for the script of this command."""
    script = next((word for word in command if word.endswith(".py")), "")
    return (COMPILER,) if MEGATRON in env or _imports_deepspeed(script) else ()


@cache
def _imports_deepspeed(script: str) -> bool:
    """At its beginning, which zygotes read."""
    return (
        Path(script).is_file() and re.search(r"^(import|from) deepspeed\b", Path(script).read_text(), re.M) is not None
    )


class Forked(subprocess.Popen[bytes]):
    """A child of this process that another one has made."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._communication_started = False
        self._input = None
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        self._closed_child_pipe_fds = True


class Image:
    """An interpreter that has imported torch, and ``more``, in the environment ``env``."""

    def __init__(self, env: Mapping[str, str], more: Sequence[str] = ()) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(IMAGE), str(theirs.fileno()), "." * _ROOM, *more],
                env={**env, **OF_ZYGOTES, "FLASHRECOVERY_ROOM": "." * _ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start(self, command: Sequence[str], env: Mapping[str, str], out: int, host: str = "") -> Forked | None:
        """Run `flashrecovery` with these arguments in a separate session. ``out``: the descriptor of its output.
        ``host``: the network namespace in which all of it runs; "": this one. None: the interpreter has ended; it says
        why."""
        request = {"command": list(command), "env": dict(env), "cwd": os.getcwd(), "host": host}
        data = json.dumps(request).encode()
        try:
            socket.send_fds(self._sock, [_LENGTH.pack(len(data))], [out])
            self._sock.sendall(data)
            answer = self._sock.recv(_PID.size, socket.MSG_WAITALL)
        except ConnectionError:
            return None
        return Forked(_PID.unpack(answer)[0], command) if answer else None

    def close(self) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()


class Images:
    """Those of this process, by what a job inherits (its environment, without what is its own, and limits, namespaces
    and control groups), and by what its zygotes import. Each is made when it is first needed."""

    def __init__(self) -> None:
        self._images: dict[frozenset[tuple[str, str]], Image] = {}
        self._impossible: set[frozenset[tuple[str, str]]] = set()
        atexit.register(self.close)

    def start(self, command: Sequence[str], env: Mapping[str, str], out: int, host: str = "") -> Forked | None:
        """See :meth:`Image.start`. None: no interpreter can be made that could be shared."""
        own = {name: value for name, value in env.items() if not name.startswith(OF_A_JOB)}
        common = {"OMP_NUM_THREADS": "1", **LAUNCH_DEFAULTS, **own}
        more = beside_torch(command, env)
        key = frozenset({*common.items(), *_inherited(), ("imported", " ".join(more))})
        if key in self._impossible:
            return None
        image = self._images.pop(key, None) or Image(common, more)
        started = image.start(command, env, out, host)
        if started is None:
            self._impossible.add(key)
            image.close()
            return None
        self._images[key] = image  # the last one used is the last one here
        while len(self._images) > _IMAGES:
            self._images.pop(next(iter(self._images))).close()
        return started

    def close(self) -> None:
        for image in self._images.values():
            image.close()
        self._images.clear()


def _inherited() -> set[tuple[str, str]]:
    """What else the children of this process have of it."""
    spaces = {(str(space), os.readlink(space)) for space in Path("/proc/self/ns").iterdir()}
    files = {(name, Path(f"/proc/self/{name}").read_text()) for name in ("cgroup", "limits")}
    return {
        *spaces,
        *files,
        ("cpus", str(sorted(os.sched_getaffinity(0)))),
        ("nice", str(os.getpriority(os.PRIO_PROCESS, 0))),
    }


images = Images()

"""The interpreter that has imported torch. `python -u image.py FD ROOM MODULE...`: FD is the socket of the one who
asks; MODULE: what else it is to import.

For each request it makes a child of its *parent* (CLONE_PARENT), so that a test has its job as a child of its own. The
child forks the process that waits to become the job's zygote, and then executes the launcher. So the zygote is a
child of the launcher, and the launcher is the process that its forks' orphans come to.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import platform
import runpy
import signal
import socket
import struct
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("launcher.py")
PROGRAM = "flashrecovery.worker_main"
BEGINNING = ("flashrecovery.worker.startup.bootstrap", "fr_deepspeed.hook", "fr_megatron.lm.hooks")
"""What the first zygote of a job imports before it forks another one, in its order."""
MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    "flashrecovery.worker.startup.zygote",
    "flashrecovery.worker.startup.warm_up",
    "flashrecovery.worker.session",
    "flashrecovery.torch_native",
)
"""What zygotes import after that which run a script with plain PyTorch."""
FORGOTTEN = {"TORCHINDUCTOR_CACHE_DIR"}
"""What torch._dynamo sets, and sets again where it needs it. Zygotes forget it, too."""
OF_A_JOB = ("FLASHRECOVERY", "TORCHELASTIC_", "PYTEST_")
"""As in `__init__.py`, which is not imported here."""
OF_THE_RANKS = frozenset({"ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "_"})
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Returns in processes that are to be zygotes only."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.set_inheritable(False)
    sys.path[0] = os.getcwd()  # as with `python -m`
    before = dict(os.environ)
    changes = _import(BEGINNING)
    changed = _import([*MODULES, *sys.argv[3:]]).keys()
    if not changed <= FORGOTTEN:
        raise RuntimeError(f"an import has set {sorted(changed)}, which a zygote would not see")
    os.environ.clear()
    os.environ.update(before)
    _repeat_in_zygotes(changes)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("an import has started a thread, which a clone of this process would not have")
    gc.collect()
    gc.freeze()
    while True:
        head, descriptors, _, _ = socket.recv_fds(asked, _LENGTH.size, 1)
        if not head:
            os._exit(0)
        data = asked.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        pid = _child_of_parent()
        if pid == 0:
            asked.close()
            _become(json.loads(data), descriptors[0])
            return
        asked.sendall(_PID.pack(pid))
        os.close(descriptors[0])


def _import(names: Iterable[str]) -> dict[str, str | None]:
    """Returns what that has set in the environment; None: unset."""
    before = dict(os.environ)
    for name in names:
        importlib.import_module(name)
    both = before.keys() | os.environ.keys()
    return {name: os.environ.get(name) for name in both if before.get(name) != os.environ.get(name)}


def _repeat_in_zygotes(changes: Mapping[str, str | None]) -> None:
    """Where a zygote would import the adapters, which have set these variables here, it sets them."""
    bootstrap = importlib.import_module("flashrecovery.worker.startup.bootstrap")
    install = bootstrap.install_adapter_hooks

    def installed() -> None:
        install()
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    bootstrap.install_adapter_hooks = installed  # type: ignore[attr-defined]


def _child_of_parent() -> int:
    """Like ``os.fork``, but the new process has this one's parent."""
    pid: int = ctypes.PyDLL(None).syscall(_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid < 0:
        raise OSError("no process could be made")
    return pid


def _become(request: dict[str, Any], out: int) -> None:
    """Become the launcher, or the zygote that it will have. Does not return."""
    os.setsid()
    os.chdir(request["cwd"])
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        ours.close()
        _wait_for_the_agent(theirs, launcher)
        return
    ours.set_inheritable(True)
    program = [sys.executable, str(LAUNCHER), str(ours.fileno()), str(zygote)]
    os.execve(sys.executable, [*program, *request["command"]], request["env"])


def _wait_for_the_agent(sock: socket.socket, launcher: int) -> None:
    """Until it wants a zygote. Returns as a new interpreter that has imported; ends if the agent wants none."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(0)
    while True:
        head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 2)
        if not head:
            os._exit(0)
        request = json.loads(sock.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL))
        fits = _imports_would_be_the_same(request["env"])
        sock.sendall(b"y" if fits else b"n")
        if fits:
            break
    sock.close()
    os.setsid()
    os.chdir(request["cwd"])
    out, own = descriptors
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ[request["socket"]] = str(own)
    _show(request["command"])
    sys.orig_argv[:] = request["command"]
    program = importlib.util.find_spec(PROGRAM)
    sys.argv[:] = [(program and program.origin) or "", *request["arguments"]]
    sys.path[0] = os.getcwd()
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module


def _imports_would_be_the_same(env: dict[str, str]) -> bool:
    """Whether the zygote's environment is the one in which this process has imported, but for the job's own."""
    return not any(
        env.get(name) != os.environ.get(name)
        for name in env.keys() | os.environ.keys()
        if name not in OF_THE_RANKS and not name.startswith(OF_A_JOB)
    )


def _show(command: list[str]) -> None:
    """What /proc says of this process's arguments and environment is what it would say of a new interpreter."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, environment = (int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))
    _overwrite(arguments, [os.fsencode(word) for word in command])
    _overwrite(environment, [os.fsencode(f"{name}={value}") for name, value in os.environ.items()])


def _overwrite(place: tuple[int, int], words: list[bytes]) -> None:
    begin, end = place
    text = b"".join(word + b"\0" for word in words)
    if len(text) > end - begin:
        raise RuntimeError(f"{len(text)} bytes do not fit into {end - begin}")
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
    runpy._run_module_as_main(PROGRAM, alter_argv=False)  # type: ignore[attr-defined]

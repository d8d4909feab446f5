"""The interpreter that has imported torch. `python -u image.py FD ROOM MODULE...`: FD is the socket of the one that
asks; MODULE: what else it is to import.

For each request it makes a child of its *parent* (CLONE_PARENT), so that a test has its job as its own child. The
child forks the processes that wait to become the job's zygote and its store, and then executes the launcher. So both
are children of the launcher, and the launcher is the process that the zygote's forks' orphans come to.

A rank ends as it would without, but for the last: rank 0 alone takes down the interpreter with a thousand modules.
"""

from __future__ import annotations

import atexit
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
OF_A_JOB = ("FLASHRECOVERY", "TORCHELASTIC_", "PYTEST_", "GLOO_")
"""As in `__init__.py`, which is not imported here."""
OWN = "its descriptor"
"""In a request, in place of the number that a descriptor has in the process that it is sent to."""
OF_THE_RANKS = frozenset({"ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "_"})
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MNT_DETACH, _MS_REC, _MS_SLAVE = 2, 0x4000, 0x80000


def main() -> str:
    """Returns in processes that are to be zygotes or stores only: the program that each is to run."""
    atexit.register(_end)  # the last one to be called
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
    _note_ends_of_ranks()
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
            return _become(json.loads(data), descriptors[0])
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


_over = False


def _note_ends_of_ranks() -> None:
    bootstrap = importlib.import_module("flashrecovery.worker.startup.bootstrap")
    leave = bootstrap._leave

    def left(code: int) -> None:
        global _over
        _over = code == 0 and os.environ.get("RANK", "0") != "0"
        leave(code)

    bootstrap._leave = left  # type: ignore[attr-defined]


def _end() -> None:
    """After all exit handlers. To take down what a process was forked with costs it a quarter of a second: each page
    must be copied for that."""
    if _over:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _child_of_parent() -> int:
    """Like ``os.fork``, but the new process has this one's parent."""
    pid: int = ctypes.PyDLL(None).syscall(_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid < 0:
        raise OSError("no process could be made")
    return pid


def _become(request: dict[str, Any], out: int) -> str:
    """Become the launcher, or what it starts. Returns the program to be run in its children only."""
    os.setsid()
    os.chdir(request["cwd"])
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    if request["host"]:
        _enter(request["host"])
    launcher = os.getpid()
    waiting: list[str] = []
    ends: list[socket.socket] = []
    for _ in ("zygote", "store"):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            for end in (*ends, ours):
                end.close()
            return _wait_for_the_agent(theirs, launcher)
        theirs.close()
        ours.set_inheritable(True)
        ends.append(ours)
        waiting += [str(ours.fileno()), str(child)]
    os.execve(sys.executable, [sys.executable, str(LAUNCHER), *waiting, *request["command"]], request["env"])


def _enter(host: str) -> None:
    """As `ip netns exec HOST` does: this network namespace, and a /sys that shows its interfaces."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: bytes | int | None) -> None:
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}", host)

    with open(f"/run/netns/{host}") as namespace:
        call("setns", namespace.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", host.encode(), b"/sys", b"sysfs", 0, None)


def _wait_for_the_agent(sock: socket.socket, launcher: int) -> str:
    """Until it wants this process. Returns the program to be run, as a new interpreter that has imported; ends if the
    agent wants none."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(0)
    while True:
        head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 2)
        if not head:
            os._exit(0)
        request = json.loads(sock.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL))
        fits = request["store"] or _imports_would_be_the_same(request["env"])
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
    os.environ.update({name: str(own) if value == OWN else value for name, value in request["env"].items()})
    command = [str(own) if word == OWN else word for word in request["command"]]
    _show(command)
    sys.orig_argv[:] = command
    program, *arguments = command[command.index("-m") + 1 :]
    found = importlib.util.find_spec(program)
    sys.argv[:] = [(found and found.origin) or "", *arguments]
    sys.path[0] = os.getcwd()
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    return program


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
    runpy._run_module_as_main(main(), alter_argv=False)  # type: ignore[attr-defined]

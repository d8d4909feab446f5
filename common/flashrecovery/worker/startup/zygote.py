"""A process that has imported what workers import, and forks them: one import a node instead of one a rank.

A zygote has one thread, has opened no GPU and computes nothing, so that a fork of it is as good as a fresh interpreter
that has done the same imports. A fork takes milliseconds, and its memory is shared copy-on-write. The word is
Android's, which starts its programs in this way.

A zygote never imports anything after its first fork. For further imports it forks another zygote, which does them
(:class:`flashrecovery.agent.processes.zygote.Zygotes` decides). An import makes a zygote unusable if it leaves a thread
behind, opens a GPU, or is known not to survive a fork (:data:`NOT_FORKED`); also if it keeps something that forks share
but fresh interpreters do not (an open file's position, a connection, a lock between processes). Such a zygote names the
module, and forks nothing.

The new process is forked twice. The intermediate process exits at once, so that the kernel makes the agent the parent
(it has called ``adopt_orphans``). So the death of a zygote harms no worker, and to the agent a worker is an ordinary
child.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType, ModuleType

from flashrecovery.errors import ProtocolError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime import process_end
from flashrecovery.runtime.channel import CHANNEL_ENV, PAGE_ENV
from flashrecovery.runtime.environment import AGENT_PID_ENV, UNFORKABLE_ENV, ZYGOTE_ENV
from flashrecovery.runtime.process_control import die_with_parent, name_thread, redirect_output
from flashrecovery.util.collector import uncollected
from flashrecovery.worker.preimport.import_environment import ImportEnvironment
from flashrecovery.worker.preimport.preimport import not_imported
from flashrecovery.worker.preimport.preimport_script import ScriptPreimport
from flashrecovery.worker.preimport.script_imports import ScriptFacts
from flashrecovery.worker.startup import own_text

NOT_FORKED = {
    "horovod": "it starts MPI, which knows this process only",
    "mpi4py": "it initialises MPI when it is imported, which knows this process only",
    "ray": "it keeps a connection to its node's raylet",
    "tensorflow": "its thread pools do not survive a fork",
}
"""Packages that are left to each worker's own import, and why. The setting ``fork_denylist`` adds to them."""
_SHARED_BY_ALL = frozenset({"/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"})
"""Devices without a position."""
_ADOPTED_S = 10.0
"""Longest wait for the kernel to make the agent this process's parent; it takes microseconds."""
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_DESCRIPTORS = 3
_TASKS = Path("/proc/self/task")
_NAME = "fr-zygote"
"""What the kernel calls this process's threads."""


class UnfitError(Exception):
    """This process must not be forked any more, because of a module that it has imported."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}")
        self.module = module
        self.reason = reason


def serve(command: list[str], imported: ImportEnvironment) -> tuple[bool, ScriptFacts | None]:
    """Fork whatever the agent asks for; the first zygote imports nothing itself.

    Returns only in a forked process that is to run the script, with its environment and its output set up: whether it
    is a standby, and what the zygote has read of the script, if it has. A zygote ends when the agent closes its socket.
    ``imported``: what has been imported so far has set.
    """
    sock = socket.socket(fileno=int(os.environ.pop(ZYGOTE_ENV)))
    sock.set_inheritable(False)
    name_thread(_NAME)
    gc.freeze()  # what has been imported so far, with the little of it that is garbage: no zygote looks at it again
    _send(sock, pb.FromZygote(grown=pb.Grown()))
    facts: ScriptFacts | None = None
    while True:
        request, descriptors = _forked(sock)
        sock.close()
        if not request.HasField("grow"):
            _become_worker(request, descriptors, imported)
            return request.standby, facts
        theirs, log = descriptors
        redirect_output(log)
        sock = socket.socket(fileno=theirs)
        facts = _grow(sock, request.grow, command, imported, facts)


def _grow(
    sock: socket.socket, grow: pb.Grow, command: list[str], imported: ImportEnvironment, facts: ScriptFacts | None
) -> ScriptFacts:
    """Import, and say what has come of it. Returns what has been read of the script, now or before (``facts``)."""
    not_forked = {**NOT_FORKED, **dict.fromkeys(os.environ.get(UNFORKABLE_ENV, "").split(), "the setting unforkable")}
    left_out = set(grow.leave_out) | not_forked.keys()

    before = frozenset(_open_files())
    begun = ThreadWatch()

    def tried(module: str, error: BaseException | None) -> None:
        reason = why_unfit(not_forked, before, begun.look(module))
        if reason is None and error is not None and not _is_missing(error):
            module = not_imported(module)
            reason = f"its import ended in its middle: {type(error).__name__}: {error}"
        if reason is not None:
            raise UnfitError(module, reason)

    script = ScriptPreimport(command, left_out, tried, imported, facts)
    sys.meta_path.insert(0, begun)
    try:
        with uncollected():
            script.import_all(grow.learned)
    except UnfitError as e:
        _send(sock, pb.FromZygote(unforkable=pb.Unforkable(module=e.module, reason=e.reason)))
        return script.facts
    finally:
        sys.meta_path.remove(begun)
    if facts is None:  # else an earlier zygote has read it
        _read_script(script, command)
    # What is there now lives as long as the process. The collector need not look at it, and write to it, in each child.
    gc.collect()
    gc.freeze()
    _send(sock, pb.FromZygote(grown=pb.Grown()))
    return script.facts


def _read_script(script: ScriptPreimport, command: list[str]) -> None:
    file = script.script_file()
    if file is not None:  # by the name under which it will run
        own_text.read_ahead(os.path.join(os.getcwd(), file if command[0] == "-m" else command[0]))


def _is_missing(error: BaseException) -> bool:
    """Whether there was nothing to import, so that nothing was run in part."""
    return isinstance(error, ModuleNotFoundError) and error.__cause__ is None and error.__context__ is None


class ThreadWatch:
    """Among the finders of modules, of which it finds none: in which module's import has each thread begun?

    A module that is imported imports others, and a thread may be of any of them. Costs a few microseconds a module.
    """

    def __init__(self) -> None:
        self._last = ""  # module that was looked for
        self._count = _count_tasks()
        self._begun: dict[str, str] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """A module is about to be looked for."""
        self._look()
        self._last = fullname

    def look(self, outermost: str) -> dict[str, str]:
        """By number of the thread. Those of the module ``outermost`` itself, which has just been imported, are left
        out."""
        self._look()
        return {task: module for task, module in self._begun.items() if module not in ("", outermost)}

    def _look(self) -> None:
        count = _count_tasks()
        if count != self._count:
            self._count = count
            for task in os.listdir(_TASKS):
                self._begun.setdefault(task, self._last if self._last in sys.modules else "")


def _count_tasks() -> int:
    return _TASKS.stat().st_nlink


def why_unfit(
    not_forked: dict[str, str], before: Set[int], begun: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Why a fork of this process would not be like a fresh one; None if it would be. ``before``: the descriptors that
    it had before it imported anything. ``begun``: see :class:`ThreadWatch`."""
    loaded = sorted(not_forked.keys() & sys.modules.keys())
    if loaded:
        return f"{loaded[0]}: {not_forked[loaded[0]]}"
    files = _open_files()
    devices = {target for target in files.values() if target.startswith("/dev/nvidia")}
    if devices:
        return f"it has opened {min(devices)}"
    kept = {target for descriptor, target in files.items() if descriptor not in before} - _SHARED_BY_ALL
    if kept:
        return f"it keeps {min(kept)} open, which all processes would share"
    memory = _shared_memory()
    if memory is not None:
        return f"it has memory that all processes would share: {memory}"
    if _threads():
        # Some libraries (OpenBLAS) end their threads before any fork, and start them again when they need them.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        threads = _threads()
        if threads:
            modules = sorted({begun[task] for task in threads.keys() & begun.keys()})
            who = f"{', '.join(modules)}, which it imports," if modules else "it"
            return f"{who} has started a thread: {', '.join(sorted({*threads.values()}))}"
    return None


def _threads() -> dict[str, str]:
    """This process's threads but the main one, by number: their names. One that has not been given a name has the
    process's own."""
    own = str(os.getpid())
    names = {task.name: (task / "comm").read_text().strip() for task in _TASKS.iterdir() if task.name != own}
    return {task: name if name != _NAME else "one without a name" for task, name in names.items()}


def _open_files() -> dict[int, str]:
    """What the descriptors of this process stand for."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found[int(descriptor.name)] = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # that of this very listing
    return found


def _shared_memory() -> str | None:
    """Something that this process has mapped, and writes to together with its forks: a lock of :mod:`multiprocessing`,
    say."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        _, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode.startswith("rw") and mode.endswith("s"):
            return name[0] if name else "anonymous"
    return None


def _forked(sock: socket.socket) -> tuple[pb.Fork, list[int]]:
    """Answer requests. Returns in the forked process only: what it is to be, and its file descriptors."""
    while True:
        received = _receive(sock)
        if received is None:
            os._exit(0)  # nothing of this process is anybody's: no exit handler of a library may run
        request, descriptors = received
        try:
            pid = _fork_apart()
        except OSError as e:
            _send(sock, pb.FromZygote(forked=pb.Forked(number=request.number, error=str(e))))
        else:
            if pid == 0:
                return request, descriptors
            _send(sock, pb.FromZygote(forked=pb.Forked(number=request.number, pid=pid)))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_apart() -> int:
    """Fork a process that is no child of this one. Returns its pid, and 0 in it. Raises OSError."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child == 0:
            os.close(read)
            os.close(write)
            _wait_for_adoption()
            return 0
        os.write(write, _PID.pack(child))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read(_PID.size)
    os.waitpid(between, 0)
    if len(told) != _PID.size:
        raise OSError("no second process could be forked")
    pid: int = _PID.unpack(told)[0]
    return pid


def _wait_for_adoption() -> None:
    """Until the agent is this process's parent. If the agent has ended meanwhile, so does this process."""
    agent = int(os.environ[AGENT_PID_ENV])
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != agent and time.monotonic() < deadline and os.path.exists(f"/proc/{agent}"):
        time.sleep(0.0001)
    die_with_parent(agent)


def _unfreeze_if_needed() -> None:
    """At process exit, unfreeze the objects that existed before the fork, if a tool reports leaks then. Collecting all
    of them takes half a second, and is not needed otherwise."""
    if counts_what_is_left(list(sys.modules.values())):
        gc.unfreeze()


def counts_what_is_left(modules: Iterable[ModuleType]) -> bool:
    """Whether one of the compiled ones is made with nanobind, which reports a leak for each object that the collector
    has not seen at the interpreter's end."""
    return any(
        type(value).__module__ == "nanobind"
        for module in modules
        if (getattr(module, "__file__", None) or ".so").endswith(".so")  # a module within another one has no file
        for value in [*getattr(module, "__dict__", {}).values()]
    )


def _become_worker(request: pb.Fork, descriptors: list[int], imported: ImportEnvironment) -> None:
    """What differs between fresh interpreters."""
    process_end.at_last(_unfreeze_if_needed)
    channel, page, log = descriptors
    os.setsid()
    name_thread(Path(sys.executable).name)
    redirect_output(log)
    os.environ.clear()
    os.environ.update(request.env)
    imported.apply(os.environ)
    os.environ.update({CHANNEL_ENV: str(channel), PAGE_ENV: str(page)})
    # Until its script seeds them, each fresh interpreter has other random numbers (``random`` sees to that by itself).
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def _send(sock: socket.socket, message: pb.FromZygote) -> None:
    data = message.SerializeToString()
    try:
        sock.sendall(_LENGTH.pack(len(data)) + data)
    except BrokenPipeError:
        os._exit(0)  # the agent wants nothing of this zygote any more


def _receive(sock: socket.socket) -> tuple[pb.Fork, list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, _DESCRIPTORS)
    if not head:
        return None
    rest = _LENGTH.size - len(head)
    head += sock.recv(rest, socket.MSG_WAITALL) if rest else b""
    length = _LENGTH.unpack(head)[0]
    data = sock.recv(length, socket.MSG_WAITALL)
    if len(data) != length:
        raise ProtocolError("a zygote's request ended in its middle")
    return pb.Fork.FromString(data), list(descriptors)

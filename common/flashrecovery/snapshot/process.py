"""The snapshot process of a node: holds the memories in which ranks keep copies of their state.

It outlives every worker, and its agent. It knows nothing of what is in the memories but their versions, uses no torch,
and has one thread. When its agent has gone without a word it waits for the next launch in the same run directory; if
none comes, it writes what it has to disk, and ends.

``python -m flashrecovery.snapshot.process`` is started by the agent, with a listening socket.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrecovery.runtime.local_socket import is_ours
from flashrecovery.runtime.process_control import name_thread
from flashrecovery.snapshot.files import listed, load, save
from flashrecovery.snapshot.locking import Locking, has_swap
from flashrecovery.snapshot.memory import SharedMemory
from flashrecovery.snapshot.wire import receive, send

Key = tuple[int, str]
"""Rank and name of a memory."""


@dataclass
class _Answer:
    words: Mapping[str, Any]
    memories: list[SharedMemory]


class SnapshotProcess:
    """Serves ``listener`` until it is asked to end, or is no longer needed.

    Args:
        folder: where what is held is written if no agent comes back within ``linger_s`` seconds; None: nowhere.
        lock: whether what is held must not be swapped out.
    """

    def __init__(self, listener: socket.socket, folder: Path | None, linger_s: float, *, lock: bool) -> None:
        self._listener = listener
        self._folder, self._linger_s = folder, linger_s
        self._memories: dict[Key, SharedMemory] = {}
        self._lock = lock
        self._locking = Locking(self._holds, _say)
        self._agents: set[socket.socket] = set()
        self._alone_since: float | None = time.monotonic()
        self._has_met_agent = False
        self._selector = selectors.DefaultSelector()
        self._over = False
        self._do: Mapping[str, Callable[[socket.socket, Mapping[str, Any], list[int]], _Answer | None]] = {
            "agent": self._agent,
            "keep": self._keep,
            "drop": self._drop,
            "forget": self._forget,
            "take": self._take,
            "list": self._list,
            "save": self._save,
            "load": self._load,
            "end": self._end,
        }

    def run(self) -> None:
        """Until the end of this process's time."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._over:
            for key, _ in self._selector.select(self._rest_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            if self._locking.busy:
                self._locking.step()
            elif self._rest_s() == 0.0:
                self._leave()

    def _rest_s(self) -> float | None:
        """Seconds until there is something to be done: an agent is still waited for; None: while there is one."""
        if self._locking.busy:
            return 0.0
        if self._alone_since is None:
            return None
        without = 0.0 if self._has_met_agent else _FIRST_CALL_S
        wait = self._linger_s if self._memories else without
        return max(self._alone_since + wait - time.monotonic(), 0.0)

    def _leave(self) -> None:
        """No new launch has resumed: save the snapshots, and end."""
        if self._folder is not None and self._memories:
            saved = save(self._folder, self._all())
            print(f"no agent has come back: {len(saved)} memories were written to {self._folder}", flush=True)
        self._over = True

    def _hold(self, key: Key, memory: SharedMemory) -> None:
        self._memories[key] = memory
        if self._lock:
            self._locking.add(memory)

    def _holds(self, memory: SharedMemory) -> bool:
        return any(memory is held for held in self._memories.values())

    def _all(self) -> list[tuple[int, str, SharedMemory]]:
        return [(rank, name, memory) for (rank, name), memory in sorted(self._memories.items())]

    # -- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        """All that are waiting."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            if is_ours(sock):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            else:
                sock.close()

    def _catch_up(self, asking: socket.socket) -> None:
        """Hear what others have said before ``asking`` did: connections have no order among them, and a process that
        has died was the last to know what it kept."""
        self._accept()
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            while isinstance(sock, socket.socket) and sock not in (self._listener, asking) and _has_message(sock):
                self._hear(sock, in_turn=False)

    def _hear(self, sock: socket.socket, *, in_turn: bool = True) -> None:
        try:
            message, descriptors = receive(sock)
        except BlockingIOError:
            return  # it has been heard meanwhile
        except OSError:
            message, descriptors = None, []
        if message is None:
            self._lost(sock)
            return
        if in_turn and message["do"] in _ABOUT_ALL:
            self._catch_up(sock)
        answer = self._do[message["do"]](sock, message, descriptors)
        if answer is None:
            return
        try:
            send(sock, answer.words, [memory.fd for memory in answer.memories])
        except OSError as e:  # the process that has asked is gone
            print(f"{message['do']}: {e}", flush=True)
            self._lost(sock)

    def _lost(self, sock: socket.socket) -> None:
        if sock in self._agents:
            self._agents.discard(sock)
            if not self._agents:
                self._alone_since = time.monotonic()
        self._selector.unregister(sock)
        sock.close()

    # -- what is asked for ------------------------------------------------------------------------

    def _agent(self, sock: socket.socket, _: Mapping[str, Any], __: list[int]) -> _Answer:
        self._agents.add(sock)
        self._alone_since, self._has_met_agent = None, True
        return _Answer({}, [])

    def _keep(self, _: socket.socket, message: Mapping[str, Any], descriptors: list[int]) -> None:
        (fd,) = descriptors
        memory = SharedMemory.of(fd)
        if memory is not None:
            self._hold((message["rank"], message["name"]), memory)

    def _drop(self, _: socket.socket, message: Mapping[str, Any], __: list[int]) -> None:
        self._memories.pop((message["rank"], message["name"]), None)

    def _forget(self, _: socket.socket, message: Mapping[str, Any], __: list[int]) -> _Answer:
        ranks = message["ranks"]
        self._memories = {k: m for k, m in self._memories.items() if ranks is not None and k[0] not in ranks}
        return _Answer({}, [])

    def _take(self, _: socket.socket, message: Mapping[str, Any], __: list[int]) -> _Answer:
        found = {name: memory for (rank, name), memory in self._memories.items() if rank == message["rank"]}
        return _Answer({"names": list(found)}, list(found.values()))

    def _list(self, _: socket.socket, __: Mapping[str, Any], ___: list[int]) -> _Answer:
        held = [(memory.version, memory.nbytes, rank, name) for (rank, name), memory in self._memories.items()]
        return _Answer({"held": held}, [])

    def _save(self, _: socket.socket, message: Mapping[str, Any], __: list[int]) -> _Answer:
        try:
            saved = save(Path(message["folder"]), self._all())
        except OSError as e:
            return _Answer({"saved": [], "error": f"{message['folder']}: {e.strerror}"}, [])
        return _Answer({"saved": sorted({one.version for one in saved}), "error": ""}, [])

    def _load(self, _: socket.socket, message: Mapping[str, Any], __: list[int]) -> _Answer:
        folder = Path(message["folder"])
        wrong = []
        for saved in listed(folder):
            memory = load(folder, saved)
            if memory is None:
                wrong.append(saved.file)
            else:
                self._hold((saved.rank, saved.name), memory)
        return _Answer({"damaged": wrong}, [])

    def _end(self, _: socket.socket, __: Mapping[str, Any], ___: list[int]) -> None:
        self._over = True


def _say(words: str) -> None:
    print(words, flush=True)


def _has_message(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except OSError:
        return False


_ABOUT_ALL = frozenset(("take", "list", "save", "forget"))
"""What depends on what others have said."""
_FIRST_CALL_S = 10.0
"""An agent that has started this process calls within milliseconds."""


def main() -> None:
    """Arguments: file descriptor of the listening socket, seconds to linger, folder ("" for none)."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal all processes; this one is ended by its agent
    listener = socket.socket(fileno=int(sys.argv[1]))
    name_thread("fr-snapshots")
    SnapshotProcess(listener, Path(sys.argv[3]) if sys.argv[3] else None, float(sys.argv[2]), lock=has_swap()).run()


if __name__ == "__main__":
    main()

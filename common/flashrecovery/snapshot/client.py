"""What ranks and agents ask of their node's snapshot process."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrecovery.snapshot import address
from flashrecovery.snapshot.memory import SharedMemory
from flashrecovery.snapshot.wire import receive, send

_RANK_WAITS_S, _AGENT_WAITS_S = 10.0, 0.5
"""For an answer, which takes less than a millisecond. An agent has a whole node to look after meanwhile."""
_START_S = 10.0
"""For the first answer of a process that is being started; an interpreter's start on a busy machine."""


class Keeper:
    """A rank's side: the snapshot process of its node keeps what is given to it. Any thread.

    A process that has died is replaced by the agent; :meth:`check` notices that, and gives everything to the new one.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._kept: dict[str, SharedMemory] = {}
        self._lock = threading.Lock()
        self._sock = self._call()

    def _call(self) -> socket.socket | None:
        sock = address.call(self._name)
        if sock is not None:
            sock.settimeout(_RANK_WAITS_S)
        return sock

    @staticmethod
    def from_env(rank: int) -> Keeper | None:
        """The keeper of this process's node; None if there is to be none."""
        name = os.environ.get(address.SNAPSHOT_ENV)
        return Keeper(name, rank) if name else None

    def left(self) -> dict[str, SharedMemory]:
        """What is kept of this rank, by name: what the process before this one has left. Nothing if the snapshot
        process does not answer."""
        with self._lock:
            try:
                if self._sock is None:
                    return {}
                send(self._sock, {"do": "take", "rank": self._rank})
                words, descriptors = receive(self._sock)
            except OSError:
                return {}
        names = words["names"] if words is not None else []
        found = {name: SharedMemory.of(fd) for name, fd in zip(names, descriptors, strict=True)}
        self._kept = {name: memory for name, memory in found.items() if memory is not None}
        return dict(self._kept)

    def keep(self, name: str, memory: SharedMemory | None) -> None:
        """Keep ``memory`` under this name, and what was there no longer; None: nothing."""
        with self._lock:
            if memory is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = memory
            self._tell(name, memory)

    def check(self) -> None:
        """Called once a step."""
        with self._lock:
            if self._sock is not None and not _ended(self._sock):
                return
            if self._sock is not None:
                self._sock.close()
            self._sock = self._call()
            for name, memory in self._kept.items():
                self._tell(name, memory)

    def _tell(self, name: str, memory: SharedMemory | None) -> None:
        if self._sock is None:
            return
        words = {"do": "drop" if memory is None else "keep", "rank": self._rank, "name": name}
        try:
            send(self._sock, words, [] if memory is None else [memory.fd])
        except OSError:
            self._sock.close()
            self._sock = None  # check() connects again


def _ended(sock: socket.socket) -> bool:
    """Whether the other end is gone, or this one is closed. Does not wait."""
    if sock.fileno() < 0:
        return True
    looked = select.poll()
    looked.register(sock, select.POLLIN)
    if not looked.poll(0):
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


@dataclass(frozen=True)
class HeldMemory:
    """One memory that the process has, of a rank and under a name. ``nbytes`` of content; ``version`` -1: not whole."""

    version: int
    nbytes: int
    rank: int
    name: str


class SnapshotHost:
    """An agent's side: it starts the process of its node, or finds the one that an earlier launch has left."""

    def __init__(self, name: str, sock: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.name = name
        self._sock = sock
        self._process = process
        self._sock.settimeout(_START_S)
        self._ask("agent")
        self._sock.settimeout(_AGENT_WAITS_S)

    @staticmethod
    def find(name: str) -> SnapshotHost | None:
        """The process that an earlier launch has left; None if there is none."""
        sock = address.call(name)
        try:
            return None if sock is None else SnapshotHost(name, sock, None)
        except OSError:
            return None  # its time has just ended

    @staticmethod
    def start(name: str, log: Path, folder: Path | None, linger_s: float) -> SnapshotHost:
        """A new process; for the rest see :class:`~.process.SnapshotProcess`. Raises OSError."""
        with address.listen(name) as listener, open(log, "ab") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flashrecovery.snapshot.process"),
                    *(str(listener.fileno()), str(linger_s), str(folder or "")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # outlives its agent, and what is sent to the agent's group
            )
            sock = address.call(name)
        if sock is None:
            raise ConnectionRefusedError(f"the snapshot process {name} was started, and takes no connection; see {log}")
        return SnapshotHost(name, sock, process)

    @property
    def pid(self) -> int | None:
        """None if an earlier launch has started it."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the process is there."""
        return not _ended(self._sock)

    def held(self) -> list[HeldMemory]:
        """What it has. Raises OSError if it is gone."""
        return [HeldMemory(*one) for one in self._ask("list")["held"]]

    def forget(self, ranks: Collection[int] | None) -> None:
        """Nothing of these ranks (None: of any) is needed here any more. Raises OSError if it is gone, or does not
        answer."""
        self._ask("forget", ranks=None if ranks is None else list(ranks))

    def keep(self, rank: int, name: str, memory: SharedMemory) -> None:
        """Hold ``memory`` for a rank. Raises OSError if it is gone."""
        send(self._sock, {"do": "keep", "rank": rank, "name": name}, [memory.fd])

    def save(self, folder: Path) -> tuple[list[int], str]:
        """Write every complete snapshot to ``folder``; the memories must not be written meanwhile. Returns the versions
        that were written, and what went wrong. Raises OSError if the process is gone."""
        self._sock.settimeout(None)
        answer = self._ask("save", folder=str(folder))
        return answer["saved"], answer["error"]

    def load(self, folder: Path) -> list[str]:
        """Hold what was written to ``folder``. Returns the files that are damaged. Raises OSError if it is gone."""
        self._sock.settimeout(None)
        damaged: list[str] = self._ask("load", folder=str(folder))["damaged"]
        self._sock.settimeout(_AGENT_WAITS_S)
        return damaged

    def kill(self) -> None:
        """It does not answer. Nothing if an earlier launch has started it: then it is left alone."""
        if self._process is not None:
            self._process.kill()
        self.close()

    def end(self) -> None:
        """The job is over: the process ends, and what it has is given back."""
        try:
            self._sock.settimeout(_RANK_WAITS_S)
            send(self._sock, {"do": "end"})
            while self._sock.recv(1):
                pass
        except TimeoutError:
            self.kill()
            return
        except OSError:
            pass  # it has ended already
        self.close()

    def close(self) -> None:
        """Give back what this side has of it."""
        self._sock.close()
        if self._process is not None:
            self._process.wait()

    def _ask(self, what: str, **details: Any) -> Mapping[str, Any]:
        send(self._sock, {"do": what, **details})
        answer, _ = receive(self._sock)
        if answer is None:
            raise ConnectionResetError("the snapshot process has ended")
        return answer

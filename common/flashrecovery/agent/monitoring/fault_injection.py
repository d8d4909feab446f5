"""Faults on this node: those that strike from outside, and those that are armed in a worker.

An armed fault belongs to its rank: a replacement gets what has not fired.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb

REPLACING = "recovery:replacing"
"""The phase in which a replacement is killed as soon as it has its rank. It cannot do that itself."""
_SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "segv": signal.SIGSEGV}


class NodeFaults:
    """Armed faults by rank, in the order in which they came. ``notice`` takes a rank, a kind and a text."""

    def __init__(self, notice: Callable[[int, NoticeKind, str], None]) -> None:
        self._notice = notice
        self._armed: dict[int, list[pb.Command]] = {}
        self._at_replace: set[int] = set()

    def deliver(self, command: pb.Command, process: WorkerProcess | None) -> None:
        """A fault for the rank that ``process`` fills (None: no process does now)."""
        if command.fault.phase == REPLACING:
            self._at_replace.add(command.rank)
        elif command.fault.phase:
            self._armed.setdefault(command.rank, []).append(command)
            _send(command, process)
        elif process is not None:
            _strike(command, process)

    def fired(self, rank: int, fault: pb.Fault) -> None:
        """The worker of ``rank`` reports the fault before it executes it."""
        armed = self._armed.get(rank, [])
        for command in armed:
            if (command.fault.phase, command.fault.step) == (fault.phase, fault.step):
                armed.remove(command)
                return

    def armed(self, rank: int) -> bool:
        """Whether the process that fills ``rank`` may be about to say that one has fired."""
        return bool(self._armed.get(rank))

    def filled(self, process: WorkerProcess, *, replacement: bool) -> None:
        """``process`` fills its rank from now on."""
        for command in self._armed.get(process.place, []):
            _send(command, process)
        if replacement and process.place in self._at_replace:
            self._at_replace.remove(process.place)
            self._notice(process.place, NoticeKind.FAULT_FIRED, f"sigkill at {REPLACING}")
            process.signal(signal.SIGKILL)


def _send(command: pb.Command, process: WorkerProcess | None) -> None:
    if process is not None and not process.dead:
        process.send(pb.ToWorker(command=command))


def _strike(command: pb.Command, process: WorkerProcess) -> None:
    """A fault without a phase hits from outside, or in the next moment between two steps."""
    number = _SIGNALS.get(command.fault.fault)
    if number is not None:
        process.signal(number)
    else:
        command.fault.phase = "between"
        process.send(pb.ToWorker(command=command))

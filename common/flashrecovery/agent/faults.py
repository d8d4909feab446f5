"""Faults that are armed in the workers of this node. They belong to a rank: a replacement gets what has not fired."""

from __future__ import annotations

from flashrecovery.proto import flashrecovery_pb2 as pb


class ArmedFaults:
    """By rank, in the order in which they were armed."""

    def __init__(self) -> None:
        self._armed: dict[int, list[pb.Command]] = {}

    def add(self, command: pb.Command) -> None:
        """A command with a fault that strikes at a phase."""
        self._armed.setdefault(command.rank, []).append(command)

    def fired(self, rank: int, fault: pb.Fault) -> None:
        """The worker of ``rank`` says so; it does before it strikes."""
        armed = self._armed.get(rank, [])
        for command in armed:
            if (command.fault.phase, command.fault.step) == (fault.phase, fault.step):
                armed.remove(command)
                return

    def of(self, rank: int) -> list[pb.Command]:
        """What is armed for ``rank`` now."""
        return list(self._armed.get(rank, []))

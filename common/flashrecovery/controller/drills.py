"""Fault drills: faults of the command line, for the beginning, and of ``flashrecovery inject``; and which faults there
can be."""

from __future__ import annotations

from flashrecovery.config import FaultSpec, check_fault
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


class Drills:
    """The faults that were asked for in a job of ``world`` ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._armed: list[FaultSpec] = []

    def refusal(self, request: pb.InjectRequest) -> str:
        """Why this fault cannot be delivered; "" if it can."""
        if request.rank >= self._world:
            return f"rank {request.rank} is outside the world of {self._world} ranks"
        try:
            check_fault(request.fault, request.phase or None)
        except ConfigError as e:
            return str(e)
        return ""

    def arm(self, spec: FaultSpec) -> None:
        """A fault of the command line; its rank gets it right before the first step."""
        self._armed.append(spec)

    def take_armed(self) -> list[pb.InjectRequest]:
        """The first step is about to begin."""
        armed, self._armed = self._armed, []
        return [
            pb.InjectRequest(rank=s.rank, fault=s.fault, phase=s.at or "between", step=-1 if s.step is None else s.step)
            for s in armed
        ]

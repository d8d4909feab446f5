"""Fault drills: faults of the command line, for the beginning, and of ``flashrecovery inject``; and which faults there
can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashrecovery.config import FaultSpec, check_fault
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import FailureKind
from flashrecovery.proto import flashrecovery_pb2 as pb

_SEEN_AS: Mapping[str, frozenset[FailureKind]] = {
    "sigkill": frozenset({FailureKind.KILLED}),
    "segv": frozenset({FailureKind.KILLED}),
    "exit": frozenset({FailureKind.EXIT}),
    "raise": frozenset({FailureKind.EXCEPTION}),
    "device": frozenset({FailureKind.EXCEPTION, FailureKind.CONTEXT_LOST}),
    "sigstop": frozenset({FailureKind.STOPPED, FailureKind.HANG, FailureKind.UNRESPONSIVE}),
    "hang": frozenset({FailureKind.HANG, FailureKind.UNRESPONSIVE}),
}
"""The kind of failure that a fault in a rank is reported as."""
_INJECTED = "InjectedFault"


@dataclass
class Asked:
    """Faults that were asked for and delivered, and after which their ranks have not failed yet.

    A worker reports a fault just before it executes it; the failure may be reported first, because another thread
    sees it. Then its kind and step tell.
    """

    drills: list[pb.InjectRequest] = field(default_factory=list)
    fired: list[pb.InjectRequest] = field(default_factory=list)

    def fires(self, rank: int, fault: pb.Fault) -> None:
        """The rank, or its agent, reports that a fault fires. Without a phase: a replacement is killed."""
        for drill in self.drills:
            replacing = not fault.phase and drill.phase == "recovery:replacing"
            same = (drill.phase or "between", drill.step) == (fault.phase, fault.step)
            if drill.rank == rank and (same or replacing) and drill not in self.fired:
                self.fired.append(drill)
                return

    def take(self, rank: int, kind: FailureKind, step: int, exception: str = "") -> bool:
        """Whether this failure of ``rank`` was requested by a drill; one failure for each fault. ``step``: the step in
        which it happened; ``exception``: the type that the script raised."""
        mine = [drill for drill in self.drills if drill.rank == rank and kind in _SEEN_AS.get(drill.fault, ())]
        found = next((d for d in mine if d in self.fired), None)
        found = found or next((d for d in mine if _is_like(d, step, exception)), None)
        if found is None:
            return False
        self.drills.remove(found)
        if found in self.fired:
            self.fired.remove(found)
        return True

    def missed(self) -> list[pb.InjectRequest]:
        """The drills that have not fired."""
        return [drill for drill in self.drills if drill not in self.fired]


def _is_like(drill: pb.InjectRequest, step: int, exception: str) -> bool:
    """Whether a failure may come from a drill that has not been reported yet. A fault below a step counts as
    in it, or in the next one."""
    if drill.fault == "raise" and exception.rpartition(".")[2] != _INJECTED:
        return False
    anywhere = not drill.phase or drill.phase.startswith("recovery:") or drill.step < 0
    return anywhere or step in (drill.step, drill.step + 1)


class FaultDrills:
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

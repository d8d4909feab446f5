"""Finds what of the job's events belongs to one recovery, in one place: report, metrics, page and traces are made from
it.

An *incident* begins with the first failure and ends with the recovery, or with the job. Failures before the first step
are answered by a new start of all ranks, not by a recovery, so they begin none. A further failure in the middle of a
recovery belongs to the same incident.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.kinds import NoticeKind
from flashrecovery.observe.facts import RestoreSpeed

End = ev.RecoveryFinished | ev.JobFailed
_SHORT = 32 << 20
"""With fewer bytes than this, messages take most of the time."""


@dataclass(frozen=True)
class Incident:
    """``events``: all that belong to it, in order. ``end`` None: it is not over."""

    events: tuple[ev.Event, ...]

    @property
    def end(self) -> End | None:
        last = self.events[-1]
        return last if isinstance(last, End) else None

    @property
    def finished(self) -> ev.RecoveryFinished | None:
        """The recovery's end event, None if it has not ended."""
        return self.end if isinstance(self.end, ev.RecoveryFinished) else None

    @property
    def failures(self) -> tuple[ev.FailureDetected, ...]:
        return tuple(e for e in self.events if isinstance(e, ev.FailureDetected))

    @property
    def fallback(self) -> ev.FallbackStarted | None:
        """The newest, if it went back to a checkpoint."""
        found = [e for e in self.events if isinstance(e, ev.FallbackStarted)]
        return found[-1] if found else None

    @property
    def generation(self) -> int:
        """The newest: each further failure may have begun another one."""
        return self._newest.generation

    @property
    def victims(self) -> tuple[int, ...]:
        return tuple(self._newest.victims)

    @property
    def cause(self) -> str:
        """Kind of the first failure."""
        if self.finished is not None and self.finished.cause:
            return self.finished.cause
        return next((s.cause for s in self._starts() if s.cause), "")

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name, of all attempts together."""
        if self.finished is not None and self.finished.phases:
            return dict(self.finished.phases)
        found: dict[str, float] = {}
        for event in self.events:
            if isinstance(event, ev.RecoveryPhase):
                found[event.name] = found.get(event.name, 0.0) + event.seconds
        return found

    @property
    def total_s(self) -> float:
        """Seconds from the failure to the first step after it; as far as its phases are known if it is not over."""
        return self.finished.total_s if self.finished is not None else sum(self.phases.values())

    @property
    def resume_step(self) -> int:
        """The step at which the job goes on; -1: it does not, or not yet."""
        return self.finished.resume_step if self.finished is not None else -1

    @property
    def bytes(self) -> int:
        """Bytes that were transferred."""
        return self.finished.bytes if self.finished is not None else 0

    @property
    def restore(self) -> RestoreSpeed | None:
        """How fast state came back; None: too little of it for that to say anything."""
        end = self.finished
        if end is None or end.rank_bytes < _SHORT or end.phases.get("restore", 0.0) <= 0.0:
            return None
        return RestoreSpeed(end.rank_bytes / end.phases["restore"], end.copy_speed, end.link_speed)

    def _starts(self) -> Iterator[ev.RecoveryStarted]:
        return (e for e in self.events if isinstance(e, ev.RecoveryStarted))

    @property
    def _newest(self) -> ev.RecoveryStarted | ev.RecoveryFinished:
        if self.finished is not None:
            return self.finished
        *_, newest = self._starts()
        return newest


class Incidents:
    """Takes every event; tells incidents apart as they come."""

    def __init__(self) -> None:
        self._events: list[ev.Event] = []
        self._started = False

    def take(self, event: ev.Event) -> Incident | None:
        """The incident of which ``event`` is the last one."""
        if isinstance(event, ev.JobStarted) or (isinstance(event, ev.Notice) and event.kind == NoticeKind.START_AGAIN):
            self._clear()
            return None
        self._started = self._started or isinstance(event, ev.RecoveryStarted | ev.RecoveryFinished)
        if self._started or isinstance(event, ev.FailureDetected):
            self._events.append(event)
        if not isinstance(event, End):
            return None
        found = self.open
        self._clear()
        return found

    @property
    def open(self) -> Incident | None:
        """The one that is under way."""
        return Incident(tuple(self._events)) if self._started else None

    def _clear(self) -> None:
        self._events, self._started = [], False

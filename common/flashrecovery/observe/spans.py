"""From events to the spans of a trace: one trace for each recovery. Pure functions.

::

    recovery                       from the failure to the first newly committed step
        detect, quiesce, replace, [fallback,] regroup, restore, verify, redo

A further failure in the middle of a recovery belongs to the same trace: its phases come again, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.kinds import NoticeKind

_INSTANT_S = 1e-6
Value = str | int | float | bool | Sequence[int]


@dataclass(frozen=True)
class Moment:
    """Something that happened within a span; ``at_s`` in Unix seconds."""

    name: str
    at_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """``start_s`` and ``end_s`` in Unix seconds. ``error``: what went wrong, "" if nothing did."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    moments: tuple[Moment, ...] = ()
    children: tuple[Span, ...] = ()
    error: str = ""


class RecoveryEvents:
    """Finds the events that belong to one recovery, as they come in."""

    def __init__(self) -> None:
        self._events: list[ev.Event] = []
        self._started = False

    def take(self, event: ev.Event) -> list[ev.Event] | None:
        """All events of a recovery if ``event`` is its last one."""
        if isinstance(event, ev.RecoveryStarted):
            self._started = True
        elif isinstance(event, ev.JobStarted) or (
            isinstance(event, ev.Notice) and event.kind == NoticeKind.START_AGAIN
        ):
            self._begin_anew()  # failures before the first step are answered by a restart, not by a recovery
        elif not self._started and not isinstance(event, ev.FailureDetected):
            return None
        self._events.append(event)
        if isinstance(event, ev.RecoveryFinished | ev.JobFailed):
            return self._begin_anew()
        return None

    def _begin_anew(self) -> list[ev.Event] | None:
        found = self._events if self._started else None
        self._events, self._started = [], False
        return found


def spans_of(events: Iterable[ev.Event]) -> list[Span]:
    """The root span of every recovery that is over, with its phases as children."""
    finder = RecoveryEvents()
    return [span_of(found) for event in events if (found := finder.take(event)) is not None]


def span_of(events: Sequence[ev.Event]) -> Span:
    """One recovery, from the events that :class:`RecoveryEvents` found.

    The times of day are reckoned back from the last event by the monotonic clock, so that a step of the system's clock
    in the middle does not bend them.
    """
    last = events[-1]

    def unix(event: ev.Event) -> float:
        return last.time - (last.monotonic - event.monotonic)

    failures = [e for e in events if isinstance(e, ev.FailureDetected)]
    start = min((unix(f) - f.detect_s for f in failures), default=unix(events[0]))
    if isinstance(last, ev.RecoveryFinished):
        start = min(start, unix(last) - last.total_s)
    children = [Span("detect", start, unix(failures[0]))] if failures else []
    for event in events:
        if isinstance(event, ev.RecoveryPhase):
            end = unix(event)
            begin = max(end - event.seconds, start)
            children.append(Span(event.name, begin, end, {"flashrecovery.generation": event.generation}))
    if children and unix(last) - children[-1].end_s > _INSTANT_S:
        # no event ends the last phase but the recovery's own end: the first new step, or the job's giving up
        name = "redo" if isinstance(last, ev.RecoveryFinished) else "given up"
        children.append(Span(name, children[-1].end_s, unix(last)))
    return Span(
        name="recovery",
        start_s=start,
        end_s=unix(last),
        attributes=_attributes(events),
        moments=tuple(_moment(e, unix(e)) for e in events if isinstance(e, _MOMENTS)),
        children=tuple(children),
        error=last.reason if isinstance(last, ev.JobFailed) else "",
    )


_MOMENTS = (ev.FailureDetected, ev.RecoveryStarted, ev.FallbackStarted, ev.FaultInjected, ev.Notice)


def _attributes(events: Sequence[ev.Event]) -> dict[str, Value]:
    started = [e for e in events if isinstance(e, ev.RecoveryStarted)]
    last = events[-1]
    found: dict[str, Value] = {
        "generation": started[-1].generation,
        "victims": started[-1].victims,
        "cause": started[0].cause,
    }
    if isinstance(last, ev.RecoveryFinished):
        found |= {
            "generation": last.generation,
            "victims": last.victims,
            "cause": last.cause,
            "resume_step": last.resume_step,
            "bytes": last.bytes,
            "reason": last.reason,
        }
    return {f"flashrecovery.{key}": value for key, value in found.items()}


def _moment(event: ev.Event, at_s: float) -> Moment:
    keep = event.model_dump(exclude={"event", "time", "monotonic"})
    return Moment(event.event, at_s, {f"flashrecovery.{key}": value for key, value in keep.items() if value != ""})

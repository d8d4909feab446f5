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
from flashrecovery.observe.incident import Incident, Incidents

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


def spans_of(events: Iterable[ev.Event]) -> list[Span]:
    """The root span of every recovery that is over, with its phases as children."""
    incidents = Incidents()
    return [span_of(over) for event in events if (over := incidents.take(event)) is not None]


def span_of(incident: Incident) -> Span:
    """One recovery that is over.

    The times of day are reckoned back from the last event by the monotonic clock, so that a step of the system's clock
    in the middle does not bend them.
    """
    events, end = incident.events, incident.end
    last = events[-1]

    def unix(event: ev.Event) -> float:
        return last.time - (last.monotonic - event.monotonic)

    failures = incident.failures
    start = min((unix(f) - f.detect_s for f in failures), default=unix(events[0]))
    if incident.finished is not None:
        start = min(start, unix(last) - incident.total_s)
    children = [Span("detect", start, unix(failures[0]))] if failures else []
    for event in events:
        if isinstance(event, ev.RecoveryPhase):
            phase_end = unix(event)
            begin = max(phase_end - event.seconds, start)
            children.append(Span(event.name, begin, phase_end, {"flashrecovery.generation": event.generation}))
    if children and unix(last) - children[-1].end_s > _INSTANT_S:
        # no event ends the last phase but the recovery's own end: the first new step, or the job's giving up
        name = "redo" if incident.finished is not None else "given up"
        children.append(Span(name, children[-1].end_s, unix(last)))
    return Span(
        name="recovery",
        start_s=start,
        end_s=unix(last),
        attributes=_attributes(incident),
        moments=tuple(_moment(e, unix(e)) for e in events if isinstance(e, _MOMENTS)),
        children=tuple(children),
        error=end.reason if isinstance(end, ev.JobFailed) else "",
    )


_MOMENTS = (ev.FailureDetected, ev.RecoveryStarted, ev.FallbackStarted, ev.FaultInjected, ev.Notice)


def _attributes(incident: Incident) -> dict[str, Value]:
    end = incident.finished
    found: dict[str, Value] = {
        "generation": incident.generation,
        "victims": list(incident.victims),
        "cause": incident.cause,
    }
    if end is not None:
        found |= {"resume_step": end.resume_step, "bytes": end.bytes, "reason": end.reason}
    return {f"flashrecovery.{key}": value for key, value in found.items()}


def _moment(event: ev.Event, at_s: float) -> Moment:
    keep = event.model_dump(exclude={"event", "time", "monotonic"})
    return Moment(event.event, at_s, {f"flashrecovery.{key}": value for key, value in keep.items() if value != ""})

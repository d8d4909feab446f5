"""What one rank went through, in order, from the event log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.observe.goodput import on_one_clock
from flashrecovery.plan.words import failed_text, raised_text, ranks_text, step_text


@dataclass(frozen=True)
class Passage:
    """One event of a rank's story. ``seconds``: after the log's first event; ``generation``: that of the event."""

    seconds: float
    generation: int
    text: str


def story(events: Iterable[ev.Event], rank: int) -> list[Passage]:
    """The story of ``rank`` (its number at the launch), oldest event first. Events of other ranks are part of it where
    they concern this one: a recovery stops every rank."""
    found: list[Passage] = []
    began: float | None = None
    for event in on_one_clock(events):
        began = event.time if began is None else began
        found += [Passage(round(event.time - began, 3), event.generation, text) for text in _texts(event, rank)]
    return found


def world_size_of(events: Iterable[ev.Event]) -> int:
    """The largest number of ranks in the log; 0: it names none."""
    sizes = [e.world_size for e in events if isinstance(e, ev.ControllerStarted | ev.JobStarted)]
    grown = [max(e.ranks, default=-1) + 1 for e in events if isinstance(e, ev.JobResized)]
    replanned = [e.ranks for e in events if isinstance(e, ev.JobReplanned)]
    return max([*sizes, *grown, *replanned], default=0)


def _texts(event: ev.Event, rank: int) -> Iterator[str]:
    """The lines of ``event`` for ``rank``; none if it does not concern the rank."""
    match event:
        case ev.ControllerStarted():
            yield f"a controller starts: {event.world_size} ranks"
        case ev.JobStarted():
            yield f"all ranks have come to their first step, {step_text(event.step)}, after {event.seconds:.1f} s"
        case ev.FaultInjected() if event.rank == rank:
            yield f"fault injected: {event.fault}" + (f" in {event.phase}" if event.phase else "")
        case ev.FailureDetected() if event.rank == rank:
            yield from _failure(event)
        case ev.NodeLost() if rank in event.ranks:
            yield f"its node {event.node} is lost: {event.evidence}"
        case ev.RecoveryStarted():
            because = f", because of {ranks_text(event.victims)}" if event.victims else ""
            what = "it is replaced" if rank in event.victims else f"it is stopped{because}"
            yield f"recovery: {what} ({event.cause})"
        case ev.RecoveryPhase():
            yield f"  {event.name}: {event.seconds * 1000:.0f} ms"
        case ev.FallbackStarted():
            yield f"goes back to the checkpoint of step {event.version:,}: {event.reason}"
        case ev.RecoveryFinished():
            yield _recovered(event, rank)
        case ev.JobResized() if not event.only_step:
            yield _resized(event, rank)
        case ev.JobReplanned():
            at = step_text(event.step, event.iteration)
            yield f"restarts at {at} in another parallel layout: {event.before} -> {event.layout}"
        case ev.Notice() if event.rank == rank:
            yield f"notice {event.kind}: {event.text}"
        case ev.JobFinished():
            last = f" after {step_text(event.step, event.iteration)}" if event.step >= 0 else ""
            yield f"the job has finished with exit code {event.exit_code}{last}"
        case ev.JobFailed():
            yield f"the job has failed: {event.reason}"


def _failure(event: ev.FailureDetected) -> Iterator[str]:
    yield (
        f"failed in {step_text(event.step, event.iteration)}: {failed_text(event.kind, event.evidence)}; detected "
        f"after {event.detect_s * 1000:.0f} ms"
    )
    if event.exception:
        yield f"  {raised_text(event.exception, event.message)}"


def _recovered(event: ev.RecoveryFinished, rank: int) -> str:
    at = step_text(event.resume_step, event.iteration)
    if rank in event.left:
        return f"is not replaced: the job goes on at {at} without it"
    who = "its replacement goes on" if rank in event.victims else "goes on"
    given = rank in event.victims or rank in event.survivors_given
    source = f", with state from {ranks_text(map(int, event.sources))}" if given and event.sources else ""
    sent = f", after {event.sources[str(rank)]} transfers to others" if str(rank) in event.sources else ""
    return f"{who} at {at}{source}{sent}; the recovery took {event.total_s:.3f} s ({event.reason})"


def _resized(event: ev.JobResized, rank: int) -> str:
    at = step_text(event.step, event.iteration)
    what = "leaves the job" if rank in event.left else "joins the job" if rank in event.came else "goes on"
    return f"{what} at {at}: {event.before} -> {event.replicas} replicas"

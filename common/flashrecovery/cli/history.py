"""From the event log to what happened: the job's end, and every recovery with its failures and phases. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashrecovery import events as ev
from flashrecovery.observe.facts import RestoreSpeed
from flashrecovery.observe.goodput import on_one_clock
from flashrecovery.observe.incident import Incident, Incidents

PHASES = ("detect", "quiesce", "replace", "fallback", "regroup", "restore", "verify", "redo")
"""A recovery's phases in the order in which they happen; together they are its ``total_s``."""

BOUNDS: dict[str, str] = {
    "detect": "the poll of /proc (5 ms) and pidfd for a dead process; the hang threshold "
    "(timeouts.hang_step_s, hang_factor) for one that lives but stands still",
    "quiesce": "the slowest survivor: it leaves its collective within milliseconds, but a kernel that runs is "
    "finished first, and a rank in its optimizer may complete the update (timeouts.mutation_grace_s)",
    "replace": "the replacement's way to its first step: start and imports (a standby has done them: --standby), "
    "then the script's own construction of model, optimizer and data",
    "fallback": "reading the newest checkpoint from storage",
    "regroup": "connecting the new process groups: number of groups times ranks, one store",
    "restore": "the bytes of the lost shards over the busiest sender's link, and the rollback of local copies",
    "verify": "digests of the restored shards, and one round trip to every rank",
    "redo": "one training step: the interrupted one is done again",
}
"""What bounds each phase, for people who want it shorter."""


@dataclass(frozen=True)
class FailureRecord:
    """One detected failure. ``at_s``: seconds after the job's first event."""

    rank: int
    kind: str
    evidence: str
    detect_s: float
    step: int
    at_s: float
    iteration: int = -1


@dataclass(frozen=True)
class RecoveryRecord:
    """One recovery, from its first failure to the first newly committed step. Durations in seconds. ``start``: lines of
    the script in which a replacement spent most time before its first step: file and number, text, seconds.

    ``finished`` is False for the last one of a job that ended in the middle of it; then ``resume_step`` is -1
    and the other facts are those known so far.
    """

    generation: int
    failures: tuple[FailureRecord, ...]
    victims: tuple[int, ...]
    cause: str
    resume_step: int
    bytes: int
    sources: dict[str, int]
    phases: dict[str, float]
    total_s: float
    reason: str
    fallback: str
    at_s: float
    finished: bool
    start: tuple[tuple[str, str, float], ...] = ()
    iteration: int = -1
    restore: RestoreSpeed | None = None

    @property
    def largest(self) -> str:
        """Name of the longest phase ("" if none is known)."""
        return max(self.phases, key=lambda name: self.phases[name], default="")


@dataclass(frozen=True)
class JobHistory:
    """The whole log. ``state``: starting, running, recovering, finished or failed, as of the last event.

    ``started`` is the launch in Unix seconds, ``seconds`` the time from it to the last event. ``launches`` counts the
    jobs that trained in this directory one after another. ``start``: of the newest launch, as in
    :class:`RecoveryRecord`.
    """

    state: str = "starting"
    world_size: int = 0
    generation: int = 0
    launches: int = 0
    started: float = 0.0
    seconds: float = 0.0
    start: tuple[tuple[str, str, float], ...] = ()
    reason: str = ""
    checkpoints: int = 0
    standby_ready: int = 0
    standby_starting: int = 0
    failures: tuple[FailureRecord, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()


def read_history(events: Iterable[ev.Event]) -> JobHistory:
    """What happened, from all events in order."""
    events = list(on_one_clock(events))
    first = _launched(events[0]) if events else 0.0
    incidents, recoveries, failures = Incidents(), [], []
    history = JobHistory(started=first)
    for event in events:
        history = _after(history, event)
        if isinstance(event, ev.FailureDetected):
            failures.append(_failure(event, first))
        if (over := incidents.take(event)) is not None:
            recoveries.append(_recovery(over, first))
    if incidents.open is not None:
        recoveries.append(_recovery(incidents.open, first))
    last = events[-1] if events else None
    return replace(
        history,
        generation=last.generation if last is not None else 0,
        seconds=last.time - first if last is not None else 0.0,
        failures=tuple(failures),
        recoveries=tuple(recoveries),
    )


def _launched(first: ev.Event) -> float:
    """When the job was launched. In older logs nothing is before the first step, which says how long ago it was."""
    return first.time - (first.seconds if isinstance(first, ev.JobStarted) else 0.0)


def _after(known: JobHistory, event: ev.Event) -> JobHistory:
    """What is known of the job after this event, besides its failures and recoveries."""
    if isinstance(event, ev.ControllerStarted):
        return replace(known, world_size=known.world_size or event.world_size)
    if isinstance(event, ev.JobStarted):
        return replace(
            known,
            state="running",
            world_size=event.world_size,
            reason="",
            launches=known.launches + 1,
            start=tuple((line.where, line.text, line.seconds) for line in event.start),
        )
    if isinstance(event, ev.RecoveryStarted):
        return replace(known, state="recovering")
    if isinstance(event, ev.RecoveryFinished):
        return replace(known, state="running")
    if isinstance(event, ev.CheckpointSaved):
        return replace(known, checkpoints=known.checkpoints + 1)
    if isinstance(event, ev.StandbyReady):
        return replace(known, standby_ready=event.ready, standby_starting=event.starting)
    if isinstance(event, ev.JobFinished):
        return replace(known, state="finished")
    if isinstance(event, ev.JobFailed):
        return replace(known, state="failed", reason=event.reason)
    return known


def _failure(event: ev.FailureDetected, first: float) -> FailureRecord:
    at_s = event.time - first - event.detect_s
    return FailureRecord(event.rank, event.kind, event.evidence, event.detect_s, event.step, at_s, event.iteration)


def _recovery(incident: Incident, first: float) -> RecoveryRecord:
    failures = tuple(_failure(event, first) for event in incident.failures)
    end, fallback = incident.finished, incident.fallback
    if end is not None:
        at_s = end.time - first - end.total_s
    else:
        at_s = min((f.at_s for f in failures), default=incident.events[0].time - first)
    return RecoveryRecord(
        generation=incident.generation,
        failures=failures,
        victims=incident.victims,
        cause=incident.cause,
        resume_step=incident.resume_step,
        bytes=incident.bytes,
        restore=incident.restore,
        sources=dict(end.sources) if end is not None else {},
        phases=_ordered(incident.phases),
        total_s=incident.total_s,
        reason=end.reason if end is not None else "",
        fallback=f"checkpoint of step {fallback.version}: {fallback.reason}" if fallback is not None else "",
        at_s=at_s,
        finished=end is not None,
        start=tuple((line.where, line.text, line.seconds) for line in end.start) if end is not None else (),
        iteration=end.iteration if end is not None else -1,
    )


def _ordered(phases: dict[str, float]) -> dict[str, float]:
    rank = {name: i for i, name in enumerate(PHASES)}
    return dict(sorted(phases.items(), key=lambda item: rank.get(item[0], len(PHASES))))

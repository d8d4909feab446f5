"""From the event log to what happened: the job's end, and every recovery with its failures and phases. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flashrecovery import events as ev

PHASES = ("detect", "quiesce", "replace", "fallback", "regroup", "restore", "verify", "redo")
"""In the order in which they happen; together they are a recovery's ``total_s``."""

BOUNDS: dict[str, str] = {
    "detect": "the poll of /proc (5 ms) and pidfd for a dead process; the hang threshold "
    "(timeouts.hang_floor_s, hang_factor) for one that lives but stands still",
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


@dataclass(frozen=True)
class RecoveryRecord:
    """One recovery, from its first failure to the first newly committed step. Durations in seconds.

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

    @property
    def largest(self) -> str:
        """Name of the longest phase ("" if none is known)."""
        return max(self.phases, key=lambda name: self.phases[name], default="")


@dataclass(frozen=True)
class JobHistory:
    """The whole log. ``state``: starting, running, recovering, finished or failed, as of the last event.

    ``started`` is the launch in Unix seconds, ``seconds`` the time from it to the last event. ``launches`` counts the
    jobs that trained in this directory one after another.
    """

    state: str = "starting"
    world_size: int = 0
    generation: int = 0
    launches: int = 0
    started: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    checkpoints: int = 0
    standby_ready: int = 0
    standby_starting: int = 0
    failures: tuple[FailureRecord, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()


@dataclass
class _Open:
    """A recovery that has not finished yet."""

    generation: int
    at_s: float
    failures: list[FailureRecord] = field(default_factory=list)
    victims: list[int] = field(default_factory=list)
    cause: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    fallback: str = ""


def read_history(events: Iterable[ev.Event]) -> JobHistory:
    """What happened, from all events in order."""
    return _Reader().read(events)


class _Reader:
    def __init__(self) -> None:
        self.failures: list[FailureRecord] = []
        self.recoveries: list[RecoveryRecord] = []
        self.unclaimed: list[FailureRecord] = []
        self.open: _Open | None = None
        self.state = "starting"
        self.launches = 0
        self.world_size = 0
        self.generation = 0
        self.first = 0.0
        self.last = 0.0
        self.reason = ""
        self.checkpoints = 0
        self.standbys = (0, 0)

    def read(self, events: Iterable[ev.Event]) -> JobHistory:
        events = list(events)
        # nothing is logged before the first step of a job, but its start says how long ago the launch was
        launched = [e.time - (e.seconds if isinstance(e, ev.JobStarted) else 0.0) for e in events]
        self.first = min(launched, default=0.0)
        for event in events:
            self.last = event.time
            self.generation = event.generation
            self._take(event)
        self._close_unfinished()
        return JobHistory(
            state=self.state,
            world_size=self.world_size,
            generation=self.generation,
            launches=self.launches,
            started=self.first,
            seconds=self.last - self.first,
            reason=self.reason,
            checkpoints=self.checkpoints,
            standby_ready=self.standbys[0],
            standby_starting=self.standbys[1],
            failures=tuple(self.failures),
            recoveries=tuple(self.recoveries),
        )

    def _take(self, event: ev.Event) -> None:
        at_s = event.time - self.first
        if isinstance(event, ev.JobStarted):
            self.state, self.world_size, self.reason = "running", event.world_size, ""
            self.launches += 1
        elif isinstance(event, ev.FailureDetected):
            failure = FailureRecord(
                event.rank, event.kind, event.evidence, event.detect_s, event.step, at_s - event.detect_s
            )
            self.failures.append(failure)
            (self.open.failures if self.open is not None else self.unclaimed).append(failure)
        elif isinstance(event, ev.RecoveryStarted):
            self.state = "recovering"
            if self.open is None:
                began = min((f.at_s for f in self.unclaimed), default=at_s)
                self.open = _Open(event.generation, began, self.unclaimed)
                self.unclaimed = []
            self.open.generation = event.generation
            self.open.victims = list(event.victims)
            self.open.cause = self.open.cause or event.cause
        elif isinstance(event, ev.RecoveryPhase) and self.open is not None:
            self.open.phases[event.name] = self.open.phases.get(event.name, 0.0) + event.seconds
        elif isinstance(event, ev.FallbackStarted) and self.open is not None:
            self.open.fallback = f"checkpoint of step {event.version}: {event.reason}"
        elif isinstance(event, ev.RecoveryFinished):
            self._finish(event, at_s)
        elif isinstance(event, ev.CheckpointSaved):
            self.checkpoints += 1
        elif isinstance(event, ev.StandbyReady):
            self.standbys = (event.ready, event.starting)
        elif isinstance(event, ev.JobFinished):
            self.state = "finished"
        elif isinstance(event, ev.JobFailed):
            self.state, self.reason = "failed", event.reason
            self._close_unfinished()

    def _finish(self, event: ev.RecoveryFinished, at_s: float) -> None:
        known = self.open or _Open(event.generation, at_s - event.total_s)
        self.open, self.state = None, "running"
        self.recoveries.append(
            RecoveryRecord(
                generation=event.generation,
                failures=tuple(known.failures),
                victims=tuple(event.victims),
                cause=event.cause or known.cause,
                resume_step=event.resume_step,
                bytes=event.bytes,
                sources=dict(event.sources),
                phases=_ordered(event.phases or known.phases),
                total_s=event.total_s,
                reason=event.reason,
                fallback=known.fallback,
                at_s=at_s - event.total_s,
                finished=True,
            )
        )

    def _close_unfinished(self) -> None:
        known, self.open = self.open, None
        if known is not None:
            phases = _ordered(known.phases)
            self.recoveries.append(
                RecoveryRecord(
                    generation=known.generation,
                    failures=tuple(known.failures),
                    victims=tuple(known.victims),
                    cause=known.cause,
                    resume_step=-1,
                    bytes=0,
                    sources={},
                    phases=phases,
                    total_s=sum(phases.values()),
                    reason="",
                    fallback=known.fallback,
                    at_s=known.at_s,
                    finished=False,
                )
            )


def _ordered(phases: dict[str, float]) -> dict[str, float]:
    rank = {name: i for i, name in enumerate(PHASES)}
    return dict(sorted(phases.items(), key=lambda item: rank.get(item[0], len(PHASES))))

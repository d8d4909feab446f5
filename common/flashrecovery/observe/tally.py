"""Counts, durations and the latest recoveries, kept up from the events as they are written.

Costs a few dictionary updates a failure and nothing a step. Begins at zero with the process, as Prometheus expects of
counters; what an earlier launch left in the same run directory is not counted.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque

from flashrecovery import events as ev
from flashrecovery.observe.facts import Counts, Durations, FailureFacts, PastRecovery

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
"""Detection takes about a millisecond, a cold replacement of a large model minutes."""
LATEST = 200
"""Recoveries that are shown one by one; all are counted."""


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def frozen(self) -> Durations:
        return Durations(tuple(self.counts), self.sum_s)


class Tally:
    """Takes every event, gives :class:`Counts`."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._recoveries: Counter[str] = Counter()
        self._phases: dict[str, _Histogram] = {}
        self._recovery = _Histogram()
        self._bytes = 0
        self._fallbacks = 0
        self._checkpoints = 0
        self._injected = 0
        self._saved_at: float | None = None
        self._latest: deque[PastRecovery] = deque(maxlen=LATEST)
        self._clear()

    def _clear(self) -> None:
        """No recovery is open."""
        self._open: ev.RecoveryStarted | None = None
        self._open_failures: list[FailureFacts] = []
        self._open_phases: dict[str, float] = {}
        self._open_fallback = False

    def take(self, event: ev.Event) -> None:
        """Count one event."""
        if isinstance(event, ev.FailureDetected):
            self._failures[event.kind] += 1
            self._open_failures.append(FailureFacts(event.rank, event.kind, event.evidence, event.step))
        elif isinstance(event, ev.RecoveryStarted):
            self._open = event
        elif isinstance(event, ev.RecoveryPhase):
            self._open_phases[event.name] = self._open_phases.get(event.name, 0.0) + event.seconds
        elif isinstance(event, ev.RecoveryFinished):
            self._finished(event)
        elif isinstance(event, ev.FallbackStarted):
            self._fallbacks += 1
            self._open_fallback = True
        elif isinstance(event, ev.CheckpointSaved):
            self._checkpoints += 1
            self._saved_at = event.time
        elif isinstance(event, ev.FaultInjected):
            self._injected += 1
        elif isinstance(event, ev.JobFailed):
            self._gave_up(event)
        elif isinstance(event, ev.JobStarted):
            self._clear()  # failures before the first step have been answered by a restart

    def counts(self) -> Counts:
        """A copy that stays as it is."""
        return Counts(
            failures=dict(self._failures),
            recoveries=dict(self._recoveries),
            phases={name: h.frozen() for name, h in self._phases.items()},
            recovery=self._recovery.frozen(),
            bytes=self._bytes,
            fallbacks=self._fallbacks,
            checkpoints=self._checkpoints,
            faults_injected=self._injected,
            checkpoint_saved_at=self._saved_at,
            latest=tuple(self._latest),
        )

    def _finished(self, event: ev.RecoveryFinished) -> None:
        self._recoveries[event.cause] += 1
        self._recovery.add(event.total_s)
        self._bytes += event.bytes
        for name, seconds in event.phases.items():
            self._phases.setdefault(name, _Histogram()).add(seconds)
        self._latest.append(
            PastRecovery(
                finished_at=event.time,
                finished=True,
                generation=event.generation,
                victims=tuple(event.victims),
                cause=event.cause,
                resume_step=event.resume_step,
                bytes=event.bytes,
                phases=dict(event.phases),
                total_s=event.total_s,
                reason=event.reason,
                fallback=self._open_fallback,
                failures=tuple(self._open_failures),
            )
        )
        self._clear()

    def _gave_up(self, event: ev.JobFailed) -> None:
        """The job has failed; a recovery that was under way is shown, too, with what is known of it."""
        if self._open is not None:
            self._latest.append(
                PastRecovery(
                    finished_at=event.time,
                    finished=False,
                    generation=self._open.generation,
                    victims=tuple(self._open.victims),
                    cause=self._open.cause,
                    resume_step=-1,
                    bytes=0,
                    phases=dict(self._open_phases),
                    total_s=sum(self._open_phases.values()),
                    reason=event.reason,
                    fallback=self._open_fallback,
                    failures=tuple(self._open_failures),
                )
            )
        self._clear()

"""Counts, durations and the latest recoveries, kept up from the events as they are written.

Costs a few dictionary updates a failure and nothing a step. Begins at zero with the process, as Prometheus expects of
counters; what an earlier launch left in the same run directory is not counted.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque

from flashrecovery import events as ev
from flashrecovery.observe.facts import Counts, Durations, FailureFacts, PastRecovery, StartFacts
from flashrecovery.observe.incident import Incident, Incidents

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
        self._incidents = Incidents()

    def take(self, event: ev.Event) -> None:
        """Count one event."""
        if isinstance(event, ev.FailureDetected):
            self._failures[event.kind] += 1
        elif isinstance(event, ev.FallbackStarted):
            self._fallbacks += 1
        elif isinstance(event, ev.CheckpointSaved):
            self._checkpoints += 1
            self._saved_at = event.time
        elif isinstance(event, ev.FaultInjected):
            self._injected += 1
        over = self._incidents.take(event)
        if over is not None:
            self._add(over)

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

    def _add(self, incident: Incident) -> None:
        """A recovery is over, or the job has failed in it; then it is shown, too, with what is known of it."""
        end = incident.finished
        if end is not None:
            self._recoveries[end.cause] += 1
            self._recovery.add(end.total_s)
            self._bytes += end.bytes
            for name, seconds in end.phases.items():
                self._phases.setdefault(name, _Histogram()).add(seconds)
        last = incident.events[-1]
        self._latest.append(
            PastRecovery(
                finished_at=last.time,
                finished=end is not None,
                generation=incident.generation,
                victims=incident.victims,
                cause=incident.cause,
                resume_step=incident.resume_step,
                bytes=incident.bytes,
                restore=incident.restore,
                phases=incident.phases,
                total_s=incident.total_s,
                reason=incident.end.reason if incident.end is not None else "",
                fallback=incident.fallback is not None,
                failures=tuple(
                    FailureFacts(f.rank, f.kind, f.evidence, f.step, f.iteration) for f in incident.failures
                ),
                start=tuple(StartFacts(s.where, s.text, s.seconds) for s in end.start) if end is not None else (),
                iteration=end.iteration if end is not None else -1,
            )
        )

"""Goodput: how much of a job's time led to steps that count, and where the rest went. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashrecovery import events as ev
from flashrecovery.cli.history import JobHistory


@dataclass(frozen=True)
class Goodput:
    """Of a job's whole time, from its first launch to its last event. All in seconds.

    Attributes:
        launch_s: from launches to first steps.
        down_s: from a launch's end to the next one in the same directory.
        recovery_s: from failures to the first new step of every rank.
        repeated_steps: steps that were done again because the job went back to a checkpoint. repeated_s: what they
            took; None if it is not known what a step takes.
    """

    wall_s: float
    launch_s: float
    down_s: float
    recovery_s: float
    repeated_steps: int
    repeated_s: float | None

    @property
    def trained_s(self) -> float:
        """The rest."""
        lost = self.launch_s + self.down_s + self.recovery_s + (self.repeated_s or 0.0)
        return max(self.wall_s - lost, 0.0)

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.trained_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput(history: JobHistory, events: Iterable[ev.Event]) -> Goodput:
    """``events``: all of them, in order; those that ``history`` is of."""
    launch_s = down_s = step_s = 0.0
    ended: float | None = None
    for event in events:
        if isinstance(event, ev.JobStarted):
            launch_s += event.seconds
            if ended is not None:
                down_s += max(event.time - event.seconds - ended, 0.0)
                ended = None
        elif isinstance(event, (ev.JobFinished, ev.JobFailed)):
            ended = event.time
        if isinstance(event, (ev.JobFinished, ev.CheckpointSaved)):
            step_s = event.step_s or step_s
    back = [r for r in history.recoveries if r.fallback and r.finished]
    # The step that was interrupted is done again in every recovery, and belongs to it.
    steps = sum(max(max((f.step for f in r.failures), default=0) - r.resume_step, 0) for r in back)
    repeated_s = steps * step_s if step_s or not steps else None
    recovery_s = sum(r.total_s for r in history.recoveries)
    return Goodput(history.seconds, launch_s, down_s, recovery_s, steps, repeated_s)

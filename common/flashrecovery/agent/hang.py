"""Which local process hangs, and on what evidence.

A process in state T (SIGSTOP) is a victim after ``stopped_s``. Otherwise a worker is suspected when its progress
counter has
stood still for ``max(hang_floor_s, hang_factor * usual step time)``. Since all ranks stand still when one hangs,
the suspects are asked (their control threads answer while the training thread is blocked): who does not answer, or who
is not waiting in a collective while others are, is the culprit. If every one waits in a collective, the rank that has
started the fewest operations is; but only where all ranks of the job are here, for else the culprit may be elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from flashrecovery.agent.process import WorkerProcess
from flashrecovery.agent.procfs import is_stopped
from flashrecovery.config import Timeouts
from flashrecovery.proto import flashrecovery_pb2 as pb

Finding = tuple[WorkerProcess, str, str, float]
"""Process, kind, evidence, seconds since its last progress."""


@dataclass(frozen=True)
class Answer:
    """Operations the worker has started, and the collective its training thread waits in ("" if none)."""

    ops: int
    waiting_in: str
    stack: str


class HangMonitor:
    """Called with every heartbeat; asks suspects once and judges after ``ping_s``. ``floor_s``: no progress for less
    than this is never a hang. ``whole_job``: all of its ranks are on this node."""

    def __init__(self, limits: Timeouts, *, whole_job: bool = True) -> None:
        self._limits = limits
        self._whole_job = whole_job
        self.floor_s = limits.hang_floor_s
        self._stopped_since: dict[int, float] = {}
        self._asked_at: float | None = None
        self._answers: dict[int, Answer] = {}

    def threshold(self, step_s: float) -> float:
        """Seconds without progress that make a suspect."""
        return max(self.floor_s, self._limits.hang_factor * step_s)

    def check(self, processes: list[WorkerProcess], now: float) -> Iterator[Finding]:
        """The processes that have to be replaced."""
        suspects = []
        for process in processes:
            health = process.page.health()
            age = now - health.progress_at
            if not health.progress_at or not process.stepping or age < min(1.0, self._limits.stopped_s / 2):
                self._stopped_since.pop(process.pid, None)
                continue
            if is_stopped(process.pid):
                since = self._stopped_since.setdefault(process.pid, now)
                if now - since >= self._limits.stopped_s:
                    yield process, "stopped", f"process state T (SIGSTOP) for {now - since:.1f} s", age
                    process.stepping = False
            elif age >= self.threshold(health.step_s):
                suspects.append((process, age))
        if not suspects:
            self._asked_at, self._answers = None, {}
        elif self._asked_at is None:
            self._asked_at, self._answers = now, {}
            for process, _ in suspects:
                process.send(pb.ToWorker(command=pb.Command(rank=process.rank or 0, ping=pb.Ping())))
        elif now - self._asked_at >= self._limits.ping_s:
            ages = {p.pid: age for p, age in suspects}
            for process, evidence in judge([p for p, _ in suspects], self._answers, self._whole_job):
                process.stepping = False
                yield process, "hang", evidence, ages[process.pid]
            self._asked_at = None

    def answered(self, process: WorkerProcess, reply: pb.Reply) -> bool:
        """Take an answer to a ping; False if the reply is something else."""
        if reply.serial != 0:
            return False
        self._answers[process.pid] = Answer(**json.loads(reply.detail))
        return True


def judge(
    suspects: list[WorkerProcess], answers: dict[int, Answer], whole_job: bool = True
) -> list[tuple[WorkerProcess, str]]:
    """The culprits among processes that all stand still, with the evidence."""
    silent = [p for p in suspects if p.pid not in answers]
    if silent:
        return [(p, "no progress, and its control thread does not answer") for p in silent]
    outside = [p for p in suspects if not answers[p.pid].waiting_in]
    if outside:
        return [(p, f"no progress, not in a collective:\n{answers[p.pid].stack}") for p in outside]
    fewest = min(answers[p.pid].ops for p in suspects)
    behind = [p for p in suspects if answers[p.pid].ops == fewest]
    if len(behind) == len(suspects) or not whole_job:
        return []  # everybody waits in the same place, or for somebody elsewhere: nothing local tells the culprit
    return [(p, f"no progress, behind the others in {answers[p.pid].waiting_in}") for p in behind]

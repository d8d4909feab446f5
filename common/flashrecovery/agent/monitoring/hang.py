"""What an agent knows about workers that hang. The controller, which sees all ranks, decides which one is the culprit
(:mod:`flashrecovery.plan.hang`).

A process in state T (SIGSTOP) is the exception: it is a victim after ``stopped_s``, whatever the others do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import is_stopped
from flashrecovery.config import Timeouts
from flashrecovery.proto import flashrecovery_pb2 as pb

Stopped = tuple[WorkerProcess, str, float]
"""Process, evidence, seconds since its last progress."""


class StopMonitor:
    """Called with every heartbeat: which processes have been stopped for too long?"""

    def __init__(self, limits: Timeouts) -> None:
        self._limits = limits
        self._stopped_since: dict[int, float] = {}

    def check(self, processes: Sequence[WorkerProcess], now: float) -> Iterator[Stopped]:
        """The processes that have to be replaced."""
        for process in processes:
            health = process.page.health()
            age = now - health.progress_at
            still = health.progress_at and process.must_run and age >= min(1.0, self._limits.stopped_s / 2)
            if not still or not is_stopped(process.pid):
                self._stopped_since.pop(process.pid, None)
                continue
            since = self._stopped_since.setdefault(process.pid, now)
            if now - since >= self._limits.stopped_s:
                yield process, f"process state T (SIGSTOP) for {now - since:.1f} s", age


class Looks:
    """Asks the workers where they are. Their control threads answer while the training threads are blocked."""

    def __init__(self, workers: Callable[[], Sequence[WorkerProcess]]) -> None:
        """``workers``: the living ones at the time of the call, whose pages may be read."""
        self._workers = workers
        self._answers: dict[int, pb.HangReport] = {}
        self._answered = asyncio.Event()

    async def look(self, look: pb.Look) -> pb.HangReports:
        """What the workers have answered by ``look.answer_s``, with what their pages say."""
        self._answers.clear()
        processes = self._workers()
        deadline = time.monotonic() + look.answer_s
        for process in processes:
            process.send(pb.ToWorker(command=pb.Command(rank=process.place, ping=pb.Ping())))
        while any(not p.dead and p.pid not in self._answers for p in processes):
            self._answered.clear()
            try:
                await asyncio.wait_for(self._answered.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                break
        return pb.HangReports(look=look.number, ranks=[self._report_of(p) for p in self._workers() if p in processes])

    def answered(self, process: WorkerProcess, message: pb.HangReport) -> None:
        """A worker's answer."""
        self._answers[process.pid] = message
        self._answered.set()

    def _report_of(self, process: WorkerProcess) -> pb.HangReport:
        message = self._answers.get(process.pid, pb.HangReport())
        health = process.page.health()
        message.rank, message.pid = process.place, process.pid
        message.stopped = is_stopped(process.pid)
        message.progress, message.step_s, message.work = health.progress, health.step_s, health.work
        message.age_s = time.monotonic() - health.progress_at if health.progress_at and process.stepping else 0.0
        return message

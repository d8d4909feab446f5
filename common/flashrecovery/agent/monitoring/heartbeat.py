"""The agent's heartbeat: every worker's tag and health in one message, and with it the look for hangs and standbys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Health

_CONFIRM_POLL_S = 0.002
"""Pace of the look at the pages while the first new step after a recovery is awaited."""


def counted_pairs(iterations: Mapping[int, int]) -> list[pb.Counted]:
    """The result of :meth:`.Page.iterations`, in the form that the controller receives."""
    return [pb.Counted(step=step, iteration=iteration) for step, iteration in iterations.items()]


class Watched(Protocol):
    """What the loop looks at. A protocol, as the agent lies above, and makes the loop."""

    @property
    def generation(self) -> int:
        """The newest one that it has heard of."""

    def look(self, alive: list[WorkerProcess], now: float) -> Awaitable[None]:
        """Called with every heartbeat."""


class HeartbeatLoop:
    """Runs until it is cancelled. ``send`` gets the heartbeats, ``period_s`` apart at the most."""

    def __init__(
        self,
        watched: Watched,
        processes: Mapping[int, WorkerProcess],
        send: Callable[[pb.AgentMessage], None],
        period_s: float,
    ) -> None:
        self._watched = watched
        self._processes = processes
        self._send = send
        self._period_s = period_s
        self._resumed_at: int | None = None  # version after which the first new step is awaited
        self._wake = asyncio.Event()

    def resumed(self, version: int | None) -> None:
        """Look closely until every worker has committed a version after this one; None: no longer."""
        self._resumed_at = version
        self._wake.set()

    async def run(self) -> None:
        """A heartbeat each period, and at once when the first new step after a recovery commits."""
        committed: list[int] = []
        last = 0.0
        while True:
            now = time.monotonic()
            alive = [p for p in self._processes.values() if not p.dead]
            fresh = [self._committed(p.page.health()) for p in alive]
            if now - last >= self._period_s or (self._resumed_at is not None and fresh != committed):
                last, committed = now, fresh
                if self._resumed_at is not None and all(version > self._resumed_at for version in fresh):
                    self._resumed_at = None
                self._beat(alive, now)
                await self._watched.look(alive, now)
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                pace_s = self._period_s if self._resumed_at is None else _CONFIRM_POLL_S
                await asyncio.wait_for(self._wake.wait(), pace_s)

    def _beat(self, alive: list[WorkerProcess], now: float) -> None:
        ranks, tokens, counted = [], 0, dict[int, int]()
        for process in alive:
            health = process.page.health()
            tokens = max(tokens, process.page.tokens_per_step)
            counted |= process.page.iterations()
            ranks.append(
                pb.RankHealth(
                    rank=process.place,
                    tag=health.tag,
                    progress=health.progress,
                    progress_age_s=now - health.progress_at if health.progress_at else 0.0,
                    committed=self._committed(health),
                    pid=process.pid,
                    step_s=health.step_s,
                    own_s=health.own_s,
                    own_least_s=health.own_least_s,
                    overhead_s=health.overhead_s,
                    kept=health.kept + 1,
                    kept_age_s=now - health.kept_at if health.kept >= 0 else 0.0,
                    entered=health.entered + 1 if health.generation == self._watched.generation else 0,
                    work=health.work,
                )
            )
        pairs = counted_pairs(counted)
        beat = pb.Heartbeat(generation=self._watched.generation, ranks=ranks, tokens_per_step=tokens, counted=pairs)
        self._send(pb.AgentMessage(heartbeat=beat))

    def _committed(self, health: Health) -> int:
        """The worker's newest version in this generation, -1 if it has not resumed yet."""
        return health.committed if health.generation == self._watched.generation else -1

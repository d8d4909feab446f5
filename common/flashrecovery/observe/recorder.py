"""Writes a job's course down while it trains: looks at what the heartbeats have told the controller, about once a
second, and keeps ``timeline.json`` in the run directory.

No message is sent for it. A look takes a few microseconds a rank on the controller's event loop; where there are so
many ranks that it takes long, it looks less often, so that it never needs more than :data:`_SHARE` of a core. What a
launcher that is killed has not written yet are the last seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from flashrecovery import events as ev
from flashrecovery.controller.machine import Machine
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import NoticeKind
from flashrecovery.observe.course import Course, Record, read_timeline, slowest_of
from flashrecovery.observe.timeline import ONE_BY_ONE, Sample, Timeline, TimelineFile, band_of
from flashrecovery.observe.waits import Told, waits
from flashrecovery.plan.transitions import State

_LOOK_S = 1.0
_SHARE = 0.005
_WRITE_S = 10.0

log = logging.getLogger("flashrecovery")


class Recorder:
    """Of one controller. Subscribe :meth:`take` to its log before the first event."""

    def __init__(self, machine: Machine, files: ev.RunFiles) -> None:
        self._machine = machine
        self._path = files.timeline_path
        self._record = Record(_earlier_timeline(files))
        for event in _earlier_events(files):
            self._record.take(event)
        self._looked_at: float | None = None
        self._told: dict[int, Told] = {}
        self._began = time.monotonic()
        self._complained = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """The last look is in the file. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.look()
        await asyncio.to_thread(self._write, self._record.timeline.file())

    async def _run(self) -> None:
        written = time.monotonic()
        while True:
            began = time.monotonic()
            self.look()
            took = time.monotonic() - began
            if began - written >= _WRITE_S:
                written = began
                await asyncio.to_thread(self._write, self._record.timeline.file())
            await asyncio.sleep(max(_LOOK_S, took / _SHARE))

    def take(self, event: ev.Event) -> None:
        """An event was written."""
        self._record.take(event)
        if isinstance(event, ev.ControllerStarted):
            self._record.timeline.serve(event.time, self._record.ledger.clock.at(event.monotonic))
        elif isinstance(event, ev.JobStarted):
            self._record.timeline.went_to(event.step)
            self._begin()
        elif isinstance(event, ev.RecoveryStarted):
            self._begin()
        elif isinstance(event, ev.RecoveryFinished):
            self._record.timeline.went_to(event.resume_step)
            self._begin()
        elif isinstance(event, ev.Notice) and event.kind == NoticeKind.WAITING:
            self._told[event.rank] = Told(event.text, event.seconds, time.monotonic())

    def _begin(self) -> None:
        """What was waited for is over."""
        self._told, self._began = {}, time.monotonic()

    def look(self) -> None:
        """Take a sample, unless the job is over: then nothing changes any more."""
        job, now = self._machine.job, time.monotonic()
        if self._record.ledger.doing == "down":
            return
        trains = job.state is State.RUNNING
        own = {r.rank: r.own_s for r in job.ranks.values()}
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._record.timeline.add(
            Sample(
                at=self._record.ledger.clock.at(now),
                passed=passed,
                version=job.committed if trains else -1,
                tokens=job.tokens_per_step,
                step=band_of({r.rank: r.step_s for r in job.ranks.values()}) if trains else None,
                own=band_of(own) if trains else None,
                ranks=tuple(own.values()) if trains and len(own) <= ONE_BY_ONE and all(own.values()) else (),
            )
        )

    def course(self) -> Course:
        """As of now."""
        job = self._machine.job
        course = self._record.course(self._record.ledger.clock.at(time.monotonic()), job.state.value)
        own = {r.rank: r.own_s for r in job.ranks.values()}
        steps = {r.rank: r.step_s for r in job.ranks.values()}
        waiting = waits(job, self._told, self._began, time.monotonic())
        return course.model_copy(update={"slowest": slowest_of(own, steps), "waiting": waiting})

    def _write(self, file: TimelineFile) -> None:
        try:
            _replace(self._path, file.model_dump_json())
        except OSError as e:
            if not self._complained:
                self._complained = True
                log.warning("%s cannot be written, so the report will have no picture: %s", self._path, e.strerror)


def _earlier_timeline(files: ev.RunFiles) -> Timeline:
    try:
        return read_timeline(files.timeline_path)
    except ConfigError as e:
        log.warning("%s; a new one is begun", e)
        return Timeline()


def _earlier_events(files: ev.RunFiles) -> list[ev.Event]:
    try:
        return ev.read_events(files.events_path)
    except ev.EventLogError as e:
        log.warning("%s; what the job did before is not counted", e)
        return []


def _replace(path: Path, text: str) -> None:
    """A reader sees the old content or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)

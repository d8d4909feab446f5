"""Writes a job's course down while it trains: looks at what the heartbeats have told the controller, about once a
second, and keeps ``timeline.json`` in the run directory.

No message is sent for it. A look takes a few microseconds a rank on the controller's event loop; where there are so
many ranks that it takes long, it looks less often, so that it never needs more than :data:`_SHARE` of a core. What a
launcher that is killed has not written yet are the last seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from flashrecovery import events as ev
from flashrecovery.controller.machine import Machine
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import NoticeKind
from flashrecovery.observe.course import Coming, Course, Record, read_timeline, slowest_of
from flashrecovery.observe.timeline import ONE_BY_ONE, Sample, TimelineFile, band_of
from flashrecovery.observe.waits import SaidLine, waits
from flashrecovery.plan.transitions import State
from flashrecovery.util.atomic_file import replace_file

_LOOK_S = 1.0
_SHARE = 0.005
_WRITE_S = 10.0
_SHOWN_S = 0.25

log = logging.getLogger("flashrecovery")


class Recorder:
    """The recorder of one controller. Subscribe :meth:`take` to its log before the first event.

    What earlier controllers have left in the run directory is read in a thread, so that a new controller of a running
    job is not held up by a long log; what happens meanwhile is taken in afterwards.
    """

    def __init__(self, machine: Machine, files: ev.RunFiles) -> None:
        self._machine = machine
        self._files = files
        self._log_bytes = files.events_path.stat().st_size
        self._record: Record | None = None
        self._early: list[ev.Event] = []
        self._looked_at: float | None = None
        self._said: dict[int, SaidLine] = {}
        self._began = time.monotonic()
        self._shown: tuple[float, Course] = (float("-inf"), Course())
        self._complained = False
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Record] | None = None
        self._writing: asyncio.Task[None] | None = None

    def course_json(self) -> str:
        """See :meth:`course`."""
        return self.course().model_dump_json()

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_say_if_failed)

    async def stop(self) -> None:
        """The last look is in the file. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.wait({task})
        if self._record is None and self._reading is not None:  # the job has ended before it was read
            self._begin_with(await self._reading)
        if self._writing is not None:
            await asyncio.wait({self._writing})  # a thread cannot be cancelled, and would write over what comes now
        self.look()
        if self._record is not None:
            await asyncio.to_thread(self._write, self._record.timeline.file())

    async def _run(self) -> None:
        self._reading = asyncio.create_task(asyncio.to_thread(_earlier, self._files, self._log_bytes))
        record = await asyncio.shield(self._reading)
        self._begin_with(record)
        written = time.monotonic()
        while True:
            began = time.monotonic()
            self.look()
            took = time.monotonic() - began
            if began - written >= _WRITE_S:
                written = began
                self._writing = asyncio.create_task(asyncio.to_thread(self._write, record.timeline.file()))
                await asyncio.shield(self._writing)
            await asyncio.sleep(max(_LOOK_S, took / _SHARE))

    def _begin_with(self, record: Record) -> None:
        """What was before is known now."""
        self._record, early = record, self._early
        self._early = []
        for event in early:
            self._take(record, event)

    def take(self, event: ev.Event) -> None:
        """An event was written."""
        if self._record is None:
            self._early.append(event)
        else:
            self._take(self._record, event)

    def _take(self, record: Record, event: ev.Event) -> None:
        record.take(event)
        if isinstance(event, ev.ControllerStarted):
            record.timeline.serve(event.time, record.ledger.clock.at(event.monotonic))
            self._begin(event)
        elif isinstance(event, ev.JobStarted):
            record.timeline.went_to(event.step)
            self._begin(event)
        elif isinstance(event, ev.RecoveryStarted):
            self._begin(event)
        elif isinstance(event, ev.RecoveryFinished):
            record.timeline.went_to(event.resume_step, event.iteration)
            self._begin(event)
        elif isinstance(event, ev.Notice) and event.kind == NoticeKind.WAITING:
            self._said[event.rank] = SaidLine(event.text, event.seconds, event.monotonic)

    def _begin(self, event: ev.Event) -> None:
        """What was waited for is over."""
        self._said, self._began = {}, event.monotonic

    def look(self) -> None:
        """Take a sample, unless the job is over: then nothing changes any more."""
        job, now, record = self._machine.job, time.monotonic(), self._record
        if record is None or record.ledger.doing == "down":
            return
        trains = job.state is State.RUNNING
        own = {r.rank: r.health.own_s for r in job.ranks.values()}
        launched = max(job.config.world_size, job.in_order[-1].rank + 1)
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        version = job.committed if trains else -1
        iteration = job.counting.iteration(version)
        record.timeline.add(
            Sample(
                at=record.ledger.clock.at(now),
                passed=passed,
                version=-1 if job.counting.used and iteration < 0 else version,
                iteration=iteration,
                tokens=job.tokens_per_step,
                step=band_of({r.rank: r.health.step_s for r in job.ranks.values()}) if trains else None,
                own=band_of(own) if trains else None,
                ranks=_of_each(own, launched) if trains and launched <= ONE_BY_ONE and all(own.values()) else (),
            )
        )

    def course(self) -> Course:
        """As of now, or at most :data:`_SHOWN_S` ago."""
        job, now, record = self._machine.job, time.monotonic(), self._record
        if record is None or now - self._shown[0] < _SHOWN_S:
            return self._shown[1]
        own = {r.rank: r.health.own_s for r in job.ranks.values()}
        steps = {r.rank: r.health.step_s for r in job.ranks.values()}
        coming = [
            Coming(rank=rank, node=joining.record.home, here=joining.here, left_s=max(joining.due - now, 0.0))
            for rank, joining in job.membership.joining.items()
        ]
        live = {
            "slowest": slowest_of(own, steps),
            "waiting": waits(job, self._said, self._began, now),
            "coming": coming,
        }
        course = record.course(record.ledger.clock.at(now), job.state.value).model_copy(update=live)
        self._shown = (now, course)
        return course

    def _write(self, file: TimelineFile) -> None:
        path = self._files.timeline_path
        try:
            replace_file(path, file.model_dump_json())
        except OSError as e:
            if not self._complained:
                self._complained = True
                log.warning("%s cannot be written, so the report will have no picture: %s", path, e.strerror)


def _of_each(own: Mapping[int, float], launched: int) -> tuple[float, ...]:
    """By rank as the job was launched, and beyond; 0 for one that is not in it now."""
    return tuple(own.get(rank, 0.0) for rank in range(launched))


def _say_if_failed(task: asyncio.Task[None]) -> None:
    """The job is more important than its picture."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the job's course is not recorded any more", exc_info=error)


def _earlier(files: ev.RunFiles, size: int) -> Record:
    """What other controllers have left; ``size``: bytes of the log that are theirs."""
    try:
        record = Record(read_timeline(files.timeline_path))
    except ConfigError as e:
        log.warning("%s; a new one is begun", e)
        record = Record()
    try:
        for event in ev.read_events(files.events_path, size):
            record.take(event)
    except ev.EventLogError as e:
        log.warning("%s; what the job did before is not counted", e)
    return record

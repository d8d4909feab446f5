"""What a controller writes down of the job's course, also after another one, and where the disk does not take it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.rank_record import JoiningProcess, Place, RankRecord
from flashrecovery.events import EventLog, RunFiles
from flashrecovery.observe import recorder as recorder_module
from flashrecovery.observe.course import Course, Record, course_of
from flashrecovery.observe.recorder import Recorder
from flashrecovery.plan.transitions import State


def machine(version: int = -1, state: State = State.RUNNING) -> Machine:
    found = Machine(RunConfig(nproc_per_node=2))
    found.job.state = state
    for record in found.job.ranks.values():
        found.job.move(record.rank, Place.RUNNING if state is State.RUNNING else Place.STARTING)
        record.committed, record.health.step_s, record.health.own_s, record.health.heard_at = (
            version,
            0.5,
            0.25,
            time.monotonic(),
        )
    found.job.tokens_per_step = 100
    found.job.launched = True
    return found


async def record(run: Path, found: Machine, events: list[ev.Event]) -> Course:
    """One controller: it writes ``events``, looks once, and ends. What it shows."""
    with EventLog(run / "events.jsonl") as log:
        recorder = Recorder(found, RunFiles(run))
        log.subscribe(recorder.take)
        recorder.start()
        for event in events:
            log.write(event)
        while (shown := recorder.course()).seconds == 0:
            await asyncio.sleep(0.01)
        recorder.look()
        await asyncio.sleep(0.3)
        shown = recorder.course()
        await recorder.stop()
        await recorder.stop()
        return shown


def test_another_controller_goes_on_where_the_first_has_ended(tmp_path: Path) -> None:
    first = asyncio.run(record(tmp_path, machine(7), [ev.ControllerStarted(world_size=2), ev.JobStarted(world_size=2)]))
    assert first.whole.steps == [7] and first.tokens_per_step == 100 and first.version == 7
    second = asyncio.run(
        record(tmp_path, machine(19), [ev.ControllerStarted(world_size=2), ev.Notice(kind="taken_over")])
    )
    assert sum(second.whole.steps) == 19 and sum(second.whole.tokens) == 1900
    left = course_of(RunFiles(tmp_path))
    assert (left.version, left.state, left.goodput["down_s"]) == (19, "lost", 0.0)
    assert left.whole.steps == second.whole.steps and left.seconds >= second.seconds > first.seconds
    assert left.goodput["trained_s"] == pytest.approx(left.seconds - float(left.goodput["launch_s"] or 0.0))


def test_what_a_launch_waits_for(tmp_path: Path) -> None:
    found = machine(state=State.STARTING)
    began = [
        ev.ControllerStarted(world_size=2),
        ev.Notice(kind="waiting", rank=0, text="train.py:3 x = build()", seconds=10),
    ]
    shown = asyncio.run(record(tmp_path, found, began))
    assert shown.waiting == [] and shown.slowest != []  # not for long yet
    with EventLog(tmp_path / "events.jsonl"):
        recorder = Recorder(found, RunFiles(tmp_path))

        async def later() -> Course:
            recorder.start()
            while recorder.course().seconds == 0:
                await asyncio.sleep(0.01)
            now = time.monotonic()
            for event in began:
                recorder.take(event.model_copy(update={"monotonic": now - 30, "time": time.time() - 30}))
            await asyncio.sleep(0.3)
            course = recorder.course()
            await recorder.stop()
            return course

        (wait,) = asyncio.run(later()).waiting
    assert wait.what == "2 of 2 ranks to come to their first step" and wait.rank == 0 and wait.seconds > 29
    assert wait.where == "train.py:3 x = build() (for 40 s)"


def test_a_disk_that_takes_nothing_and_a_damaged_file_do_not_disturb_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flashrecovery")
    (tmp_path / "timeline.json").mkdir()
    asyncio.run(record(tmp_path, machine(7), [ev.ControllerStarted(), ev.JobStarted()]))
    assert "cannot be read" in caplog.text and caplog.text.count("the report will have no picture") == 1
    (tmp_path / "timeline.json").rmdir()
    (tmp_path / "timeline.json").write_text("{}")
    shown = asyncio.run(record(tmp_path, machine(7), [ev.ControllerStarted(), ev.JobStarted()]))
    assert "is not a timeline" in caplog.text and shown.version == 7
    assert course_of(RunFiles(tmp_path)).version == 7


def test_each_rank_keeps_its_line_when_another_leaves(tmp_path: Path) -> None:
    """And a rank that is on the way in is told."""
    found = machine(7)
    found.job.ranks.pop(0)
    found.job.ranks[1].health.own_s = 0.125
    record_1 = RankRecord(0)
    record_1.home = "n1"
    found.job.membership.joining[0] = JoiningProcess(record_1, 1, time.monotonic() + 20)
    shown = asyncio.run(record(tmp_path, found, [ev.ControllerStarted(world_size=2), ev.JobStarted(world_size=2)]))
    assert shown.whole.ranks == [[None], [0.125]]
    (coming,) = shown.coming
    assert (coming.rank, coming.node, coming.here) == (0, "n1", False) and 10 < coming.left_s < 20
    assert course_of(RunFiles(tmp_path)).whole.ranks == [[None], [0.125]]


def test_the_last_look_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a write of before is still under way in its thread."""
    began, may_end = threading.Event(), threading.Event()
    written: list[int] = []
    under_way = 0

    def slow(path: Path, text: str) -> None:
        nonlocal under_way
        assert not under_way, "two at once write into one file"
        under_way += 1
        if not written and not began.is_set():
            began.set()
            may_end.wait(10)
        written.append(max(json.loads(text)["whole"]["version"]))
        under_way -= 1

    monkeypatch.setattr(recorder_module, "replace_file", slow)
    monkeypatch.setattr(recorder_module, "_WRITE_S", 0.0)
    found = machine(7)

    async def course() -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            recorder = Recorder(found, RunFiles(tmp_path))
            log.subscribe(recorder.take)
            recorder.start()
            log.write(ev.ControllerStarted(world_size=2))
            log.write(ev.JobStarted(world_size=2))
            while not began.is_set():
                await asyncio.sleep(0.01)
            for one in found.job.ranks.values():
                one.committed = 9
            stopped = asyncio.create_task(recorder.stop())
            await asyncio.sleep(0.1)
            may_end.set()
            await stopped

    asyncio.run(course())
    assert written == [7, 9]


def test_a_job_that_ends_before_the_log_was_read_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = recorder_module._earlier
    may_end = threading.Event()

    def slow(files: RunFiles, size: int) -> Record:
        may_end.wait(10)
        return earlier(files, size)

    monkeypatch.setattr(recorder_module, "_earlier", slow)

    async def course() -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            recorder = Recorder(machine(3), RunFiles(tmp_path))
            log.subscribe(recorder.take)
            recorder.start()
            await asyncio.sleep(0)
            log.write(ev.ControllerStarted(world_size=2))
            log.write(ev.JobStarted(world_size=2))
            stopped = asyncio.create_task(recorder.stop())
            await asyncio.sleep(0.05)
            may_end.set()
            await stopped

    asyncio.run(course())
    assert json.loads((tmp_path / "timeline.json").read_text())["whole"]["version"][-1] == 3

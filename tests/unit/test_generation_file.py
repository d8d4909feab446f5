"""The number of the newest generation is on disk before it is used, and a later controller counts on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from flashrecovery import events as ev
from flashrecovery.access import Access
from flashrecovery.config import RunConfig
from flashrecovery.controller import generation_file
from flashrecovery.controller.generation_file import (
    FILE_NAME,
    GenerationFile,
    Numbers,
    newest_numbers,
    write_numbers,
)
from flashrecovery.controller.service import ControllerService
from flashrecovery.plan.transitions import State
from tests.unit.test_takeover import controller, found


def written(path: Path, home: Path, *numbers: Numbers) -> tuple[list[Numbers], list[str]]:
    """Ask for these, one after the other; returns which may be used, in order, and what was said."""
    used: list[Numbers] = []
    said: list[str] = []

    async def go() -> None:
        file = GenerationFile(path, home, said.append)
        for one in numbers:
            event = asyncio.Event()

            def then(one: Numbers = one, event: asyncio.Event = event) -> None:
                assert file.kept(one, then)
                used.append(one)
                event.set()

            assert not file.kept(one, then), "not before it is on disk"
            await asyncio.wait_for(event.wait(), 5)
            assert file.kept(one, lambda: None)
        file.close()

    asyncio.run(go())
    return used, said


def test_it_may_be_used_when_it_is_on_disk(tmp_path: Path) -> None:
    numbers = (Numbers(), Numbers(1), Numbers(2, 1), Numbers(3, 1))
    assert written(tmp_path, tmp_path, *numbers) == (list(numbers), [])
    assert newest_numbers(tmp_path) == Numbers(3, 1)


def test_the_newest_of_all_controllers_counts(tmp_path: Path) -> None:
    """An elected one has a directory of its own if the one before still holds the job's."""
    assert newest_numbers(tmp_path) == Numbers()
    for name, numbers in (("", Numbers(4)), ("term2", Numbers(9, 2)), ("term3", Numbers(7, 2))):
        (tmp_path / name).mkdir(exist_ok=True)
        write_numbers(tmp_path / name, tmp_path, numbers, launch=False)
    assert newest_numbers(tmp_path) == Numbers(9, 2)


def test_a_launch_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "term2").mkdir()
    for path in (tmp_path, tmp_path / "term2"):
        write_numbers(path, tmp_path, Numbers(9), launch=False)
    written(tmp_path, tmp_path, Numbers(0))
    assert newest_numbers(tmp_path) == Numbers(0) and not (tmp_path / "term2" / FILE_NAME).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"generation": "7", "restarts": 0}'])
def test_a_damaged_file_is_said_and_does_not_stop_the_job(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    said: list[str] = []
    file = GenerationFile(tmp_path, tmp_path, said.append)
    assert file.read() == Numbers() and len(said) == 1 and FILE_NAME in said[0]
    file.close()


def test_a_disk_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    with patch.object(generation_file, "replace_file", side_effect=OSError(28, "No space left on device")):
        used, said = written(tmp_path, tmp_path, Numbers(1), Numbers(2))
    assert used == [Numbers(1), Numbers(2)] and len(said) == 1 and "No space left on device" in said[0]


def test_a_slow_disk_holds_nothing_up_for_long(tmp_path: Path) -> None:
    """A newer number is asked for meanwhile; the late answer to the older one changes nothing."""
    go_on = threading.Event()
    replace_file = generation_file.replace_file

    def slowly(path: Path, text: str, mode: int | None = None) -> None:
        go_on.wait(5)
        replace_file(path, text, mode)

    with patch.object(generation_file, "replace_file", slowly), patch.object(generation_file, "_PATIENCE_S", 0.02):
        used, said = written(tmp_path, tmp_path, Numbers(1), Numbers(2))
        go_on.set()
    assert used == [Numbers(1), Numbers(2)] and len(said) == 1 and "takes too long" in said[0]


@contextmanager
def a_service(path: Path):  # type: ignore[no-untyped-def]
    run_dir = ev.RunDir(path)
    log = ev.EventLog(run_dir.events_path)
    try:
        yield ControllerService(
            RunConfig.model_validate({"nproc_per_node": 2, "nnodes": 2, "controller": "127.0.0.1:1"}),
            Access("the-token-of-this-test-job"),
            log,
            run_dir,
        )
    finally:
        log.close()
        run_dir.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not come")


def test_nothing_leaves_the_controller_before(tmp_path: Path) -> None:
    """The commands of a recovery wait for the disk."""
    go_on = threading.Event()
    write = generation_file.write_numbers

    def when_told(path: Path, home: Path, numbers: Numbers, *, launch: bool) -> None:
        go_on.wait(5)
        write(path, home, numbers, launch=launch)

    async def go() -> None:
        with a_service(tmp_path / "run") as service:
            await service.start("127.0.0.1", 0)
            sent: list[object] = []
            with patch.object(service._agents, "post_batches", lambda batches, _: sent.append(batches)):
                job = service.machine.job
                service.machine.on_register(found("a", 0, 1), 0.0)
                service.machine.on_register(found("b", 2, 3), 0.1)
                service.machine.on_node_lost("b", "silent", 1.0, 0.2)
                assert job.state is State.QUIESCING and job.generation == 4
                service.act()
                service.act()
                assert not sent and job.outbox.actions, "they wait"
                go_on.set()
                await until(lambda: bool(sent))
                assert newest_numbers(tmp_path / "run") == Numbers(4)
            await service.stop()

    with patch.object(generation_file, "write_numbers", when_told), patch.object(generation_file, "_PATIENCE_S", 5.0):
        asyncio.run(go())


def test_a_controller_that_is_started_later_counts_on(tmp_path: Path) -> None:
    """All who knew of the generations since are lost, and who is left has heard of an older one."""
    (tmp_path / "run").mkdir()
    write_numbers(tmp_path / "run", tmp_path / "run", Numbers(8), launch=False)

    async def go() -> None:
        with a_service(tmp_path / "run") as service:
            await service.start("127.0.0.1", 0)
            service.machine.on_register(found("a", 0, 1), 0.0)
            service.machine.on_tick(1000.0)
            assert service.machine.job.generation == 9 and service.machine.job.recovered_before
            await service.stop()

    asyncio.run(go())


def test_what_is_written_down_is_older_than_what_agents_know() -> None:
    machine = controller()
    machine.takeover.written_down = Numbers(2)
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    assert machine.job.generation == 3 and machine.job.state is State.RUNNING


def test_ranks_that_are_older_than_what_is_written_down_are_brought_together() -> None:
    """The controller before this one may have told others, who are lost, of the newer generation."""
    machine = controller()
    machine.takeover.written_down = Numbers(5)
    machine.on_register(found("a", 0, 1), 0.0)
    machine.on_register(found("b", 2, 3), 0.1)
    assert machine.job.generation == 6 and machine.job.state is State.QUIESCING

"""The number of the newest generation is on disk before it is used, and a later controller counts on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.batches import Batches
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.controller.state.outbox import Publish, Send
from flashrecovery.controller.state.rank_table import Parts
from flashrecovery.controller.state.restore_plan import RestoreRound
from flashrecovery.controller.storage import generation_file
from flashrecovery.controller.storage.generation_file import (
    FILE_NAME,
    GenerationFile,
    Numbers,
    newest_numbers,
    write_numbers,
)
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from tests.unit.test_takeover import controller, failure, found

LAUNCH = "this-launch"
TOKEN = "the-token-of-this-test-job"


def written(path: Path, home: Path, *numbers: Numbers) -> tuple[list[Numbers], list[str]]:
    """Ask for these, one after the other; returns which may be used, in order, and what was said."""
    used: list[Numbers] = []
    said: list[str] = []

    async def go() -> None:
        file = GenerationFile(path, home, said.append)
        for one in numbers:
            event = asyncio.Event()

            def then(one: Numbers = one, event: asyncio.Event = event) -> None:
                assert file.kept(LAUNCH, one, then)
                used.append(one)
                event.set()

            assert not file.kept(LAUNCH, one, then), "not before it is on disk"
            await asyncio.wait_for(event.wait(), 5)
            assert file.kept(LAUNCH, one, lambda: None)
        file.close()

    asyncio.run(go())
    return used, said


def numbers_in(home: Path) -> dict[str, Numbers]:
    def fail(text: str) -> None:
        raise AssertionError(text)

    return dict(newest_numbers(home, fail))


def test_it_may_be_used_when_it_is_on_disk(tmp_path: Path) -> None:
    numbers = (Numbers(), Numbers(1), Numbers(2, 1), Numbers(3, 1))
    with patch.object(generation_file, "_PATIENCE_S", float("inf")):  # the disk of a busy machine may be slow
        assert written(tmp_path, tmp_path, *numbers) == (list(numbers), [])
    assert numbers_in(tmp_path) == {LAUNCH: Numbers(3, 1)}


def test_the_newest_of_all_controllers_counts(tmp_path: Path) -> None:
    """An elected one has its own directory if the one before still holds the job's."""
    assert numbers_in(tmp_path) == {}
    for name, numbers in (("", Numbers(4)), ("term2", Numbers(9, 2)), ("term3", Numbers(7, 2))):
        (tmp_path / name).mkdir(exist_ok=True)
        write_numbers(tmp_path / name, LAUNCH, numbers)
    assert numbers_in(tmp_path) == {LAUNCH: Numbers(9, 2)}


def test_those_of_another_launch_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "term2").mkdir()
    for path in (tmp_path, tmp_path / "term2"):
        write_numbers(path, "another", Numbers(9))
    written(tmp_path, tmp_path, Numbers(0))
    assert numbers_in(tmp_path) == {LAUNCH: Numbers(0), "another": Numbers(9)}


def test_a_job_of_one_node_writes_nothing(tmp_path: Path) -> None:
    """What could count on from there is gone with the node."""
    file = GenerationFile(None, tmp_path, lambda _: None)
    assert file.kept(LAUNCH, Numbers(), lambda: None) and file.read() == {}
    file.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"generation": 7, "restarts": 0}',
        '{"launch": "a", "generation": "7", "restarts": 0}',
        '{"launch": "a", "generation": 7, "restarts": true}',
        '{"launch": "a", "generation": -7, "restarts": 0}',
        '{"launch": "a", "generation": 70000000000000, "restarts": 0}',
        '{"launch": "\xff", "generation": 7, "restarts": 0}',
    ],
)
def test_a_damaged_file_is_said_and_does_not_stop_the_job(text: str, tmp_path: Path) -> None:
    """Nor does it take from what another one says."""
    (tmp_path / FILE_NAME).write_bytes(text.encode("latin-1"))
    (tmp_path / "term2").mkdir()
    write_numbers(tmp_path / "term2", LAUNCH, Numbers(9))
    said: list[str] = []
    file = GenerationFile(tmp_path, tmp_path, said.append)
    assert file.read() == {LAUNCH: Numbers(9)} and len(said) == 1 and FILE_NAME in said[0]
    file.close()


def test_a_disk_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    with patch.object(generation_file, "replace_file", side_effect=OSError(28, "No space left on device")):
        used, said = written(tmp_path, tmp_path, Numbers(1), Numbers(2))
    assert used == [Numbers(1), Numbers(2)] and len(said) == 1 and "No space left on device" in said[0]


def test_a_directory_that_has_gone_is_said_once(tmp_path: Path) -> None:
    used, said = written(tmp_path / "gone", tmp_path, Numbers(1), Numbers(2))
    assert used == [Numbers(1), Numbers(2)] and len(said) == 1 and "No such file" in said[0]


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


def of_launch(launch: str, register: pb.Register) -> pb.Register:
    register.launch = launch
    return register


@contextmanager
def a_service(path: Path):  # type: ignore[no-untyped-def]
    run_dir = ev.RunDir(path)
    log = ev.EventLog(run_dir.events_path)
    try:
        yield ControllerService(
            RunConfig.model_validate({"nproc_per_node": 2, "nnodes": 2, "controller": "127.0.0.1:1"}),
            Access(TOKEN),
            log,
            run_dir,
        )
    finally:
        log.close()
        run_dir.close()


class Sent(list[str]):
    """What the agents were sent; it can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def append(self, body: str) -> None:
        super().append(body)
        self._news.set()

    async def until(self, body: str) -> None:
        while body not in self:
            self._news.clear()
            await self._news.wait()


@pytest.mark.parametrize("again", [False, True])
def test_nobody_acts_in_a_generation_before(again: bool, tmp_path: Path) -> None:
    """Ranks are stopped and replaced while the disk is written to, but meet in no group.

    The machine's clock is the test's: the service's own would find every deadline missed while the disk is slow.
    """
    go_on = threading.Event()
    write = generation_file.write_numbers

    def when_told(path: Path, launch: str, numbers: Numbers) -> None:
        go_on.wait()
        write(path, launch, numbers)

    async def go() -> None:
        with a_service(tmp_path / "run") as service:
            await service.start("127.0.0.1", 0)
            sent = Sent()

            def post(batches: Batches, nodes: int) -> None:
                for _, command in batches.take(nodes):
                    for one in command.batch.commands or [command]:
                        sent.append(one.WhichOneof("body"))

            with patch.object(service._agents, "post_batches", post):
                machine, job = service.machine, service.machine.job
                for node, *ranks in (("a", 0, 1), ("b", 2, 3)):
                    machine.on_register(found(str(node), *ranks), 0.0)
                machine.on_failure(failure(1), 0.2)
                service.act()
                assert job.state is State.QUIESCING and job.generation == 4
                assert {"hold", "replace"} <= set(sent), "they do not wait"
                job.command(0, pb.Command(regroup=pb.Regroup()))
                if again:
                    job.state = State.REGROUPING
                    job.round.restoring = RestoreRound.from_checkpoint(0, job.ranks)
                job.notice(NoticeKind.DEADLOCK_SUSPECTED, "after it")
                service.act()
                service.act()
                assert "regroup" not in sent and len(job.outbox.actions) == 2, "it waits, and what comes after it"
                sent.clear()
                machine.on_failure(failure(2), 0.3)
                assert job.generation == (5 if again else 4)
                service.act()
                assert ("hold" in sent) is again, "what is void meanwhile holds nothing up"
                go_on.set()
                job.command(0, pb.Command(resume=pb.Resume()))
                service.act()
                await sent.until("resume")
                assert ("regroup" in sent) is not again
                assert numbers_in(tmp_path / "run") == {job.launch: Numbers(job.generation)} and not job.outbox.actions
            await service.stop()

    with (
        patch.object(generation_file, "write_numbers", when_told),
        patch.object(generation_file, "_PATIENCE_S", float("inf")),
        patch.object(ControllerService, "_look_around"),
    ):
        try:
            asyncio.run(go())
        finally:
            go_on.set()


def test_a_controller_that_is_started_later_counts_on(tmp_path: Path) -> None:
    """All that knew of the generations since are lost, and what is left has heard of an older one."""
    (tmp_path / "run").mkdir()
    write_numbers(tmp_path / "run", LAUNCH, Numbers(8))

    async def go() -> None:
        with a_service(tmp_path / "run") as service:
            await service.start("127.0.0.1", 0)
            service.machine.on_register(of_launch(LAUNCH, found("a", 0, 1)), 0.0)
            service.machine.on_tick(1000.0)
            assert service.machine.job.generation == 9 and service.machine.job.recovered_before
            await service.stop()

    asyncio.run(go())


def test_a_controller_that_takes_over_a_launch_is_another_one(tmp_path: Path) -> None:
    """Its launch is that of the controller before it. Its agents have to tell the two apart: what was on its way to
    the first one is void, and none of it is to be acknowledged by the second."""

    async def go(run_dir: Path) -> set[str]:
        with a_service(run_dir) as service:
            port = await service.start("127.0.0.1", 0)
            incarnations = set()
            async with Access(TOKEN).dial(f"127.0.0.1:{port}", CONTROLLER, 60.0) as channel:
                who = rpc.ControllerStub(channel).Who
                incarnations.add((await who(pb.WhoRequest())).incarnation)
                service.machine.on_register(of_launch(LAUNCH, found("a", 0, 1)), 0.0)
                incarnations.add((await who(pb.WhoRequest())).incarnation)
            assert service.machine.job.launch == LAUNCH
            await service.stop()
        return incarnations

    first, second = (asyncio.run(go(tmp_path / name)) for name in ("first", "second"))
    assert len(first) == len(second) == 1, "it is the same one before and after it hears of the launch"
    assert first != second


def test_what_is_written_down_is_older_than_what_agents_know() -> None:
    machine = controller()
    machine.takeover.written_down = {LAUNCH: Numbers(2)}
    machine.on_register(of_launch(LAUNCH, found("a", 0, 1)), 0.0)
    machine.on_register(of_launch(LAUNCH, found("b", 2, 3)), 0.1)
    assert machine.job.generation == 3 and machine.job.state is State.RUNNING


def test_ranks_that_are_older_than_what_is_written_down_are_brought_together() -> None:
    """The controller before this one may have told others, which are lost, of the newer generation."""
    machine = controller()
    machine.takeover.written_down = {LAUNCH: Numbers(5)}
    machine.on_register(of_launch(LAUNCH, found("a", 0, 1)), 0.0)
    machine.on_register(of_launch(LAUNCH, found("b", 2, 3)), 0.1)
    assert machine.job.generation == 6 and machine.job.state is State.QUIESCING


@pytest.mark.parametrize(("launch", "state"), [(LAUNCH, State.FAILED), ("another", State.STARTING)])
def test_a_job_that_has_not_begun_is_not_taken_for_an_earlier_one(launch: str, state: State) -> None:
    """An elected controller's node may have what an earlier job has left there. Of this one no rank has taken a step:
    all begin again. (Had it recovered before, those that had its state would be lost.)"""
    machine = controller()
    machine.takeover.written_down = {launch: Numbers(9)}
    register = of_launch(LAUNCH, found("a", 0, 1, stepping=False))
    register.generation = 0
    for worker in register.workers:
        worker.resumed, worker.committed = False, -1
    machine.on_register(register, 0.0)
    machine.on_tick(11.0)
    assert machine.job.state is state, machine.job.failure_reason
    assert machine.job.generation == (1 if state is State.STARTING else 10)


def test_a_start_that_is_written_down_has_another_number() -> None:
    """Nodes that were cut off in it, and come back, keep set-up logs of that start."""
    machine = controller()
    machine.takeover.written_down = {LAUNCH: Numbers(1, 1)}
    register = of_launch(LAUNCH, found("a", 0, 1, stepping=False))
    register.generation = 0
    for worker in register.workers:
        worker.resumed, worker.committed = False, -1
    machine.on_register(register, 0.0)
    machine.on_tick(11.0)
    sent = [a.command for a in machine.job.take_actions() if isinstance(a, Send)]
    assert {c.replace.attempt for c in sent if c.HasField("replace")} == {2}


def test_the_launch_that_those_know_who_have_heard_last_counts() -> None:
    """And the controllers after this one hear of it."""
    machine = controller()
    old = of_launch("another", found("a", 0, 1))
    old.generation = 2
    machine.on_register(old, 0.0)
    machine.on_register(of_launch(LAUNCH, found("b", 2, 3)), 0.1)
    machine._placement.publish_rank_table()
    (table,) = [a.table for a in machine.job.take_actions() if isinstance(a, Publish)][-1:]
    assert machine.job.launch == table.launch == Parts(table).part_for("a").launch == LAUNCH

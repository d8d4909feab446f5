"""A process takes its time to come, and meanwhile no one wants it any more: its rank is filled again or leaves, its
node is fenced, or the job is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import NodeParts, ProcessManager
from flashrecovery.agent.processes.providers import ProcessOrder
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.config import RunConfig
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb


def process(name: str) -> Any:
    it = MagicMock(name=name)
    it.gone, it.hear_out, it.end = AsyncMock(return_value=True), AsyncMock(), AsyncMock(return_value=-9)
    it.connect = AsyncMock(return_value=MagicMock())
    it.ready, it.dead, it.failed, it.rank, it.attempt, it.joining = True, False, False, None, 0, False
    it.take_rank, it.expect_death = partial(WorkerProcess.take_rank, it), partial(WorkerProcess.expect_death, it)
    it.exited, it.local_rank, it.place, it.pid = False, 0, 0, 7
    it.page.local_state_versions.return_value, it.page.early_local_states.return_value = [5], []
    it.page.inheritance.return_value.__enter__.return_value.nbytes, it.page.closed = 0, False
    it.page.committed, it.page.read_setup_log.return_value = 5, b"set-up"
    return it


class Slow:
    """A provider whose processes come when the test says so."""

    def __init__(self) -> None:
        self.orders: list[ProcessOrder] = []
        self._coming: list[asyncio.Future[Any]] = []

    async def start(self, order: ProcessOrder) -> Any:
        self.orders.append(order)
        self._coming.append(asyncio.get_running_loop().create_future())
        return await self._coming[-1]

    def give(self, number: int, what: Any) -> Any:
        self._coming[number].set_result(what)
        return what


class Node:
    """A process manager whose rank 0 is filled by ``old``; ``slow`` is its first provider, ``last`` the other."""

    def __init__(self, folder: Path, manager: ProcessManager, tasks: Tasks) -> None:
        self.manager, self.tasks = manager, tasks
        self.slow, self.last = Slow(), MagicMock(start=AsyncMock(return_value=process("last")))
        manager._providers = [self.slow, self.last]
        manager._watch = MagicMock()
        self.old = manager.ranks[0] = process("old")

    @staticmethod
    def of(folder: Path) -> Node:
        def failed(error: BaseException) -> None:
            raise error

        config, tasks = RunConfig(nproc_per_node=1, standby=0, start_method="spawn"), Tasks(failed)
        setup_logs, snapshots = MagicMock(), MagicMock()
        snapshots.env.return_value = {}
        manager = ProcessManager(
            MagicMock(),
            config,
            [],
            NodeParts(RunDir(folder), dict, setup_logs, tasks, GpuFence(lambda: None), snapshots),
        )
        return Node(folder, manager, tasks)

    def fill(self, generation: int) -> asyncio.Task[Any]:
        replace = pb.Replace(detached=True)
        command = pb.Command(rank=0, generation=generation, replace=replace)
        return asyncio.create_task(self.manager.fill(command, hear_out=False))


async def soon() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def on_a_node(folder: Path, body: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def live() -> None:
        await body(Node.of(folder))
        await soon()

    asyncio.run(live())


def check_gone(it: Any) -> None:
    it.kill.assert_called()
    it.close.assert_called_once()
    it.send.assert_not_called()
    assert it.dead


def test_a_rank_that_is_filled_again_gets_one_process_and_what_the_dead_one_has_left(tmp_path: Path) -> None:
    """Whichever of the two comes first."""

    async def body(node: Node) -> None:
        first, second = node.fill(1), node.fill(2)
        await soon()
        assert len(node.slow.orders) == 2 and 0 not in node.manager.ranks
        node.old.kill.assert_called()
        late, new = process("late"), process("new")
        node.slow.give(1, new)
        filled = await second
        assert filled is not None and filled[0] is new is node.manager.ranks[0]
        new.page.adopt.assert_called_once_with(node.old.page)
        node.old.gone.assert_awaited()
        node.slow.give(0, late)
        assert await first is None
        await soon()
        check_gone(late)
        node.old.close.assert_called_once()
        assert node.manager.ranks == {0: new} and not node.manager.replaced()
        node.last.start.assert_not_awaited()

    on_a_node(tmp_path, body)


def test_the_late_process_comes_first(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        first, second = node.fill(1), node.fill(2)
        await soon()
        late, new = node.slow.give(0, process("late")), process("new")
        assert await first is None
        await soon()
        check_gone(late)
        late.page.adopt.assert_not_called()
        node.old.close.assert_not_called()
        node.slow.give(1, None)  # its zygote is lost
        node.last.start.return_value = new
        filled = await second
        assert filled is not None and filled[0] is new
        new.page.adopt.assert_called_once_with(node.old.page)

    on_a_node(tmp_path, body)


def test_a_rank_leaves_before_its_process_has_come(tmp_path: Path) -> None:
    """What the dead one has left is kept for when it comes back."""

    async def body(node: Node) -> None:
        filling = node.fill(1)
        await soon()
        assert await node.manager.let_go(0, 0.0) is None, "the dead one has not left the job by itself"
        node.manager._setup_logs.keep.assert_called_once_with(0, b"set-up", 0)  # type: ignore[attr-defined]
        node.manager._snapshots.forget.assert_called_once_with([0])  # type: ignore[attr-defined]
        late = node.slow.give(0, process("late"))
        assert await filling is None
        await soon()
        check_gone(late)
        node.old.close.assert_called_once()
        assert not node.manager.ranks and not node.manager.replaced()

    on_a_node(tmp_path, body)


@pytest.mark.parametrize("comes", [True, False])
def test_the_node_is_fenced_before_a_process_has_come(comes: bool, tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        filling = node.fill(1)
        await soon()
        node.manager.dismiss()
        late = node.slow.give(0, process("late") if comes else None)
        assert await filling is None
        await soon()
        if comes:
            check_gone(late)
        node.last.start.assert_not_awaited()
        node.old.close.assert_called_once()
        assert not node.manager.ranks and not node.manager.replaced()

    on_a_node(tmp_path, body)


@pytest.mark.parametrize("comes", [True, False])
def test_the_end_before_a_process_has_come(comes: bool, tmp_path: Path) -> None:
    """No new interpreter is started for a job that is over."""

    async def body(node: Node) -> None:
        filling, standby = node.fill(1), asyncio.create_task(node.manager._add_standby())
        await soon()
        await node.manager.end(0.0)
        node.old.close.assert_called_once()
        late = [node.slow.give(number, process("late") if comes else None) for number in range(2)]
        assert await filling is None and await standby is None
        await soon()
        for it in late if comes else ():
            check_gone(it)
        node.last.start.assert_not_awaited()

    on_a_node(tmp_path, body)


def test_a_joining_process_that_has_not_come_is_told_of(tmp_path: Path) -> None:
    """A controller that does not know what for has it leave."""

    async def body(node: Node) -> None:
        replace = pb.Replace(detached=True, joining=1)
        command = pb.Command(rank=3, generation=1, replace=replace)
        node.manager._setup_logs.own.return_value = b"set-up"  # type: ignore[attr-defined]
        filling = asyncio.create_task(node.manager.fill(command, hear_out=False))
        again = asyncio.create_task(node.manager.fill(command, hear_out=False))
        await soon()
        assert node.manager.joining() == [3]
        node.slow.give(0, None)
        assert await filling is None and node.manager.joining() == [3]
        node.slow.give(1, process("new"))
        assert await again is not None and node.manager.joining() == [0]  # the place of the stand-in
        await node.manager.let_go(3, 0.0)
        assert not node.manager.joining()

    on_a_node(tmp_path, body)


def test_a_joining_process_is_told_of_while_nothing_can_be_forked_yet(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        imported = asyncio.Event()
        node.manager._zygotes = MagicMock(ready=imported.wait)
        order = pb.Command(rank=3, generation=1, replace=pb.Replace(detached=True, joining=1))
        coming = asyncio.create_task(node.manager.fill(order, hear_out=False))
        await soon()
        assert node.manager.joining() == [3] and not node.slow.orders
        left = asyncio.create_task(node.manager.let_go(3, 0.0))
        imported.set()
        assert await coming is None and await left is None and node.manager.joining() == []

    on_a_node(tmp_path, body)


def test_a_process_that_is_kept_on_a_gpu_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Another rank's, which has left the job, and stays until all have what it alone has: no one has told it to end."""

    async def body(node: Node) -> None:
        kept = node.manager.ranks[3] = process("kept")
        kept.place = 3
        node.manager._on_gpu[0] = [kept]
        released = AsyncMock(side_effect=lambda it, timeout_s: it is not kept)
        node.manager._gpu_fence = MagicMock(released=released)
        filling = node.fill(1)
        await soon()
        node.slow.give(0, process("new"))
        filled = await filling
        assert filled is not None and released.await_count >= 2
        kept.kill.assert_not_called()

    on_a_node(tmp_path, body)


def test_a_rank_that_begins_again_has_no_use_for_the_dead_ones_page(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        order = pb.Command(rank=0, generation=1, replace=pb.Replace(detached=False))
        filling = asyncio.create_task(node.manager.fill(order, hear_out=False))
        await soon()
        assert not node.manager.replaced()
        node.slow.give(0, process("new"))
        assert await filling is not None

    on_a_node(tmp_path, body)


def test_nothing_waits_for_a_standby(tmp_path: Path) -> None:
    """Neither a heartbeat, with which it is started, nor a rank. It is not started twice, and not kept by a node that
    has been fenced."""

    async def body(node: Node) -> None:
        pool = node.manager.pool
        pool.size = 2
        node.manager.learn(pb.Modules())
        for _ in range(3):
            await node.manager.replenish()
            await soon()
        assert [order.standby for order in node.slow.orders] == [True, True] and pool.counts() == (0, 2)
        filling = node.fill(1)
        await soon()
        node.slow.give(2, process("new"))
        assert (await filling) is not None
        standby = node.slow.give(0, process("standby"))
        await soon()
        assert pool.processes() == [standby] and pool.counts() == (1, 1)
        standby.send.assert_called_once()  # it is to import
        node.manager.dismiss()
        late = node.slow.give(1, process("late"))
        await soon()
        check_gone(late)
        assert not pool.processes() and pool.counts() == (0, 0)

    on_a_node(tmp_path, body)


def test_a_controller_that_comes_meanwhile_hears_of_the_dead_ones_page(tmp_path: Path) -> None:
    """It has the rank's own state. A process that is only on its way has nothing."""

    async def body() -> None:
        config = RunConfig(nproc_per_node=1, standby=0, health="none", start_method="spawn")
        with closing(RunDir(tmp_path / "run")) as run_dir:
            agent = Agent(config, ["train.py"], run_dir, Identity.of(config, "127.0.0.1"))
            manager, slow = agent._processes, Slow()
            manager._providers, manager._watch = [slow], MagicMock()
            manager.ranks[0] = process("old")
            agent._state_of = lambda found: pb.WorkerState(pid=found.pid)  # type: ignore[method-assign]
            assert len(agent.register().workers) == 1, "it lives"
            command = pb.Command(rank=0, generation=1, replace=pb.Replace(detached=True))
            filling = asyncio.create_task(manager.fill(command, hear_out=False))
            await soon()
            message = agent.register()
            assert not message.workers and [(page.rank, [*page.local_states]) for page in message.pages] == [(0, [5])]
            new = slow.give(0, process("new"))
            await filling
            message = agent.register()
            assert manager.ranks == {0: new} and len(message.workers) == 1 and not message.pages
            await agent.shutdown(None)

    asyncio.run(body())

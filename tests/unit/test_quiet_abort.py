"""In which order the ranks of a node let go of each other's GPU memory, and when one of them is killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from flashrecovery.agent.processes import quiet_fence
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.quiet_fence import QuietFence
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.groups import accelerator, exchange
from flashrecovery.groups.state import STATE
from flashrecovery.plan.quiet_abort import AGREE_S, ANSWER_S, FENCE_S, Communicators, NodeRank, may_abort, may_kill
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Page
from flashrecovery.worker.control import quiet_abort
from flashrecovery.worker.control.quiet_abort import QuietAbort

NONE, OPEN, STILL, QUIET = Communicators


def test_a_rank_whose_kernels_wait_aborts_when_all_others_are_quiet() -> None:
    for states in product(Communicators, repeat=3):
        quiet = all(state in (NONE, QUIET) for state in states)
        others = [NodeRank(state, 0) for state in states]
        assert may_abort(others, 0.0) == quiet
        assert may_abort(others, AGREE_S)
    assert may_abort([NodeRank(OPEN, 0, stopped=True)], 0.0), "what is stopped launches nothing, and cannot answer"


def test_a_process_is_killed_when_all_others_have_aborted_and_it_itself() -> None:
    for victim, *states in product(Communicators, repeat=3):
        others = [NodeRank(state, 4) for state in states]
        alone = all(state is NONE for state in states)
        assert may_kill(NodeRank(victim, 4), others, 0.0) == (alone and victim is NONE)
        assert may_kill(NodeRank(victim, 4), others, ANSWER_S) == alone
        assert may_kill(NodeRank(victim, 4, stopped=True), others, 0.0) == alone
        assert may_kill(NodeRank(victim, 4), others, FENCE_S)


def test_communicators_of_a_later_generation_are_none_of_its() -> None:
    assert may_kill(NodeRank(NONE, 4), [NodeRank(OPEN, 5)], 0.0)
    assert not may_kill(NodeRank(NONE, 4), [NodeRank(OPEN, 3)], 0.0)
    assert may_kill(NodeRank(NONE), [NodeRank(OPEN, 0)], 0.0), "it has never had any"


class Agents:
    """The agent's side, and processes that do nothing by themselves."""

    def __init__(self, count: int) -> None:
        self.processes: list[WorkerProcess] = []
        self.theirs: list[socket.socket] = []
        for rank in range(count):
            ours, theirs = socket.socketpair()
            theirs.settimeout(5)
            popen = subprocess.Popen(["sleep", "60"], start_new_session=True)
            process = WorkerProcess(popen, Page.create("test"), ours)
            process.rank = rank
            self.processes.append(process)
            self.theirs.append(theirs)
        self.errors: list[BaseException] = []
        self.fence = QuietFence(lambda: self.processes, Tasks(self.errors.append))

    def at(self, *states: Communicators, generation: int = 0) -> None:
        for process, state in zip(self.processes, states, strict=False):
            process.page.set_communicators(state, generation)

    def told(self, rank: int) -> str | None:
        """What the process is told."""
        data = self.theirs[rank].recv(1 << 16)
        return pb.ToWorker.FromString(data[4:]).command.WhichOneof("body")

    async def runs(self, rank: int) -> bool:
        await asyncio.sleep(0.02)
        return self.processes[rank].returncode is None

    def close(self) -> None:
        for process, theirs in zip(self.processes, self.theirs, strict=True):
            process.kill()
            process.child.wait()  # type: ignore[attr-defined]
            process.close()
            theirs.close()
        assert not self.errors


def on_a_node(count: int, body: Callable[[Agents], Coroutine[Any, Any, None]]) -> None:
    async def live() -> None:
        node = Agents(count)
        try:
            await body(node)
        finally:
            node.close()

    asyncio.run(live())


def test_without_communicators_it_is_killed_at_once() -> None:
    async def body(node: Agents) -> None:
        assert node.fence.fence(node.processes[1], "a test")
        await node.fence.ended([node.processes[1]])
        assert await node.processes[1].end(5) == -signal.SIGKILL
        assert await node.runs(0)

    on_a_node(2, body)


def test_it_is_told_to_abort_and_killed_when_it_and_all_others_have() -> None:
    async def body(node: Agents) -> None:
        node.at(OPEN, OPEN, OPEN)
        victim = node.processes[1]
        assert not node.fence.fence(victim, "a test")
        await node.processes[1].connect(lambda _process, _message: None)
        assert node.told(1) == "quiet" and victim.page.lease_over(), "it begins no change of its state any more"
        ending = asyncio.create_task(node.fence.ended([victim]))
        for states in ((STILL, QUIET, OPEN), (QUIET, NONE, QUIET), (NONE, NONE, QUIET), (NONE, QUIET, NONE)):
            node.at(*states)
            assert await node.runs(1), states
        node.at(NONE, NONE, NONE)
        assert await victim.end(5) == -signal.SIGKILL
        await ending

    on_a_node(3, body)


def test_ranks_whose_kernels_wait_are_let_abort_when_all_are_quiet() -> None:
    async def body(node: Agents) -> None:
        node.at(QUIET, STILL)
        node.fence.watch()
        await asyncio.sleep(0.05)
        assert not node.processes[0].page.may_abort
        node.at(QUIET, QUIET)
        await asyncio.sleep(0.05)
        assert node.processes[0].page.may_abort and node.processes[1].page.may_abort
        node.at(NONE, NONE)
        await asyncio.sleep(0.05)

    on_a_node(2, body)


def test_a_stopped_process_is_not_asked_and_waits_for_the_others_only() -> None:
    async def body(node: Agents) -> None:
        node.at(QUIET, OPEN)
        victim = node.processes[1]
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(0.05)
        node.fence.fence(victim, "a test")
        ending = asyncio.create_task(node.fence.ended([victim]))
        await asyncio.sleep(0.05)
        assert node.processes[0].page.may_abort, "it is not waited for"
        assert await node.runs(1)
        node.at(NONE)
        assert await victim.end(5) == -signal.SIGKILL
        await ending

    on_a_node(2, body)


def test_one_that_never_answers_is_killed_all_the_same() -> None:
    async def body(node: Agents) -> None:
        node.at(OPEN, OPEN)
        began = time.monotonic()
        node.fence.fence(node.processes[1], "a test")
        await node.fence.ended([node.processes[1]])
        assert FENCE_S <= time.monotonic() - began < FENCE_S + 5

    on_a_node(2, body)


def test_one_that_is_dying_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large process takes seconds to end. Its replacement would wait for the others' aborts."""

    async def body(node: Agents) -> None:
        node.at(OPEN, OPEN)
        monkeypatch.setattr(quiet_fence, "is_exiting", lambda pid: pid == node.processes[1].pid)
        assert node.fence.fence(node.processes[1], "a test")
        assert await node.runs(0)

    on_a_node(2, body)


def test_two_that_wait_for_the_same_processes_both_come_to_an_end() -> None:
    """A whole node is dismissed, or the job ends while a rank is being filled."""

    async def body(node: Agents) -> None:
        node.at(OPEN, OPEN)
        for process in node.processes:
            node.fence.fence(process, "a test")
        endings = [asyncio.create_task(node.fence.ended(node.processes)) for _ in node.processes]
        await asyncio.sleep(0.05)
        node.at(NONE, NONE)
        await asyncio.wait_for(asyncio.gather(*endings), 5)
        for process in node.processes:
            assert await process.end(5) == -signal.SIGKILL

    on_a_node(2, body)


class Device:
    """``busy``: its kernels run, or wait."""

    def __init__(self) -> None:
        self.idle = threading.Event()

    def in_use(self) -> bool:
        return True

    def current(self) -> None:
        return None

    def synchronize(self, device: Any = None) -> None:
        self.idle.wait(10)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    it, before = Device(), accelerator.accelerator()
    accelerator.use(it)  # type: ignore[arg-type]
    yield it
    it.idle.set()
    accelerator.use(before)


@contextmanager
def worker() -> Iterator[tuple[Page, QuietAbort]]:
    page = Page.create("test")
    order = QuietAbort(page)
    order.opened(3)
    assert page.communicators == (OPEN, 3)
    yield page, order
    page.close()


def before_aborts(order: QuietAbort) -> threading.Thread:
    thread = threading.Thread(target=order.before_aborts, daemon=True)
    thread.start()
    return thread


def test_kernels_that_are_about_to_end_are_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then no other rank is."""
    monkeypatch.setattr(quiet_abort, "TRANSFER_S", 10.0)
    with worker() as (page, order):
        thread = before_aborts(order)
        time.sleep(0.05)
        assert thread.is_alive() and page.communicators == (STILL, 3)
        device.idle.set()
        thread.join(5)
        assert not thread.is_alive() and page.communicators == (QUIET, 3)


def test_where_they_wait_the_others_word_is_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_abort, "AGREE_S", 10.0)
    with worker() as (page, order):
        thread = before_aborts(order)
        time.sleep(0.3)
        assert thread.is_alive() and page.communicators == (QUIET, 3)
        page.let_abort()
        thread.join(5)
        assert not thread.is_alive()


def test_no_wait_is_without_a_bound(device: Device) -> None:
    with worker() as (_, order):
        thread = before_aborts(order)
        thread.join(5)
        assert not thread.is_alive()


def test_the_page_says_when_the_aborts_are_over_unless_others_have_been_made(device: Device) -> None:
    device.idle.set()
    for again, state in ((False, (NONE, 3)), (True, (OPEN, 4))):
        with worker() as (page, order):
            order.before_aborts()
            aborting = threading.Event()
            order.begun(lambda over=aborting: not over.is_set())  # type: ignore[misc]
            time.sleep(0.02)
            assert page.communicators == (QUIET, 3)
            if again:
                order.opened(4)
            aborting.set()
            time.sleep(0.05)
            assert page.communicators == state and not page.may_abort


def test_aborted_communicators_are_not_waited_for_again(device: Device) -> None:
    with worker() as (page, order):
        page.set_communicators(NONE, 3)
        order.before_aborts()
        assert page.communicators == (NONE, 3)


def test_an_abort_keeps_to_the_order_and_begins_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Module:
        def is_local(self, outer: str) -> bool:
            return False

        def abandon(self, outer: str, reason: str) -> int:
            said.append(f"abandon {outer}")
            return 1

        def start_abort(self, outer: str) -> None:
            said.append(f"abort {outer}")

        def aborting(self, outer: str) -> bool:
            return False

    class Group:
        def __init__(self, name: str, kind: str, size: int) -> None:
            self.name, self.size = name, size
            self.request = type("Request", (), {"kind": kind})

        def outer(self) -> str:
            return self.name

    class Order:
        def before_aborts(self) -> None:
            said.append("wait")

        def begun(self, aborting: Callable[[], bool]) -> None:
            said.append("begun")
            assert not aborting()

    monkeypatch.setattr(exchange.native_build, "loaded", Module)
    monkeypatch.setattr(exchange, "stop_all", lambda reason: None)
    monkeypatch.setattr(STATE, "stores", [])
    monkeypatch.setattr(STATE, "groups", [Group("a", "nccl", 2), Group("b", "gloo", 2), Group("c", "nccl", 1)])
    monkeypatch.setattr(STATE, "abandonments", STATE.abandonments)
    monkeypatch.setattr(STATE, "reason", "")
    monkeypatch.setattr(STATE, "abort_order", Order())
    exchange.abandon("a test")
    assert said == ["abandon a", "abandon b", "abandon c", "wait", "abort a", "begun"]
    said.clear()
    monkeypatch.setattr(STATE, "groups", [Group("b", "gloo", 2)])
    exchange.abandon("a test")
    assert said == ["abandon b"], "gloo waits for nothing"

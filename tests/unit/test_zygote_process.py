"""What the agent asks of a zygote, and what becomes of it, with the test in the zygote's place: it answers late, in
parts, not at all, or to no one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashrecovery.agent.processes import zygote_process as module
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.providers import Forked, ProcessOrder
from flashrecovery.agent.processes.zygote import Zygotes
from flashrecovery.agent.processes.zygote_process import Zygote, ZygoteLostError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.framed import Framed
from flashrecovery.runtime.page import Page


def sleeper() -> subprocess.Popen[bytes]:
    """A process in the session of this test."""
    return subprocess.Popen(["sleep", "600"])


async def until(happened: Callable[[], Any], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.001)


class Scripted:
    """A zygote that does what the test says, through the other end of its socket."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        self._framed = Framed(self.sock)
        self._requests: list[pb.Fork] = []
        self.popen = sleeper()
        self.said: list[pb.FromZygote] = []
        self.lost = 0
        self.zygote = Zygote(self.popen, ours, lambda _, message: self.said.append(message), self._lost)

    def _lost(self, _: Zygote) -> None:
        self.lost += 1

    def ask(self) -> asyncio.Future[int]:
        return self.zygote.fork(pb.Fork(), [])

    async def asked(self, number: int) -> list[pb.Fork]:
        """When that many requests have come in all."""

        def here() -> bool:
            self._requests += [pb.Fork.FromString(data) for data in self._framed.arrived()]
            return len(self._requests) >= number

        await until(here)
        return self._requests

    def answer(self, number: int, pid: int = 0, error: str = "") -> None:
        answer = pb.FromZygote(forked=pb.Forked(number=number, pid=pid or number * 1000, error=error))
        self._framed.post(answer.SerializeToString())

    def close(self) -> None:
        for descriptor in self._framed.descriptors:
            os.close(descriptor)
        self.sock.close()
        self.zygote.close("the test is over")
        assert self.popen.wait() == -signal.SIGKILL and self.zygote.reaped()


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    it = Scripted()
    try:
        yield it
    finally:
        it.close()


def on_a_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def test_nobody_waits_for_an_answer_and_all_get_theirs() -> None:
    async def body() -> None:
        async with scripted() as it:
            asked = [it.ask() for _ in range(3)]
            requests = await it.asked(3)
            assert [request.number for request in requests] == [1, 2, 3] and not any(a.done() for a in asked)
            it.answer(1)
            it.answer(3)
            assert (await asked[0], await asked[2]) == (1000, 3000) and not asked[1].done()
            it.answer(2)
            assert await asked[1] == 2000
            assert not it.lost

    on_a_loop(body)


def test_no_room_for_another_process() -> None:
    async def body() -> None:
        async with scripted() as it:
            first, second = it.ask(), it.ask()
            it.answer(1, error="no room")
            it.answer(2)
            with pytest.raises(OSError, match="no room"):
                await first
            assert await second == 2000 and not it.lost

    on_a_loop(body)


def test_patience_begins_again_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host may take long for many: the zygote lives as long as it answers."""
    monkeypatch.setattr(module, "_ANSWER_S", 1000.0)

    async def body() -> None:
        async with scripted() as it:
            zygote = it.zygote
            assert zygote._patience is None
            asked = [it.ask(), it.ask()]
            first = zygote._patience
            assert first is not None
            await asyncio.sleep(0.01)
            assert it.ask() and zygote._patience is first, "not with each question"
            it.answer(1)
            await asked[0]
            second = zygote._patience
            assert first.cancelled() and second is not None and second.when() > first.when()
            it.answer(2)
            it.answer(3)
            await until(lambda: zygote._patience is None)
            assert second.cancelled()

    on_a_loop(body)


def test_one_that_says_nothing_is_lost_with_all_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)

    async def body() -> None:
        async with scripted() as it:
            asked = [it.ask(), it.ask()]
            for future in asked:
                with pytest.raises(ZygoteLostError, match=r"it has not answered for 0\.05 s"):
                    await future
            assert it.lost == 1 and it.popen.wait() == -signal.SIGKILL and it.zygote.reaped()

    on_a_loop(body)


def test_what_has_been_answered_counts_however_late_the_agent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent itself may have been kept from running, for longer than its patience."""
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)

    async def body() -> None:
        async with scripted() as it:
            asked = it.ask()
            it.answer(1)
            time.sleep(0.1)  # nothing else runs on this loop
            assert await asked == 1000 and not it.lost

    on_a_loop(body)


@pytest.mark.parametrize("asked_first", [True, False])
def test_what_it_said_before_it_died_counts(asked_first: bool) -> None:
    """Also if another request could not be sent any more."""

    async def body() -> None:
        async with scripted() as it:
            first = it.ask()
            second = it.ask() if asked_first else None
            it.answer(1)
            await it.asked(1 + asked_first)
            it.sock.close()
            second = second or it.ask()
            with pytest.raises(ZygoteLostError):
                await second
            assert await first == 1000 and it.lost == 1

    on_a_loop(body)


@pytest.mark.parametrize("wrong", [b"\xff", pb.FromZygote(forked=pb.Forked(number=7, pid=1)).SerializeToString()])
def test_one_that_says_what_it_was_not_asked_is_lost(wrong: bytes) -> None:
    async def body() -> None:
        async with scripted() as it:
            asked = it.ask()
            Framed(it.sock).post(wrong)
            with pytest.raises(ZygoteLostError):
                await asked
            assert it.lost == 1

    on_a_loop(body)


def test_one_that_is_retired_gives_its_last_answers() -> None:
    async def body() -> None:
        async with scripted() as it:
            asked = [it.ask(), it.ask()]
            it.zygote.retire()
            it.answer(1)
            await asked[0]
            assert it.popen.poll() is None and not it.zygote.reaped()
            it.answer(2)
            assert await asked[1] == 2000
            assert it.popen.wait() == -signal.SIGKILL and it.zygote.reaped() and not it.lost
        async with scripted() as idle:
            idle.zygote.retire()
            assert idle.popen.wait() == -signal.SIGKILL and not idle.lost

    on_a_loop(body)


def test_nothing_is_left_of_requests_that_were_not_sent() -> None:
    async def body() -> None:
        async with scripted() as it:
            before = len(os.listdir("/proc/self/fd"))
            asked = [it.zygote.fork(pb.Fork(env={"LONG": "x" * 300_000}), [0, 1, 2]) for _ in range(3)]
            assert len(os.listdir("/proc/self/fd")) > before
            it.zygote.close("it is not needed any more")
            assert len(os.listdir("/proc/self/fd")) < before
            assert len(await asyncio.gather(*asked, return_exceptions=True)) == 3

    on_a_loop(body)


def test_requests_that_the_socket_does_not_take_are_sent_later() -> None:
    """That of a zygote that is stopped, say, when there is much in the environment."""

    async def body() -> None:
        async with scripted() as it:
            env = {"LONG": "x" * 300_000}
            asked = [it.zygote.fork(pb.Fork(env=env), [0]) for _ in range(5)]
            requests = await it.asked(5)
            assert [request.env == env for request in requests] == [True] * 5
            assert len(it._framed.descriptors) == 5
            for number in range(1, 6):
                it.answer(number)
            assert await asyncio.gather(*asked) == [1000, 2000, 3000, 4000, 5000]
            assert not it.zygote._loop.remove_writer(it.zygote._sock), "the loop looks no more whether there is room"

    on_a_loop(body)


# -- those of a node ---------------------------------------------------------------------------------------


@asynccontextmanager
async def node_of(*ready: Scripted) -> AsyncIterator[Zygotes]:
    """Zygotes of which ``ready[0]`` is the one that forks."""
    zygotes = Zygotes(["script.py"], Path(os.devnull), (), lambda _: None)
    zygotes._current = ready[0].zygote
    for it in ready:
        it.zygote._lost = zygotes._lost
    try:
        yield zygotes
    finally:
        zygotes.close()
        for it in ready:
            it.close()
        await until(lambda: zygotes.reap() or not (zygotes._closed or zygotes._unwanted))


def fork(zygotes: Zygotes) -> asyncio.Task[int | None]:
    return asyncio.create_task(forked(zygotes))


async def forked(zygotes: Zygotes) -> int | None:
    """As a provider asks."""
    while True:
        try:
            return await zygotes.fork({}, [0, 1, 2], standby=False)
        except ZygoteLostError:
            continue


def ended(popen: subprocess.Popen[bytes]) -> bool:
    """Nothing is left of it, not even its entry in the kernel's table."""
    return not psutil.pid_exists(popen.pid)


@pytest.mark.parametrize("answered", ["after", "at the same time"])
def test_a_child_that_nobody_waits_for_any_more_is_ended(answered: str) -> None:
    async def body() -> None:
        it, child = Scripted(), sleeper()
        async with node_of(it) as zygotes:
            waiting = fork(zygotes)
            await it.asked(1)
            if answered == "after":
                waiting.cancel()
                await asyncio.sleep(0)
                it.answer(1, child.pid)
            else:
                asked = next(iter(it.zygote._asked.values()))
                it.answer(1, child.pid)
                it.zygote._read()
                assert asked.done()
                waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: zygotes.reap() or ended(child))
            assert zygotes._current is it.zygote, "it is asked again"
            child.wait()  # finds it reaped

    on_a_loop(body)


def test_the_next_one_is_asked_when_the_one_before_is_lost_on_its_last_request() -> None:
    async def body() -> None:
        before, after = Scripted(), Scripted()
        async with node_of(before, after) as zygotes:
            waiting = fork(zygotes)
            await before.asked(1)
            zygotes._growing = after.zygote
            zygotes._said(after.zygote, pb.FromZygote(grown=pb.Grown()))
            assert zygotes._current is after.zygote and before.popen.poll() is None, "it is heard out"
            before.sock.close()
            assert [request.HasField("grow") for request in await after.asked(2)] == [True, False]
            assert len(after._framed.descriptors) == 2 + 3
            after.answer(2)
            assert await waiting == 2000 and before.popen.wait() == -signal.SIGKILL

    on_a_loop(body)


def test_without_another_one_there_is_no_child() -> None:
    async def body() -> None:
        it = Scripted()
        async with node_of(it) as zygotes:
            waiting = [fork(zygotes), fork(zygotes)]
            await it.asked(2)
            it.sock.close()
            assert await asyncio.gather(*waiting) == [None, None]

    on_a_loop(body)


def test_the_end_while_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """What waits is told at once, and no other process is: the end of a zygote is wanted then."""

    async def body() -> None:
        it, other = Scripted(), Scripted()
        async with node_of(it, other) as zygotes:
            zygotes.learn(pb.Modules(names=["json"]))
            waiting = [fork(zygotes), fork(zygotes)]
            await it.asked(3)
            zygotes._growing = other.zygote
            zygotes._said(other.zygote, pb.FromZygote(grown=pb.Grown()))  # so that one of them is retired
            zygotes.close()
            assert await asyncio.wait_for(asyncio.gather(*waiting), 5.0) == [None, None]
            assert it.popen.wait() == other.popen.wait() == -signal.SIGKILL

    with caplog.at_level(logging.WARNING):
        on_a_loop(body)
    assert not caplog.records


def test_a_zygote_that_is_grown_for_nobody_is_ended() -> None:
    """Its parent is lost just after it has answered."""

    async def body() -> None:
        it, child = Scripted(), sleeper()
        async with node_of(it) as zygotes:
            zygotes.learn(pb.Modules(names=["json"]))
            (request,) = await it.asked(1)
            assert list(request.grow.learned.names) == ["json"]
            it.answer(1, child.pid)
            it.zygote._read()
            it.zygote._end("it is lost")  # before anybody has heard of the answer
            await until(lambda: zygotes.reap() or ended(child))
            assert not zygotes._grows
            child.wait()

    on_a_loop(body)


def test_one_that_is_lost_while_it_should_grow_another_is_replaced_from_the_first() -> None:
    async def body() -> None:
        it, first = Scripted(), Scripted()
        async with node_of(it, first) as zygotes:
            zygotes._first = first.zygote
            zygotes.learn(pb.Modules(names=["json"]))
            await it.asked(1)
            it.sock.close()
            (request,) = await first.asked(1)
            assert list(request.grow.learned.names) == ["json"] and zygotes._grows

    on_a_loop(body)


def test_nothing_is_left_of_a_process_that_was_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its channel nor its page, however it came about."""
    pages: list[Page] = []

    def create(name: str) -> Page:
        pages.append(made(name))
        return pages[-1]

    made = Page.create
    monkeypatch.setattr(Page, "create", create)

    async def body() -> None:
        it = Scripted()
        async with node_of(it) as zygotes:
            before = set(os.listdir("/proc/self/fd"))
            tasks = [asyncio.create_task(Forked(zygotes).start(ProcessOrder({}, tmp_path / "log"))) for _ in range(3)]
            await it.asked(3)
            for descriptor in it._framed.descriptors:
                os.close(descriptor)
            it._framed.descriptors.clear()
            tasks[0].cancel()
            it.answer(2, error="no room")
            await asyncio.wait(tasks[:2])
            it.zygote._end("it is lost")
            assert await asyncio.gather(*tasks[1:]) == [None, None] and tasks[0].cancelled()
            closed = {str(it.zygote._sock.fileno())}
            assert (
                set(os.listdir("/proc/self/fd")) | closed <= before | closed and len(pages) == 3 + 1
            )  # of the lost one's

    on_a_loop(body)


def test_another_zygote_is_asked_with_another_channel(tmp_path: Path) -> None:
    """The one that is lost may have forked before: no one has heard of that child, and it must end with its channel."""

    async def body() -> None:
        before, after = Scripted(), Scripted()
        async with node_of(before, after) as zygotes:
            waiting = asyncio.create_task(Forked(zygotes).start(ProcessOrder({}, tmp_path / "log")))
            await before.asked(1)
            channel, *_ = before._framed.descriptors
            zygotes._growing = after.zygote
            zygotes._said(after.zygote, pb.FromZygote(grown=pb.Grown()))
            before.zygote._end("it does not answer")
            await after.asked(2)  # the first is to grow another one
            assert not set(map(os.fstat, before._framed.descriptors[:2])) & set(
                map(os.fstat, after._framed.descriptors[2:4])
            )
            with socket.socket(fileno=os.dup(channel)) as unheard:
                assert unheard.recv(1) == b"", "its channel is at its end"
            after.answer(2, after.popen.pid)
            process = await waiting
            assert process is not None and process.pid == after.popen.pid
            process.page.close()
            process._sock.close()

    on_a_loop(body)


def test_a_process_that_leads_no_session_yet_is_killed_all_the_same() -> None:
    """It has been forked, and is about to begin one."""
    popen = sleeper()
    assert os.getpgid(popen.pid) != popen.pid
    ours, theirs = socket.socketpair()
    process = WorkerProcess(popen, Page.create("test"), ours)
    process.kill()
    assert popen.wait(20) == -signal.SIGKILL
    process.close()
    theirs.close()

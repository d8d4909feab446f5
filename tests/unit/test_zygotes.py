"""The agent's zygotes, with real processes: all of them are lost, and others come."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from flashrecovery.agent.processes import zygote as module
from flashrecovery.agent.processes import zygote_process
from flashrecovery.agent.processes.zygote import Zygotes
from flashrecovery.agent.processes.zygote_process import ZygoteLostError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import AGENT_PID_ENV
from flashrecovery.runtime.page import Page

TOLD = "new interpreters are started instead of forked ones: its zygotes do not live; another one is started in "


async def until(happened: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.02)


def can_fork(zygotes: Zygotes) -> bool:
    return zygotes._current is not None


@asynccontextmanager
async def that_can_fork(tmp_path: Path) -> AsyncIterator[tuple[Zygotes, list[str]]]:
    """Zygotes, and what they tell from then on; all that there are end afterwards."""
    script = tmp_path / "script.py"
    script.write_text("import json\n")
    told: list[str] = []
    zygotes = Zygotes([str(script)], tmp_path / "zygote.log", ("torch",), told.append)
    try:
        zygotes.start({AGENT_PID_ENV: str(os.getpid())})
        await until(lambda: can_fork(zygotes))
        told.clear()  # torch is left out, so that they come soon
        yield zygotes, told
    finally:
        zygotes.close()
    await until(lambda: zygotes.reap() or not zygotes._closed)


async def forked(zygotes: Zygotes, **env: str) -> int | None:
    """The pid of a process that waits for its rank for ever; None if no zygote has forked it."""
    ours, theirs = socket.socketpair()
    page = Page.create("test")
    pid = None
    with ours, theirs, open(os.devnull, "ab") as out, suppress(ZygoteLostError):
        pid = await zygotes.fork({**os.environ, **env}, (theirs.fileno(), page.fd, out.fileno()), standby=False)
    page.close()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return pid


def strike(zygotes: Zygotes, number: signal.Signals) -> list[int]:
    """All that there are."""
    pids = [zygote.pid for zygote in (zygotes._first, zygotes._current, zygotes._growing) if zygote is not None]
    for pid in pids:
        os.kill(pid, number)
    return pids


@pytest.mark.parametrize(("number", "pauses"), [(signal.SIGKILL, ("0.3 s", "0.6 s")), (signal.SIGSTOP, ("0.3 s",))])
def test_another_one_is_started_when_all_are_lost(
    number: signal.Signals, pauses: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or without an answer: then the agent finds that when it asks."""
    monkeypatch.setattr(module, "_AGAIN_S", (0.3, 0.6))

    async def live() -> None:
        async with that_can_fork(tmp_path) as (zygotes, told):
            for pause in pauses:
                lost = strike(zygotes, number)
                monkeypatch.setattr(zygote_process, "_ANSWER_S", 0.3)
                while not told:
                    await forked(zygotes)
                    await asyncio.sleep(0.02)
                monkeypatch.setattr(zygote_process, "_ANSWER_S", 120.0)  # those that come are waited for
                assert told.pop() == TOLD + pause
                assert await forked(zygotes) is None
                await until(lambda: can_fork(zygotes))
                assert told.pop() == "processes are forked again" and told == []
                assert not {*lost} & {*strike(zygotes, signal.SIGCONT)}, "others"
        await asyncio.sleep(0.7)
        assert zygotes._first is None, "none is started after the end"

    asyncio.run(live())
    children = psutil.Process().children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]  # other tests may have left some
    assert not [child for child in living if "--zygote" in child.cmdline()]


def test_none_is_started_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that was about to happen."""
    monkeypatch.setattr(module, "_AGAIN_S", (0.3,))

    async def live() -> None:
        async with that_can_fork(tmp_path) as (zygotes, told):
            strike(zygotes, signal.SIGKILL)
            await until(lambda: bool(told))  # all of them are known to be lost, one after the other
            zygotes.close()
            await asyncio.sleep(0.6)
            assert zygotes._first is None and told == [TOLD + "0.3 s"]

    asyncio.run(live())


def one_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Zygotes], Awaitable[None]]
) -> list[str]:
    """What has been told, when ``happens`` has met with one that can fork, which is still the same afterwards."""
    monkeypatch.setattr(module, "_AGAIN_S", (0.3,))

    async def live() -> list[str]:
        async with that_can_fork(tmp_path) as (zygotes, told):
            ready = zygotes._current
            await happens(zygotes)
            assert zygotes._current is ready
            assert ready is not None
            os.kill(ready.pid, signal.SIGKILL)
            await until(lambda: zygotes._current not in (None, ready))  # from the first one, or another first one
        return told

    return asyncio.run(live())


def test_one_that_is_ready_stays_when_the_first_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def happens(zygotes: Zygotes) -> None:
        assert zygotes._first is not None
        os.kill(zygotes._first.pid, signal.SIGKILL)
        await until(lambda: zygotes._first is None)

    told = one_that_is_ready(tmp_path, monkeypatch, happens)
    assert told == [TOLD + "0.3 s", "processes are forked again"]


def test_one_that_is_ready_stays_when_the_next_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have died before."""

    async def happens(zygotes: Zygotes) -> None:
        zygotes._failures = module._TRIES
        with monkeypatch.context() as patched:
            patched.setattr(zygotes, "_said", lambda *_: None)  # or it may be ready before it is seen here
            zygotes.learn(pb.Modules(names=["json", "colorsys"]))
            await until(lambda: zygotes._growing is not None)
        growing = zygotes._growing
        assert growing is not None
        os.kill(growing.pid, signal.SIGKILL)
        zygotes._lost(growing)  # at once: it may have been ready before it was killed
        assert zygotes._growing is None
        zygotes._failures = 0

    assert one_that_is_ready(tmp_path, monkeypatch, happens) == []


def test_one_that_is_ready_stays_when_there_is_no_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is grown when more has been learned."""

    async def happens(zygotes: Zygotes) -> None:
        def no_room(*_: object) -> int:
            raise OSError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(module.Zygote, "fork", no_room)
            zygotes.learn(pb.Modules(names=["json", "colorsys"]))
        assert not zygotes._grows
        zygotes.learn(pb.Modules())
        assert zygotes._grows

    assert one_that_is_ready(tmp_path, monkeypatch, happens) == []


@pytest.mark.grid
def test_all_are_forked_on_a_busy_host(tmp_path: Path) -> None:
    """Many at once, and more than the zygote's socket takes. Nothing waits for them on the loop."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]

    async def live() -> None:
        async with that_can_fork(tmp_path) as (zygotes, told):
            ready = zygotes._current
            pids = await asyncio.gather(*[forked(zygotes, LONG="x" * 20_000) for _ in range(60)])
            assert None not in pids and len({*pids}) == 60
            assert zygotes._current is ready and told == []

    try:
        asyncio.run(live())
    finally:
        for process in busy:
            process.kill()
            process.wait()

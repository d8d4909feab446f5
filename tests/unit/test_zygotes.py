"""The agent's zygotes, with real processes: all of them are lost, and others come."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from flashrecovery.agent import zygote as module
from flashrecovery.agent.zygote import Zygotes
from flashrecovery.runtime.environment import AGENT_PID_ENV

TOLD = "new interpreters are started instead of forked ones: its zygotes do not live; another one is started in "


async def until(happened: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.02)


def can_fork(zygotes: Zygotes) -> bool:
    return zygotes._current is not None


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
    script = tmp_path / "script.py"
    script.write_text("import json\n")
    told: list[str] = []

    async def live() -> None:
        zygotes = Zygotes([str(script)], tmp_path / "zygote.log", ("torch",), told.append)
        try:
            zygotes.start({AGENT_PID_ENV: str(os.getpid())})
            await until(lambda: can_fork(zygotes))
            told.clear()  # torch is left out, so that they come soon
            for pause in pauses:
                lost = strike(zygotes, number)
                while zygotes._first is not None:
                    zygotes.fork({}, [], standby=False)
                    await asyncio.sleep(0.02)
                assert told.pop() == TOLD + pause
                assert zygotes.fork({}, [], standby=False) is None
                await until(lambda: can_fork(zygotes))
                assert told.pop() == "processes are forked again" and told == []
                assert not {*lost} & {*strike(zygotes, signal.SIGCONT)}, "others"
        finally:
            zygotes.close()
        await asyncio.sleep(0.7)
        assert zygotes._first is None, "none is started after the end"
        await until(lambda: zygotes.reap() or not zygotes._closed)

    asyncio.run(live())
    assert not [child for child in psutil.Process().children(recursive=True) if "--zygote" in child.cmdline()]


def test_none_is_started_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that was about to happen."""
    monkeypatch.setattr(module, "_AGAIN_S", (0.3,))
    script = tmp_path / "script.py"
    script.write_text("import json\n")
    told: list[str] = []

    async def live() -> None:
        zygotes = Zygotes([str(script)], tmp_path / "zygote.log", ("torch",), told.append)
        zygotes.start({AGENT_PID_ENV: str(os.getpid())})
        await until(lambda: can_fork(zygotes))
        told.clear()
        strike(zygotes, signal.SIGKILL)
        await until(lambda: zygotes._first is None)
        zygotes.close()
        await asyncio.sleep(0.6)
        assert zygotes._first is None and told == [TOLD + "0.3 s"]
        await until(lambda: zygotes.reap() or not zygotes._closed)

    asyncio.run(live())

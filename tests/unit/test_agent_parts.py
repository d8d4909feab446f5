"""Parts of the agent: what /proc says, who is to blame for a hang, how fast a big process's death is seen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

from flashrecovery.agent.hang import Answer, judge
from flashrecovery.agent.procfs import Exit, exit_of, is_stopped
from flashrecovery.agent.watch import DeathWatch


def _sleeper(code: str = "import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"print('up', flush=True); {code}"], stdout=subprocess.PIPE)


def test_exit_status_is_known_before_the_process_is_reaped() -> None:
    for code, expected in (
        ("import os; os._exit(3)", Exit(3, None)),
        ("import os; os.kill(os.getpid(), 9)", Exit(None, 9)),
    ):
        p = _sleeper(code)
        deadline = time.monotonic() + 10
        while (found := exit_of(p.pid)) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == expected
        p.wait()
        assert exit_of(p.pid) is None
    assert str(Exit(None, 9)) == "killed by SIGKILL" and str(Exit(3, None)) == "exit code 3"


def test_stopped_processes_are_seen() -> None:
    p = _sleeper()
    assert p.stdout is not None
    p.stdout.readline()
    assert not is_stopped(p.pid)
    os.kill(p.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not is_stopped(p.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_stopped(p.pid)
    p.kill()
    p.wait()


def test_death_of_a_process_with_much_memory_is_seen_before_it_is_gone() -> None:
    async def run() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        watch = DeathWatch(loop, 0.002)
        p = _sleeper("b = bytearray(1 << 30); print('full', flush=True); import time; time.sleep(60)")
        assert p.stdout is not None
        p.stdout.readline(), p.stdout.readline()
        seen: asyncio.Future[float] = loop.create_future()
        watch.add(p.pid, seen.set_result)
        await asyncio.sleep(0.05)
        p.kill()
        late = await asyncio.wait_for(seen, 10)
        still_there = p.poll() is None
        p.wait()
        watch.close()
        return late, still_there

    late, _ = asyncio.run(run())
    assert 0 <= late < 5


def _process(pid: int) -> Any:
    return cast(Any, SimpleNamespace(pid=pid))


def test_the_culprit_of_a_hang_is_named() -> None:
    a, b, c = _process(1), _process(2), _process(3)
    waiting = Answer(10, "all_reduce #5 of group 0", "")
    assert judge([a, b], {1: waiting})[0][0] is b, "who does not answer"
    assert judge([a, b], {1: waiting, 2: Answer(10, "", "stack of b")})[0][0] is b, "who is not in a collective"
    behind = Answer(9, "all_reduce #4 of group 0", "")
    assert [p for p, _ in judge([a, b, c], {1: waiting, 2: behind, 3: waiting})] == [b], "who is behind"
    assert judge([a, b], {1: waiting, 2: waiting}) == [], "nobody without evidence"

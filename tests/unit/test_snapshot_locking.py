"""Where there is swap space, the snapshot process locks what it holds, and answers meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from flashrecovery.snapshot import address, locking
from flashrecovery.snapshot.client import Keeper, SnapshotHost
from flashrecovery.snapshot.locking import PIECE, Locking, has_swap, lock_limit
from flashrecovery.snapshot.memory import SharedMemory

PROCESS = """
import socket, sys
from flashrecovery.snapshot.process import SnapshotProcess
SnapshotProcess(socket.socket(fileno=int(sys.argv[1])), None, 30.0, lock=True).run()
"""
NBYTES = 5 * PIECE // 2
may_lock = pytest.mark.skipif(lock_limit() is not None, reason="this process may not lock so much memory")


def locked(pid: int) -> int:
    """Bytes that a process has locked."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmLck")).split()[1]) * 1024


@may_lock
def test_all_of_it_is_locked_until_it_is_given_up() -> None:
    name = f"flashrecovery-test-{uuid.uuid4().hex}"
    with address.listen(name) as listener:
        command = [sys.executable, "-c", PROCESS, str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=(listener.fileno(),))
    host = SnapshotHost.find(name)
    assert host is not None
    try:
        keeper = Keeper(name, 0)
        for memory in ("own-0", "own-1", "own-2"):
            keeper.keep(memory, SharedMemory.create(NBYTES))
        assert len(host.held()) == 3
        deadline = time.monotonic() + 10
        while locked(process.pid) < 3 * NBYTES and time.monotonic() < deadline:
            time.sleep(0.01)
        assert locked(process.pid) >= 3 * NBYTES
        keeper.keep("own-1", None)
        assert len(host.held()) == 2
        assert 2 * NBYTES <= locked(process.pid) < 3 * NBYTES
        assert psutil.Process(process.pid).memory_info().shared >= 2 * NBYTES, "the memory is there"
    finally:
        host.end()
        assert process.wait(10) == 0


@may_lock
def test_what_is_given_up_before_its_turn_is_left_alone() -> None:
    held = [SharedMemory.create(NBYTES) for _ in range(3)]
    given_up = held[0]
    work = Locking(lambda memory: memory is not given_up, pytest.fail)
    for memory in held:
        work.add(memory)
    steps = 0
    while work.busy:
        work.step()
        steps += 1
    assert steps == 1 + 2 * 4


def test_it_says_once_that_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def mlock(self, *_: object) -> int:
            return -1

    said: list[str] = []
    monkeypatch.setattr(locking, "_libc", Refusing())
    work = Locking(lambda memory: True, said.append)
    work.add(SharedMemory.create(NBYTES))
    work.add(SharedMemory.create(NBYTES))
    while work.busy:
        work.step()
    assert len(said) == 1 and "may be swapped out" in said[0]


@pytest.mark.parametrize(
    ("text", "expected"), [("Filename\tType\n", False), ("Filename\tType\n/dev/sda2 partition 1 0 -2\n", True)]
)
def test_swap_space(tmp_path: Path, text: str, expected: bool) -> None:
    swaps = tmp_path / "swaps"
    assert not has_swap(swaps)
    swaps.write_text(text)
    assert has_swap(swaps) is expected

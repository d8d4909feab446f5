"""A rank on a GPU is filled again when the GPU's memory is free, and no later on a machine without one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pynvml
import pytest

from flashrecovery.agent.processes import gpu_fence
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import NodeParts, ProcessManager
from flashrecovery.agent.processes.procfs import Statm, session_members
from flashrecovery.agent.processes.providers import Spawned
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.config import RunConfig
from flashrecovery.events import RunDir
from flashrecovery.health.gpu_processes import GpuProcesses
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.fake_nvml import FakeGpu, FakeNvml

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
SHORT_S, LONG_S = 0.05, 30.0


@contextmanager
def session() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process and its child, in their own session; no process reaps the process before the end."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent, child
    finally:
        for pid in session_members(parent.pid):
            signal.pidfd_send_signal(_pidfd(pid), signal.SIGKILL)
        parent.stdout.close()
        parent.wait()


def _pidfd(pid: int) -> int:

    return os.pidfd_open(pid)


def worker(popen: subprocess.Popen[bytes], local_rank: int = 0) -> Any:
    return SimpleNamespace(pid=popen.pid, local_rank=local_rank)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with NVIDIA's driver."""
    path = tmp_path / "nvidiactl"
    path.touch()
    monkeypatch.setattr(gpu_fence, "DRIVER", path)
    return path


def _dead(pid: int) -> None:
    statm = Statm(pid)
    until = time.monotonic() + LONG_S
    while not statm.dead():
        assert time.monotonic() < until
        time.sleep(0.001)
    statm.close()


def test_what_a_killed_process_has_forked_must_have_ended_too(driver: Path) -> None:
    with session() as (parent, child):
        fence = GpuFence(lambda: None)
        assert sorted(session_members(parent.pid)) == sorted([parent.pid, child])
        parent.kill()
        _dead(parent.pid)
        assert not asyncio.run(fence.released(worker(parent), SHORT_S)), "its child may have the driver open"
        signal.pidfd_send_signal(_pidfd(child), signal.SIGKILL)
        assert asyncio.run(fence.released(worker(parent), LONG_S)), "also before anybody has reaped it"


def test_nvml_has_the_last_word(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session() as (parent, child):
        for pid in (child, parent.pid):
            signal.pidfd_send_signal(_pidfd(pid), signal.SIGKILL)
        gpus = [FakeGpu("GPU-0", processes=[parent.pid]), FakeGpu("GPU-1", processes=[1, parent.pid])]
        FakeNvml(monkeypatch, *gpus)

        async def body() -> None:
            fence = GpuFence(lambda: GpuProcesses.create({"CUDA_VISIBLE_DEVICES": "1,0"}, 2))
            await fence.prepare()
            first = worker(parent, 0)
            assert not await fence.released(first, SHORT_S)
            gpus[1].processes.remove(parent.pid)
            assert await fence.released(first, LONG_S), "what another rank's GPU lists is none of its business"
            assert not await fence.released(worker(parent, 1), SHORT_S)
            gpus[0].missing.add("processes")
            assert await fence.released(worker(parent, 1), LONG_S), "a GPU that cannot be read is waited for by nobody"

        asyncio.run(body())


def test_without_nvml_the_end_of_the_processes_counts(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, init=pynvml.NVML_ERROR_UNKNOWN)
    assert GpuProcesses.create({}, 1) is None


def test_on_a_machine_without_gpus_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_fence, "DRIVER", tmp_path / "none")
    with session() as (parent, _):
        began = time.monotonic()
        assert asyncio.run(GpuFence(lambda: None).released(worker(parent), LONG_S))
        assert time.monotonic() - began < LONG_S


def test_a_rank_is_assigned_only_after_the_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process manager's part."""
    order: list[str] = []
    old, new = MagicMock(), MagicMock()
    old.gone, old.hear_out, old.end = AsyncMock(return_value=True), AsyncMock(), AsyncMock()
    new.connect, new.dead, new.pid = AsyncMock(), False, 7
    new.page.local_state_versions.return_value, new.page.early_local_states.return_value = [], []
    new.send.side_effect = lambda message: order.append("assigned")
    monkeypatch.setattr(Spawned, "start", AsyncMock(return_value=new))

    class Fence(GpuFence):
        async def released(self, process: WorkerProcess, timeout_s: float) -> bool:
            assert process is old
            order.append("looked")
            return len(order) > 1

    async def body() -> None:
        foreman = MagicMock()
        config = RunConfig(nproc_per_node=1, standby=0, start_method="spawn")
        tasks = Tasks(lambda error: None)
        fence = Fence(lambda: None)
        node = NodeParts(RunDir(tmp_path), dict, MagicMock(), tasks, fence, MagicMock())
        manager = ProcessManager(foreman, config, [], node)
        manager._watch = MagicMock()
        manager.ranks[0] = old
        await manager.fill(pb.Command(rank=0, generation=1, replace=pb.Replace()), hear_out=False)
        (notice,) = foreman.notice.call_args_list
        assert notice.args[1] is NoticeKind.FENCE_TIMEOUT and "GPU" in notice.args[2]

    asyncio.run(body())
    assert order == ["looked", "looked", "assigned"]


def test_a_rank_goes_to_a_gpu_only_after_the_other_rank_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another layout, 1 and 2 of ranks 0 to 2 live: they become 0 and 1 where they are, so that rank 1 comes to
    where rank 2 was, which leaves meanwhile, and rank 0 to where rank 1 was, whose own rank is filled after it."""
    held = {"rank 0 before", "rank 1 before", "rank 2 before"}
    done: list[str] = []
    made = iter(["rank 0", "rank 1"])

    def process(name: str, pid: int, local_rank: int = 0) -> Any:
        one = MagicMock(pid=pid, dead=False, local_rank=local_rank)
        one.configure_mock(name=name)
        one.take_rank = partial(WorkerProcess.take_rank, one)
        one.gone, one.end, one.connect, one.hear_out = (AsyncMock(return_value=v) for v in (True, 0, MagicMock(), None))
        one.page.local_state_versions.return_value, one.page.early_local_states.return_value = [], []
        one.send.side_effect = lambda message: done.append(one.name)
        one.kill.side_effect = lambda: held.discard(one.name)
        return one

    class Fence(GpuFence):
        async def released(self, process: WorkerProcess, timeout_s: float) -> bool:
            while process.name in held:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            return True

    async def body() -> None:
        config = RunConfig(nproc_per_node=3, standby=0, start_method="spawn")
        tasks, fence = Tasks(lambda error: None), Fence(lambda: None)
        foreman, logs, snapshots = MagicMock(), MagicMock(), MagicMock()
        node = NodeParts(RunDir(tmp_path), dict, logs, tasks, fence, snapshots)
        manager = ProcessManager(foreman, config, [], node)
        manager._watch = MagicMock()

        async def fill(rank: int, local_rank: int) -> None:
            order = pb.Command(rank=rank, generation=1, replace=pb.Replace(local_rank=local_rank))
            await manager.fill(order, hear_out=False)

        monkeypatch.setattr(
            Spawned, "start", AsyncMock(side_effect=lambda order: process(f"rank {order.local_rank} before", 10))
        )
        for rank in range(3):
            await fill(rank, rank)
        manager.ranks[0].kill()  # is lost
        leaving = manager.ranks[2]
        done.clear()
        monkeypatch.setattr(Spawned, "start", AsyncMock(side_effect=lambda order: process(next(made), 20)))
        left = asyncio.Event()

        async def end(grace_s: float) -> int:
            await left.wait()
            held.discard("rank 2 before")
            return 0

        leaving.end = end
        leaves = asyncio.create_task(manager.let_go(2, 5.0))
        first = asyncio.create_task(fill(0, 1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not done, "rank 1's process is still there"
        second = asyncio.create_task(fill(1, 2))
        await first
        for _ in range(20):
            await asyncio.sleep(0)
        assert done == ["rank 0"] and not second.done(), "rank 2's process is still there"
        left.set()
        await asyncio.gather(leaves, second)
        assert done == ["rank 0", "rank 1"]
        await manager.end(0.0)

    asyncio.run(body())

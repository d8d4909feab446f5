"""A process in uninterruptible sleep, which SIGKILL does not end: it is named, its node is given up, and nothing waits
for it without a bound."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from flashrecovery import events as ev
from flashrecovery.agent.processes import process_manager
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import ProcessManager
from flashrecovery.agent.processes.procfs import uninterruptible
from flashrecovery.controller.membership.admission import refusal
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support import frozen
from tests.unit.test_filling import Node, process
from tests.unit.test_handoff import HandoffWorld

needs_freezer = pytest.mark.skipif(not frozen.available(), reason="needs root and the first version of control groups")


@needs_freezer
def test_who_sleeps_so_is_told_from_the_kernels_table() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not uninterruptible(process.pid)
        with frozen.frozen(process.pid):
            process.kill()
            found = uninterruptible(process.pid)
            (text,) = found.values()
            assert f"thread {process.pid} is in uninterruptible sleep (" in text
            time.sleep(0.1)
            assert uninterruptible(process.pid) == found, "it has not run meanwhile"
            assert process.poll() is None
        assert process.wait(10) == -signal.SIGKILL
        assert not uninterruptible(process.pid)


def test_one_that_is_slow_to_end_has_run_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk it sleeps so whenever one looks, but not in the same call. Its node is not given up."""

    async def live() -> None:
        node = Node.of(tmp_path)
        foreman = _limits(node.manager, 10.0)
        node.old.gone = AsyncMock(side_effect=[False, False, False, True])
        sleeps = iter([{(7, 100): "thread 7 sleeps"}, {(7, 130): "thread 7 sleeps"}, {}])
        monkeypatch.setattr(process_manager, "uninterruptible", lambda pid: next(sleeps))
        assert await node.manager._bury_old(0, node.old, hear_out=False)
        foreman.never_ends.assert_not_called()

    asyncio.run(live())


def _limits(manager: ProcessManager, fence_s: float) -> Any:
    timeouts = manager._config.timeouts.model_copy(update={"fence_s": fence_s})
    manager._config = manager._config.model_copy(update={"timeouts": timeouts})
    return manager._foreman


@needs_freezer
def test_a_rank_is_not_filled_where_its_old_process_never_ends(tmp_path: Path) -> None:
    """The controller is told, and the new process is not let loose beside it."""

    async def live() -> None:
        node = Node.of(tmp_path)
        foreman = _limits(node.manager, 0.1)
        popen = subprocess.Popen(["sleep", "60"], start_new_session=True)
        ours, theirs = socket.socketpair()
        old = node.old = node.manager.ranks[0] = WorkerProcess(popen, process_manager.Page.create("test"), ours)
        old.rank = 0
        with theirs, frozen.frozen(popen.pid):
            filling = node.fill(1)
            await asyncio.sleep(0.05)
            new = node.slow.give(0, process("new"))
            assert await asyncio.wait_for(filling, 20) is None
            (call,) = foreman.never_ends.call_args_list
            assert call.args[0] == 0 and f"SIGKILL does not end pid {popen.pid} of rank 0: thread" in call.args[1]
            new.send.assert_not_called()
        popen.wait(10)
        old.close()

    asyncio.run(live())


def test_one_that_does_not_end_for_long_never_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does."""

    async def live() -> None:
        node = Node.of(tmp_path)
        foreman = _limits(node.manager, 10.0)
        monkeypatch.setattr(process_manager, "uninterruptible", lambda pid: {})
        node.old.gone = AsyncMock(return_value=False)
        assert not await node.manager._bury_old(0, node.old, hear_out=False)
        assert node.old.gone.await_count == process_manager._ENDLESS
        assert "6 x timeouts.fence_s have passed" in foreman.never_ends.call_args.args[1]
        node.manager._gpu_fence = SimpleNamespace(released=AsyncMock(return_value=False))  # type: ignore[assignment]
        node.old.dead = True
        assert not await node.manager._free_gpu(0, node.old)
        assert node.manager._gpu_fence.released.await_count == process_manager._ENDLESS

    asyncio.run(live())


def test_its_node_is_given_up_and_its_ranks_go_elsewhere() -> None:
    world = HandoffWorld()
    world.machine.on_node_stuck("node1", "SIGKILL does not end pid 7 of rank 2", world.now)
    world.machine.on_node_stuck("node1", "once more", world.now)
    world.collect()
    (lost,) = world.of(ev.NodeLost)
    assert "pid 7 of rank 2; the node is given up for this job" in lost.evidence  # type: ignore[attr-defined]
    assert world.homes()[2:] == ["spare", "spare"]
    assert world.machine.job.nodes["node1"].state is NodeState.LOST
    assert world.run() is State.FINISHED


def test_it_may_not_come_back() -> None:
    message = pb.Register(node="node1")
    found = refusal(message, {}, None, there=False, given_up="pid 7 never ends")
    assert found is not None and "node node1: pid 7 never ends" in found.text
    assert refusal(message, {}, None, there=False) is None


def test_where_there_is_no_other_node_the_job_ends_and_says_why() -> None:
    world = HandoffWorld(spare=False)
    world.machine.job.config = world.machine.job.config.model_copy(update={"nnodes": 1, "controller": None})
    assert not world.machine.job.config.several_nodes
    world.machine.on_node_stuck("node1", "SIGKILL does not end pid 7 of rank 2", world.now)
    assert world.machine.job.state is State.FAILED
    assert "SIGKILL does not end pid 7 of rank 2" in world.machine.job.failure_reason

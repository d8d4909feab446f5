"""An agent whose job changes its parallel layout: what it forgets, and when; and that nothing waits for it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.stores import staging_memory
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.config import RunConfig, validate
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access


@asynccontextmanager
async def agent_of(path: Path, **changes: object) -> AsyncIterator[Agent]:
    """An agent with a controller that hears nothing; it starts no process. ``changes``: how the job may change."""
    given = {"nproc_per_node": 1, "health": "none", "start_method": "spawn", **(changes or {"parallelism": {"min": 1}})}
    config, access = validate(RunConfig, given, "test"), Access("the-token-of-this-test-job")
    with closing(RunDir(path / "run")) as run_dir:
        agent = Agent(config, ["train.py"], run_dir, Identity.of(config, "127.0.0.1"), access)

        async def fill(command: pb.Command, *, hear_out: bool) -> None:
            pass

        agent._processes.fill = fill  # type: ignore[method-assign]
        agent.connect(lambda message: None, lambda heartbeat: None)
        yield agent
        await agent.shutdown(None)


def replace(layout: str, attempt: int) -> pb.Command:
    return pb.Command(generation=5, rank=0, replace=pb.Replace(layout=layout, attempt=attempt, world_size=2))


def test_a_node_that_gets_its_first_rank_of_a_layout_still_keeps_set_up_logs_of_it(tmp_path: Path) -> None:
    """It has kept them for others, and gets the rank because one of these is lost."""

    async def kept() -> dict[int, int]:
        async with agent_of(tmp_path) as agent:
            for rank, (attempt, log) in enumerate([(2, b"new"), (2, b"new"), (1, b"old"), (3, b"?")]):
                agent.keep_setup_log(rank, log, attempt)
            await agent._replace(replace("tp=1,pp=2,dp=1", 2))
            starts = {rank: attempt for rank in range(4) for attempt in (1, 2, 3) if agent.setup_log(rank, attempt)}
            return starts

    assert asyncio.run(kept()) == {0: 2, 1: 2}


@pytest.mark.parametrize(
    "changes", [{"parallelism": {"min": 1}}, {"nproc_per_node": 2, "elastic": {"min": 1, "max": 2}}]
)
def test_where_all_start_again_nobody_has_left(changes: dict[str, object], tmp_path: Path) -> None:
    """Else the next controller has those leave that had before, and are there again."""

    async def known() -> list[list[int]]:
        async with agent_of(tmp_path, **changes) as agent:
            found = []
            for attempt in (0, 1):
                agent._members = (1,)
                await agent._replace(replace("", attempt))
                found.append(list(agent.register().members))
            return found

    assert asyncio.run(known()) == [[1], []]


def test_each_start_reads_again_what_is_on_other_nodes(tmp_path: Path) -> None:
    async def read() -> list[bool]:
        async with agent_of(tmp_path) as agent:
            assert agent._staging._transfer is not None
            found = []
            for attempt in (1, 1, 2):
                await agent._replace(replace("tp=1,pp=2,dp=1", attempt))
                found.append(bool(agent._staging._transfer._here))
                agent._staging._transfer._here[tmp_path] = {(0, 8)}
            return found

    assert asyncio.run(read()) == [False, True, False]


def test_nobody_waits_until_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents do that at once, at the first step of a layout: no heartbeat may be late for it."""

    def slowly(path: Path, **_: object) -> None:
        time.sleep(0.5)
        rmtree(path, ignore_errors=True)

    rmtree = shutil.rmtree

    async def drop() -> float:
        async with agent_of(tmp_path) as agent:
            assert agent.staging is not None
            root = agent.staging
            (root / "5-1-7").mkdir()
            monkeypatch.setattr(staging_memory.shutil, "rmtree", slowly)
            began = time.monotonic()
            agent.handle(pb.Command(drop_staging=pb.DropStaging()))
            await asyncio.sleep(0)
            took = time.monotonic() - began
            assert not (root / "5-1-7").exists()
            while [*root.iterdir()]:
                await asyncio.sleep(0.01)
            monkeypatch.undo()
            return took

    assert asyncio.run(drop()) < 0.25

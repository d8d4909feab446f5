"""The agent's side of snapshots: which process inherits, what is refused before any process starts, when it gives
up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrecovery.agent.processes import snapshots
from flashrecovery.agent.processes.snapshots import SHORT_LIVES, NodeSnapshots
from flashrecovery.config import RunConfig, SnapshotSettings
from flashrecovery.errors import ConfigError
from flashrecovery.snapshot import client
from flashrecovery.snapshot.address import SNAPSHOT_ENV, name_for
from flashrecovery.snapshot.client import Keeper, SnapshotHost
from flashrecovery.snapshot.files import FOLDER
from flashrecovery.snapshot.memory import SharedMemory


def config(*, resume: bool = False, nodes: int = 1, keep: str = "auto") -> RunConfig:
    several = {"nnodes": nodes, "controller": "127.0.0.1:29400"} if nodes > 1 else {}
    return RunConfig.model_validate(
        {"resume": resume, "snapshots": SnapshotSettings.model_validate({"keep": keep}), **several}
    )


@pytest.fixture
def ended() -> Iterator[Callable[[Path], None]]:
    """Whatever process is left for a directory ends."""
    paths: list[Path] = []
    yield paths.append
    for path in paths:
        found = SnapshotHost.find(name_for(path))
        if found is not None:
            found.end()


def left_by_an_earlier_launch(path: Path) -> SnapshotHost:
    """It holds version 7 of rank 0, and its agent is gone."""
    host = SnapshotHost.start(name_for(path), path / "log", None, 60.0)
    made = SharedMemory.create(10, notes=True)
    made.version = 7
    Keeper(name_for(path), 0).keep("own-0-of-1", made)
    assert [one.version for one in host.held()] == [7]
    return host


def versions(path: Path, rank: int = 0) -> list[int]:
    return [memory.version for memory in Keeper(name_for(path), rank).left().values()]


def test_what_an_earlier_launch_holds_is_not_lost_without_a_word(tmp_path: Path, ended: Callable[[Path], None]) -> None:
    ended(tmp_path)
    left_by_an_earlier_launch(tmp_path)
    with pytest.raises(ConfigError, match="holds snapshots of version 7, and it would be lost: give --resume"):
        NodeSnapshots(config(), tmp_path, print)
    assert versions(tmp_path) == [7]
    found = NodeSnapshots(config(resume=True), tmp_path, print)
    found.filled(0, detached=False, was_here=False)
    assert versions(tmp_path) == [7] and found.env() == {SNAPSHOT_ENV: name_for(tmp_path)}


def test_an_agent_that_comes_back_to_a_running_job_gives_them_up(
    tmp_path: Path, ended: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    ended(tmp_path)
    left_by_an_earlier_launch(tmp_path)
    NodeSnapshots(config(nodes=2), tmp_path, print)
    assert versions(tmp_path) == [] and "dropped" in caplog.text


@pytest.mark.parametrize(
    ("detached", "was_here", "resume", "inherits"),
    [
        (True, True, False, True),  # the replacement of a rank of this node
        (True, False, False, False),  # a rank that comes from another node
        (True, False, True, False),
        (False, True, False, False),  # everything starts again
        (False, False, True, True),  # a launch that goes on
    ],
)
def test_who_inherits(
    detached: bool, was_here: bool, resume: bool, inherits: bool, tmp_path: Path, ended: Callable[[Path], None]
) -> None:
    ended(tmp_path)
    node = NodeSnapshots(config(resume=resume), tmp_path, print)
    for rank in (0, 1):
        made = SharedMemory.create(10, notes=True)
        made.version = 3
        Keeper(name_for(tmp_path), rank).keep("own-0-of-2", made)
    node.filled(0, detached=detached, was_here=was_here)
    assert versions(tmp_path, 0) == ([3] if inherits else []) and versions(tmp_path, 1) == [3]
    node.placed([0, 1])
    assert versions(tmp_path, 1) == [3], "which this node has never filled"
    node.filled(1, detached=True, was_here=True)
    node.placed([1])
    assert versions(tmp_path, 1) == []


def test_never_is_never(tmp_path: Path) -> None:
    node = NodeSnapshots(config(keep="never"), tmp_path, print)
    assert node.env() == {} and node.pid is None and SnapshotHost.find(name_for(tmp_path)) is None
    node.revive()
    node.forget(None)


def test_a_process_that_dies_at_once_is_not_started_for_ever(
    tmp_path: Path, ended: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One death, however soon, may be chance; a long life makes the count begin again."""
    ended(tmp_path)
    said: list[str] = []
    node = NodeSnapshots(config(), tmp_path, said.append)

    def dies(*, soon: bool) -> None:
        monkeypatch.setattr(snapshots, "SHORT_LIFE_S", 60.0 if soon else 0.0)
        before = node.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_for_death(node, said, len(said) + 1)
        assert node.pid != before

    for _ in range(SHORT_LIVES - 1):
        dies(soon=True)
    dies(soon=False)
    for _ in range(SHORT_LIVES - 1):
        dies(soon=True)
    assert node.pid is not None and all("was restarted" in text for text in said)
    dies(soon=True)
    assert node.pid is None and "no snapshots from now on" in said[-1]
    count = len(said)
    node.revive()
    assert len(said) == count


def test_a_process_that_stands_still_holds_nobody_up(
    tmp_path: Path, ended: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed rather than believed to have forgotten."""
    ended(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(snapshots, "SHORT_LIFE_S", 0.0)
    monkeypatch.setattr(client, "_RANK_WAITS_S", 0.2)
    node = NodeSnapshots(config(), tmp_path, said.append)
    first = node.pid
    assert first is not None
    keeper = Keeper(name_for(tmp_path), 0)
    os.kill(first, signal.SIGSTOP)
    assert keeper.left() == {}
    node.filled(0, detached=True, was_here=False)
    wait_for_death(node, said, 1)
    assert node.pid not in (None, first)
    keeper.check()
    made = SharedMemory.create(10, notes=True)
    made.version = 3
    keeper.keep("own-0-of-1", made)
    assert versions(tmp_path) == [3]


def wait_for_death(node: NodeSnapshots, said: list[str], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(said) < count:
        assert time.monotonic() < deadline
        node.revive()
        time.sleep(0.01)


@pytest.mark.parametrize("unfinished", [False, True])
def test_what_a_job_has_gone_on_from_goes_when_it_comes_to_its_end(
    unfinished: bool, tmp_path: Path, ended: Callable[[Path], None]
) -> None:
    ended(tmp_path)
    host = left_by_an_earlier_launch(tmp_path)
    assert host.save(tmp_path / FOLDER) == ([7], "")
    host.end()
    found = NodeSnapshots(config(resume=True), tmp_path, print)
    asyncio.run(found.end(unfinished=unfinished))
    assert (tmp_path / FOLDER).exists() is unfinished

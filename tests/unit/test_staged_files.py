"""State in a node's memory: what is not alike is not written as if it were, and no process removes what another
uses."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashrecovery.agent.stores.staging_memory import StagingMemory
from flashrecovery.errors import RestoreError
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.logical import DATA, LogicalPart, ShardParts
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.staged_files import StagedFiles, write
from flashrecovery.runtime.environment import STAGING_ENV
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec
from flashrecovery.worker.reshard.relayout import RankStaging
from tests.unit.test_logical import STATE, shard, whole

# -- what is written --------------------------------------------------------------------------------


def counted(name: str, rank: int, steps: float) -> tuple[ShardSource, ShardParts]:
    """A parameter that has taken that many steps."""
    source, parts = shard(name, rank, 2, 0, whole())
    keys = list(source.spec.tensors)
    tensors = [torch.tensor(steps) if key == "state/step" else t for key, t in zip(keys, source.tensors, strict=True)]
    return ShardSource(source.name, source.spec, tensors), parts


def test_parameters_that_have_taken_different_numbers_of_steps(tmp_path: Path) -> None:
    """In another layout there is one number for all of them."""
    made = [counted("rows", 0, 7.0), counted("columns", 0, 5.0)]
    described = {source.name: parts for source, parts in made}
    with pytest.raises(RestoreError, match=r"another 'state/step' than others"):
        write(tmp_path, 0, 3, [source for source, _ in made], described, b"")
    assert not list(tmp_path.glob("*.index"))


def test_what_ranks_have_to_have_alike_is_said(tmp_path: Path) -> None:
    said = []
    for rank, steps in enumerate((7.0, 5.0, 7.0)):
        source, parts = counted("rows", min(rank, 1), steps)
        said.append(write(tmp_path, rank, 3, [source], {source.name: parts}, b"").numbers)
    buffer = ShardSource("weights", ShardSpec({DATA: TensorSpec((3,), torch.float32)}), [torch.ones(3)])
    own = ShardParts("", STATE, (LogicalPart("rows", (3,), Box((0,), (3,)), 0),))
    said.append(write(tmp_path, 3, 3, [buffer], {"weights": own}, b"").numbers)
    assert not said[3]  # weights are each rank's own
    assert [*said[0]] == ["optimizer.state.step"] and said[0] == said[2] != said[1]


def test_what_two_write_of_a_shard_can_be_compared(tmp_path: Path) -> None:
    """Each rank of the new layout reads the nearer one's: they must not differ by a bit."""

    def said(rank: int, change: int = 0, *, turned: bool = False) -> str:
        source, parts = shard("rows", 1, 2, 0, whole())
        tensors = [tensor.clone() for tensor in source.tensors]
        tensors[-1].reshape(-1)[-1:].view(torch.uint8)[0] ^= change
        spec = source.spec
        if turned:
            spec, tensors = ShardSpec(dict([*spec.tensors.items()][::-1]), spec.values), tensors[::-1]
        written = write(tmp_path, rank, 3, [ShardSource(source.name, spec, tensors)], {source.name: parts}, b"")
        assert [*written.shards] == [source.name]
        return written.shards[source.name]

    assert said(0) == said(1) == said(2, turned=True) != said(3, 1)


def test_a_worker_says_what_it_has_written_of_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGING_ENV, str(tmp_path))
    source, parts = shard("rows", 0, 2, 0, whole())
    own_staging = object.__new__(RankStaging)
    own_staging._registry = SimpleNamespace(rank=0, members=(0,), common=SimpleNamespace(at=lambda version: None))  # type: ignore[assignment]
    own_staging._described, own_staging._sharded = {source.name: parts}, ()
    order = pb.Stage(version=3, directory="5-1-3", items=[pb.StagingItem(shard=source.name)])
    _, alike = own_staging.write(order, lambda item, version: source, 1)
    assert alike[f"shard {source.name!r}"] and (tmp_path / "5-1-3" / "rank0.index").exists()


def test_a_rank_of_a_smaller_job_writes_under_the_number_that_the_controller_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 0, ranks 0 and 1, has left: rank 3 is counted as the second one in the groups, and is rank 3 for what
    asks for what it has written."""
    monkeypatch.setenv(STAGING_ENV, str(tmp_path))
    source, parts = shard("rows", 0, 2, 0, whole())
    own_staging = object.__new__(RankStaging)
    own_staging._registry = SimpleNamespace(rank=1, members=(2, 3), common=SimpleNamespace(at=lambda version: b""))  # type: ignore[assignment]
    own_staging._described, own_staging._sharded = {source.name: parts}, ()
    own_staging.write(
        pb.Stage(version=3, directory="5-1-3", items=[pb.StagingItem(shard=source.name)]), lambda *_: source, 1
    )
    assert StagedFiles(tmp_path / "5-1-3", [3], 3).indexes[3].tensors


# -- the directory ----------------------------------------------------------------------------------


def hold(root: Path, say: multiprocessing.connection.Connection) -> None:
    memory = StagingMemory(root)
    (memory.path / "1-7").mkdir()
    say.send(str(memory.path))
    signal.pause()


def test_nobody_removes_what_a_living_agent_has(tmp_path: Path) -> None:
    """Not even one that cannot see its process, as in another container; and what a killed one leaves is removed."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, there))
    process.start()
    try:
        living = Path(here.recv())
        elsewhere = living.rename(living.with_name(living.name.replace(f"-{process.pid}-", "-999999-")))
        StagingMemory(tmp_path).close()
        assert (elsewhere / "1-7").exists()
    finally:
        process.kill()
        process.join()
    mine = StagingMemory(tmp_path)
    assert [*tmp_path.iterdir()] == [mine.path] and mine.env() == {STAGING_ENV: str(mine.path)}
    (mine.path / "1-7").mkdir()
    (mine.path / "1-7" / "rank0.data").write_bytes(b"state")
    give_back = mine.drop()
    assert not [*mine.path.glob("[!.]*")]  # at once, and before anything is removed
    (mine.path / "2-7").mkdir()
    give_back()
    assert [*mine.path.iterdir()] == [mine.path / "2-7"]
    mine.drop()()
    mine.drop()()
    assert not [*mine.path.iterdir()]
    mine.close()
    mine.close()
    assert not [*tmp_path.iterdir()] and os.access(tmp_path, os.W_OK)

"""Neighbour copies between real processes: what is held where, when, and that it is exact."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery.errors import ProtocolError, RestoreError, StepInterrupted
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.peer_exchange import CopyContext
from flashrecovery.snapshot import memory
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from tests.support.ranks import results, run_ranks


class Owned(Shard):
    """A shard whose content says whose it is and at which version; optimizer state appears with the first
    step.
    """

    def __init__(self, name: str, owner: int, numel: int, holders: tuple[int, ...]) -> None:
        self.name = name
        self.owner = owner
        self.numel = numel
        self.holders = holders
        self.live: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}
        self.advance(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def values(self) -> dict[str, Any]:
        return self.extra

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        self.live = {k: torch.empty(t.shape, dtype=t.dtype) for k, t in spec.tensors.items()}
        self.extra = dict(spec.values)
        return self.live

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        first = torch.arange(self.numel, dtype=torch.float32) + 1000.0 * version + 0.001 * self.owner
        state = {} if version == 0 else {"avg": first.to(torch.bfloat16), "step": torch.tensor(float(version))}
        return {"param": first, **state}

    def advance(self, version: int) -> None:
        """Become ``version``, in place where that is possible."""
        for key, value in self.expected(version).items():
            if key in self.live:
                self.live[key].copy_(value)
            else:
                self.live[key] = value
        self.extra = {"count": version}


def shards_of(rank: int, world: int, numel: int = 5000) -> list[Owned]:
    """Two unique shards of different size, and a replicated one that only the undo copy keeps."""
    everyone = tuple(range(world))
    return [
        Owned("norm", 99, 7, everyone),
        Owned(f"w#{rank}", rank, numel + rank, (rank,)),
        Owned(f"bias#{rank}", rank, rank, (rank,)),  # empty on rank 0
    ]


def check(copies: NeighbourCopies, owner: int, version: int, world: int, numel: int = 5000) -> None:
    """What is held for ``owner`` at ``version`` is exact."""
    for shard in shards_of(owner, world, numel):
        if shard.holders == (owner,):
            source = copies.source(shard.name, version)
            assert source.spec.values == {"count": version}
            expected = shard.expected(version)
            assert list(source.spec.tensors) == list(expected)
            for key, tensor in zip(source.spec.tensors, source.tensors, strict=True):
                assert torch.equal(tensor, expected[key]) and tensor.dtype == expected[key].dtype, (
                    version,
                    key,
                )
    local_state = copies.source(f"capsule@{owner}", version).tensors[0]
    assert local_state.numpy().tobytes() == local_state_of(owner, version)


def on_hosts(apart: bool, rank: int) -> None:
    """Let the ranks take each other for processes of other hosts, so that copies are sent."""
    if apart:
        memory.host_id = lambda: rank


def local_state_of(rank: int, version: int) -> bytes:
    return f"{rank}:{version}".encode() * (version % 3)


def _steady(rank: int, world: int, shift: int, apart: bool) -> int:
    on_hosts(apart, rank)
    mine = shards_of(rank, world)
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world, shift), mine)
    owner = (rank - shift) % world
    assert (copies.source_rank, copies.destination) == (owner, (rank + shift) % world)
    memory = 0
    for version in range(6):
        copies.commit(version, local_state_of(rank, version))
        copies.wait()
        held = copies.holdings()
        assert sorted({h.version for h in held}) == sorted({max(0, version - 1), version})
        assert {h.shard for h in held} == {f"w#{owner}", f"bias#{owner}", f"capsule@{owner}"}
        check(copies, owner, version, world)
        if version:
            check(copies, owner, version - 1, world)
        if version >= 3:
            assert copies.nbytes() == memory  # reused
        memory = copies.nbytes()
        dist.barrier()  # an owner that goes on overwrites its older version, which its neighbour only looks at
        copies.before_mutation()
        for shard in mine:
            shard.advance(version + 1)
    assert copies.undo.versions() == [4, 5]
    assert all((s.nbytes > 0) is apart for s in copies._slots)
    with pytest.raises(RestoreError, match=f"at version 3; it holds versions \\[4, 5\\] of rank {owner}"):
        copies.source(f"w#{owner}", 3)
    assert "survives" in copies.describe() and f"to rank {copies.destination}" in copies.describe()
    copies.close()
    assert "flashrecovery-neighbour" not in {t.name for t in threading.enumerate()}
    return memory


APART = pytest.mark.parametrize("apart", [False, True], ids=["one-host", "apart"])


@APART
@pytest.mark.parametrize(("world", "shift"), [(2, 1), (3, 1), (4, 2)])
def test_two_versions_are_held_exactly(tmp_path: Path, world: int, shift: int, apart: bool) -> None:
    results(run_ranks(_steady, world, tmp_path, shift, apart))


def _overlap(rank: int, world: int, apart: bool) -> tuple[float, float]:
    """Commit returns at once; a mutation right after ``before_mutation`` does not reach the copy."""
    on_hosts(apart, rank)
    numel = 4 << 20
    mine = shards_of(rank, world, numel)
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world), mine)
    committed, waited = 0.0, 0.0
    for version in range(4):
        began = time.monotonic()
        copies.commit(version, local_state_of(rank, version))
        committed = max(committed, time.monotonic() - began)
        copies.before_mutation()
        for shard in mine:
            shard.advance(version + 1)
        began = time.monotonic()
        copies.wait()
        waited = max(waited, time.monotonic() - began)
        check(copies, (rank - 1) % world, version, world, numel)
    dist.barrier()
    copies.close()
    return committed, waited


@APART
def test_a_mutation_after_the_snapshot_does_not_reach_the_copies(tmp_path: Path, apart: bool) -> None:
    results(run_ranks(_overlap, 2, tmp_path, apart))


def _again(rank: int, world: int, apart: bool) -> None:
    """After a recovery to 4 all commit 4 again: the whole copies of 4 are never given up for it."""
    on_hosts(apart, rank)
    mine = shards_of(rank, world)
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world), mine)
    for version in range(6):
        for shard in mine:
            shard.advance(version)
        copies.commit(version, local_state_of(rank, version))
        copies.wait()
    copies.halt(1.0)
    with pytest.raises(StepInterrupted):
        copies.wait()
    copies.reset(1, 4)
    owner = (rank - 1) % world
    assert {h.version for h in copies.holdings()} == {4} and copies.undo.versions() == [4]
    for shard in mine:
        copies.undo.restore(4, shard)
        assert all(torch.equal(shard.live[k], v) for k, v in shard.expected(4).items())
    before = [copies.source(f"w#{owner}", 4).tensors[0].data_ptr()]
    copies.commit(4, local_state_of(rank, 4))
    copies.wait()
    assert copies.source(f"w#{owner}", 4).tensors[0].data_ptr() in [
        *before,
        *(s.buffer.data_ptr() for s in copies._slots),
    ]
    assert sorted(s.version for s in copies._slots) == ([4, 4] if apart else [-1, 4])
    for shard in mine:
        shard.advance(5)
    copies.commit(5, local_state_of(rank, 5))
    copies.wait()
    assert sorted(s.version for s in copies._slots) == [4, 5]
    check(copies, owner, 5, world)
    dist.barrier()  # a process that ends may cut off what it has just sent
    copies.close()


@APART
def test_the_same_version_again_after_a_recovery(tmp_path: Path, apart: bool) -> None:
    results(run_ranks(_again, 3, tmp_path, apart))


def _disagree(rank: int, world: int) -> str:
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world), shards_of(rank, world))
    copies.commit(rank, b"")
    try:
        copies.wait()
    except (ProtocolError, RuntimeError) as e:  # the other rank may have left already, for the same reason
        assert not copies.holdings()
        return str(e) if isinstance(e, ProtocolError) else "peer"
    return "no error"


def test_another_version_than_ones_own_is_refused(tmp_path: Path) -> None:
    texts = results(run_ranks(_disagree, 2, tmp_path))
    assert any("was expected" in text for text in texts) and "no error" not in texts


def test_a_map_that_is_no_permutation_is_refused() -> None:
    for wrong in ((0, 0, 0, 0), (0, 1, 2, 3)):
        with pytest.raises(ValueError, match="not a permutation"):
            Ring(0, (0, 1, 2, 3), wrong)


def _close_at_once(rank: int, world: int) -> bool:
    """The end of a job: close right after the last commit, one rank late. No rank is left waiting in an operation."""
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world), shards_of(rank, world, 1 << 20))
    copies.commit(0, b"local_state")
    if rank == 1:
        time.sleep(0.2)
    return copies.close(20.0)


def test_closing_lets_the_last_exchange_end_on_all_ranks(tmp_path: Path) -> None:
    assert results(run_ranks(_close_at_once, 3, tmp_path)) == [True] * 3


def _torn(rank: int, world: int) -> list[int]:
    """Rank 0 begins to overwrite version 0, and dies: its neighbour may not take that memory for version 0."""
    mine = shards_of(rank, world)
    copies = NeighbourCopies(CopyContext(dist.group.WORLD), Ring.of_world(rank, world), mine)
    for version in range(2):
        copies.commit(version, local_state_of(rank, version))
        copies.wait()
        copies.before_mutation()
        for shard in mine:
            shard.advance(version + 1)
    assert sorted({h.version for h in copies.holdings()}) == [0, 1]
    dist.barrier()
    if rank == 0:
        oldest = min(copies.undo._slots.values(), key=lambda s: s.version)
        oldest.version = -1
        oldest.buffer.zero_()
        dist.barrier()
        os._exit(0)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # rank 0 is gone; its memory is not
        assert sorted({h.version for h in copies.holdings()}) == [1]
        check(copies, 0, 1, world)
    return sorted({h.version for h in copies.holdings()})


def test_the_memory_of_a_dead_owner_says_what_is_whole_in_it(tmp_path: Path) -> None:
    found = run_ranks(_torn, 3, tmp_path)
    assert [r.value for r in found[1:]] == [[1], [0, 1]]

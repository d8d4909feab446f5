"""Copies are held back while training communicates, and never longer than training can do without them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import StepInterrupted
from flashrecovery.groups.pace import PacedNetwork
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.peer_exchange import CopyContext
from flashrecovery.snapshot import memory
from tests.integration.redundancy.test_neighbour import check, local_state_of, shards_of
from tests.support.groups_ranks import run_ranks

NUMEL = 4 << 20
"""Of a shard, 4 bytes each: more than the buffers of a connection hold."""
SOON_S = 20.0
NEW = 3
"""The version that the tests look at: the first that is sent from memory that has been refused."""


class Pair:
    """One of two ranks that take each other for processes of other hosts, after the first copies."""

    def __init__(self, rank: int, size: int, store: dist.Store, window_s: float) -> None:
        groups.install()
        dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
        memory.host_id = lambda: rank
        group = groups.create_control_group("copies")
        assert group is not None
        self.rank, self.peer = rank, 1 - rank
        self.network = PacedNetwork()
        self.shards = shards_of(rank, size, NUMEL)
        self.copies = NeighbourCopies(CopyContext(group, network=self.network), Ring.of_world(rank, size), self.shards)
        for version in range(NEW):  # new memory is offered first
            self.commit(version)
            self.copies.wait()
            self.copies.before_mutation()
        assert self.copies._talk.pacing is not None
        self.copies._talk.pacing._windows.clear()
        self.copies._talk.pacing._windows.append(window_s)
        self.copies._talk.pacing._rates.clear()
        dist.barrier()

    def commit(self, version: int) -> None:
        for shard in self.shards:
            shard.advance(version)
        self.copies.commit(version, local_state_of(self.rank, version))

    def has(self, version: int) -> bool:
        """Whether this rank holds the peer's copy."""
        return any(held.version == version for held in self.copies.holdings())

    def close(self) -> None:
        dist.barrier()
        self.copies.close()
        dist.destroy_process_group()


def _soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def _held(rank: int, size: int, store: dist.Store) -> None:
    pair = Pair(rank, size, store, window_s=3 * SOON_S)
    reduced = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(reduced, async_op=True)
        pair.commit(NEW)
        _soon(lambda: pair.has(NEW))  # rank 1 communicates with no one
        store.set("rank 0 has it", "")
        work.wait()
    else:
        pair.commit(NEW)
        store.get("rank 0 has it")
        time.sleep(0.2)
        assert not pair.has(NEW)
        dist.all_reduce(reduced)
    _soon(lambda: pair.has(NEW))  # no one has waited for it
    pair.copies.wait()
    assert (pair.network.held_s() > 0.1) is (rank == 0)
    assert reduced.eq(2).all()
    check(pair.copies, pair.peer, NEW, size, NUMEL)
    pair.close()


def test_a_copy_waits_for_the_end_of_a_collective() -> None:
    run_ranks(2, _held)


def _needed(rank: int, size: int, store: dist.Store) -> None:
    pair = Pair(rank, size, store, window_s=100 * SOON_S)
    reduced = torch.ones(4)
    work = dist.all_reduce(reduced, async_op=True) if rank == 0 else None
    pair.commit(NEW)
    pair.copies.wait()  # rank 1 comes to the collective only when it has the copy
    if work is None:
        dist.all_reduce(reduced)
    else:
        assert pair.network.held_s() < SOON_S
        work.wait()
    check(pair.copies, pair.peer, NEW, size, NUMEL)
    pair.close()


def test_a_copy_that_training_waits_for_is_not_held_back() -> None:
    run_ranks(2, _needed)


def _over(rank: int, size: int, store: dist.Store) -> None:
    """Rank 0 waits in a collective for rank 1, which waits for rank 0's copy: the end of the window resolves it."""
    pair = Pair(rank, size, store, window_s=1.0)
    reduced = torch.ones(4)
    work = dist.all_reduce(reduced, async_op=True) if rank == 0 else None
    pair.commit(NEW)
    if work is None:
        pair.copies.wait()
        dist.all_reduce(reduced)
    else:
        work.wait()
        assert pair.network.held_s() > 0.5
        pair.copies.wait()
    check(pair.copies, pair.peer, NEW, size, NUMEL)
    pair.close()


def test_two_ranks_do_not_wait_for_each_other_because_of_it() -> None:
    run_ranks(2, _over)


def _receiving(rank: int, size: int, store: dist.Store) -> None:
    pair = Pair(rank, size, store, window_s=100 * SOON_S)
    message = torch.zeros(4)
    work = dist.irecv(message, src=1) if rank == 0 else None
    pair.commit(NEW)
    _soon(lambda: pair.has(NEW))
    store.set(f"{rank} has it", "")
    store.get(f"{1 - rank} has it")  # what rank 1 does next would hold back the rest of its own copy
    if work is None:
        dist.send(torch.ones(4), dst=0)
    else:
        work.wait()
        assert pair.network.held_s() < 1 and message.eq(1).all()
    pair.close()


def test_who_only_waits_for_a_message_does_not_hold_it_back() -> None:
    run_ranks(2, _receiving)


def _abandoned(rank: int, size: int, store: dist.Store) -> None:
    pair = Pair(rank, size, store, window_s=100 * SOON_S)
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    pair.commit(NEW)
    store.set(f"committed by {rank}", "")
    store.get(f"committed by {1 - rank}")
    time.sleep(0.2)
    groups.abandon("a test")
    pair.copies.halt(SOON_S)
    assert pair.copies.undo.versions() == [NEW - 1, NEW]
    if rank == 1:
        assert not pair.has(NEW) and pair.has(NEW - 1)
        assert isinstance(pair.copies.error, dist.DistError | StepInterrupted)
    groups.drain(SOON_S)
    groups.detach_all()
    pair.copies.undo.close()


def test_an_abort_ends_what_is_held_back() -> None:
    run_ranks(2, _abandoned)

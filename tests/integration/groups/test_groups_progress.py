"""What a rank can say of itself while it stands still: how far it has come in each group, and where it waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.worker.control.control_thread import hang_report
from tests.support.groups_ranks import run_ranks

_LATE_S = 0.4


def _counts(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    pair = dist.new_group([0, 2])
    world = groups.groups()[0]
    before = world.progress.collectives
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert world.progress == groups.GroupProgress(before + 3, {})
    peer = 2 - rank
    if rank != 1:
        dist.all_reduce(torch.ones(1), group=pair)
        send = dist.isend(torch.ones(1), peer)
        dist.recv(torch.ones(1), peer)
        send.wait()
        assert world.progress.pairs == {peer: (1, 1)}
        work = dist.irecv(torch.ones(1), peer)
        (op,) = world.pending
        assert (op.op, op.peer, op.number, op.certain) == ("recv", peer, 1, False)
        told = hang_report(rank, threading.main_thread())
        assert [(o.op, o.peer, o.number) for o in told.operations] == [("recv", peer, 1)] and "_counts" in told.stack
        by_name = {g.group: g for g in told.groups}
        assert (by_name["0"].size, by_name["0"].collectives) == (size, before + 3)
        assert [(p.peer, p.sent, p.received) for p in by_name["0"].pairs] == [(peer, 1, 2)]
        (of_pair,) = (g for g in told.groups if g.size == 2)
        assert of_pair.collectives == 1 and of_pair.members != by_name["0"].members
        dist.send(torch.ones(1), peer)
        work.wait()
    if rank == 0:
        barrier = dist.barrier(async_op=True)
        (op,) = world.pending
        assert (op.op, op.peer, op.number, op.certain) == ("barrier", groups.EVERYBODY, before + 3, True)
        assert hang_report(rank, threading.main_thread()).stack == ""
        store.set("seen", "")
        barrier.wait()
    else:
        store.wait(["seen"])
        dist.barrier()
    groups.abandon("as if a rank had died")
    assert groups.drain(20.0).quiet
    groups.detach_all()
    groups.attach(store, 1, 60.0)
    assert world.progress == groups.GroupProgress(0, {})
    dist.barrier()  # its end closes connections that a peer may still be making


def test_ranks_say_how_far_they_have_come() -> None:
    run_ranks(3, _counts)


def _underway(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)

    turns = itertools.count()

    def seconds(
        body: Callable[[], None], late: Callable[[], None], beside: Callable[[int], None] | None = None
    ) -> tuple[float, float]:
        """Under way in ``body``, to which rank 1 comes when ``late`` returns; and those that it has taken. ``beside``
        runs on rank 0 meanwhile, and is given the nanoseconds so far."""
        dist.barrier()
        before = groups.underway_ns()
        if rank == 1:
            late()
        elif beside is not None:
            threading.Thread(target=beside, args=[before]).start()
        entered = time.monotonic()
        body()
        return (groups.underway_ns() - before) / 1e9, time.monotonic() - entered

    def until_rank_0_has_waited(body: Callable[[], None]) -> None:
        """However slow the machine is, both ranks' clocks are compared with what has happened."""
        key = f"rank 0 waits {next(turns)}"

        def watch(before: int) -> None:
            while groups.underway_ns() - before < 1e9 * _LATE_S:
                time.sleep(0.005)
            store.set(key, "")

        waited, taken = seconds(body, lambda: store.wait([key]), watch)
        assert (_LATE_S if rank == 0 else 0) <= waited <= taken, f"{key}: {waited:.2f} of {taken:.2f} s on rank {rank}"

    def overlapping() -> None:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
        for work in works:
            work.wait()

    def in_a_thread() -> None:
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        thread.join()

    def from_the_late_one() -> None:
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        else:
            dist.send(torch.ones(1), 0)

    until_rank_0_has_waited(overlapping)
    until_rank_0_has_waited(from_the_late_one)
    assert seconds(in_a_thread, lambda: time.sleep(_LATE_S))[0] == 0, "not the training thread's"
    assert seconds(lambda: None, lambda: time.sleep(_LATE_S))[0] == 0, "nothing is left under way"
    dist.barrier()


def test_who_waits_has_operations_under_way_and_who_is_late_has_not() -> None:
    run_ranks(2, _underway)

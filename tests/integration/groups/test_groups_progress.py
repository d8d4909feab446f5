"""What a rank can say of itself while it stands still: how far it has come in each group, and where it waits."""

from __future__ import annotations

import threading
import time

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


def test_ranks_say_how_far_they_have_come() -> None:
    run_ranks(3, _counts)


def _underway(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)

    def seconds(body) -> float:  # type: ignore[no-untyped-def]
        """Under way in ``body``, to which rank 1 comes late."""
        dist.barrier()
        before = groups.underway_ns()
        if rank == 1:
            time.sleep(_LATE_S)
        body()
        return (groups.underway_ns() - before) / 1e9

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

    waits = {name: seconds(body) for name, body in (("all", overlapping), ("pair", from_the_late_one))}
    for name, waited in waits.items():
        expected = 0.8 * _LATE_S < waited < 4 * _LATE_S if rank == 0 else waited < 0.8 * _LATE_S
        assert expected, f"{name}: {waited:.2f} s on rank {rank}"
    assert seconds(in_a_thread) < 0.5 * _LATE_S, "not the training thread's"
    assert seconds(lambda: None) < 0.5 * _LATE_S, "nothing is left under way"
    dist.barrier()


def test_who_waits_has_operations_under_way_and_who_is_late_has_not() -> None:
    run_ranks(2, _underway)

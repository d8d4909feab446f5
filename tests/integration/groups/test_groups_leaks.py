"""Groups that are exchanged again and again use no more than before: descriptors, threads, maps, memory."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flashrecovery import groups
from flashrecovery.groups.native_build import native
from tests.support.groups_ranks import run_ranks
from tests.support.leaks import Growth, Usage

EXCHANGES = 150


def _exchange(rank: int, size: int, store: Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    other = dist.new_group([0, 1])
    seen = Growth()
    for number in range(EXCHANGES):
        dist.all_reduce(torch.ones(1000))
        left = dist.all_reduce(torch.ones(10), group=other, async_op=True)
        groups.abandon("again")
        assert groups.drain(20).quiet
        del left
        groups.detach_all()
        groups.attach(store, number, 60)
        assert native().wait_buried(datetime.timedelta(seconds=20))
        seen.look("rank", number, Usage.at_rest(os.getpid()))
    dist.barrier()  # its end closes connections that a peer may still be making
    print(seen.table())
    assert seen.judged() and not seen.leaks(), "\n".join([*seen.leaks(), seen.table()])


def test_exchanged_groups_leave_nothing() -> None:
    for text in run_ranks(2, _exchange, 150):
        print(text)

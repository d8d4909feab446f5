"""The recovery's own groups: they do what gloo does, connect only ranks that talk, and every wait can be ended."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from tests.support.groups_ranks import connections, run_ranks

MANY = 8 << 20
"""Bytes that do not fit into the buffers of a connection."""


def _group(rank: int, size: int, store: dist.Store) -> dist.ProcessGroup:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    group = groups.control_group()
    assert group is not None
    _together(store, rank, size)
    return group


def _together(store: dist.Store, rank: int, size: int) -> None:
    """A rank that abandons its groups closes connections that a peer may still be making."""
    store.set(f"connected {rank}", "")
    store.wait([f"connected {r}" for r in range(size)])


def _numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6) + 10 * rank).to(dtype).reshape(2, 3)


def _collectives(rank: int, size: int, store: dist.Store) -> None:
    group = _group(rank, size, store)
    for turn in range(20):
        late = random.Random(f"{turn} {rank}").random() / 50
        time.sleep(late)
        came = time.monotonic()
        group.barrier().wait()
        left = time.monotonic()
        moments = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
        dist.all_gather(moments, torch.tensor([came, left], dtype=torch.float64), group=group)
        assert min(m[1].item() for m in moments) >= max(m[0].item() for m in moments)
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        rows = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(rows, _numbers(rank, dtype), group=group)
        assert all(torch.equal(row, _numbers(r, dtype)) for r, row in enumerate(rows))
    told: list[object] = [None] * size
    dist.all_gather_object(told, {"rank": rank, "much": "x" * (rank + 1) * (MANY // size)}, group=group)
    assert [(t["rank"], len(t["much"])) for t in told] == [(r, (r + 1) * (MANY // size)) for r in range(size)]  # type: ignore[index]
    total, most = torch.tensor([rank, -rank]), torch.tensor([rank, -rank])
    dist.all_reduce(total, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    assert total.tolist() == [sum(range(size)), -sum(range(size))] and most.tolist() == [size - 1, 0]
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_collectives_do_what_they_say(size: int) -> None:
    run_ranks(size, _collectives)


def _sparse(rank: int, size: int, store: dist.Store) -> None:
    group = _group(rank, size, store)
    dist.barrier()
    before = connections()
    dist.barrier()
    mine, theirs = torch.tensor([rank]), torch.tensor([-1])
    sent = group.send([mine], (rank + 1) % size, 3)
    group.recv([theirs], (rank - 1) % size, 3).wait()
    sent.wait()
    assert theirs.item() == (rank - 1) % size
    dist.barrier()
    assert connections() - before == 2, "one to the next rank, one from the rank before"
    dist.barrier()
    group.barrier().wait()
    group.barrier().wait()
    dist.barrier()
    assert connections() - before == 2 + 2 * 3, "log2(8) to others, and from as many"
    dist.barrier()
    dist.destroy_process_group()


def test_only_ranks_that_talk_are_connected() -> None:
    run_ranks(8, _sparse)


def _messages(rank: int, size: int, store: dist.Store) -> None:
    group = _group(rank, size, store)
    peer = 1 - rank
    first, second, large = torch.tensor([rank + 1.0]), torch.tensor([rank + 10.0]), torch.full((MANY,), rank).byte()
    # Both send more than fits before either receives; the tags keep the three apart, in whatever order they are taken.
    works = [group.send([large], peer, 1), group.send([first], peer, 2), group.send([second], peer, 2)]
    got, more, much = torch.zeros(1), torch.zeros(1), torch.zeros(MANY, dtype=torch.uint8)
    group.recv([got], peer, 2).wait()
    group.recv([more], peer, 2).wait()
    assert (got.item(), more.item()) == (peer + 1.0, peer + 10.0)
    group.recv([much], peer, 1).wait()
    assert bool((much == peer).all())
    for work in works:
        work.wait()
    empty = torch.empty(0)
    works = [group.send([empty], peer, 4), group.recv([empty], peer, 4)]
    for work in works:
        work.wait()
    dist.destroy_process_group()


def test_messages_of_one_tag_are_in_order_and_others_pass_them() -> None:
    run_ranks(2, _messages)


def _refused(rank: int, size: int, store: dist.Store) -> None:
    group = _group(rank, size, store)
    there = torch.zeros(4)
    for call, words in [
        (lambda: group.send([there], rank, 0), f"no peer has rank {rank}"),
        (lambda: group.send([there], size, 0), f"no peer has rank {size}"),
        (lambda: group.recv([there], 1 - rank, -1), "tag -1: 0 or more"),
        (lambda: group.send([there[::2]], 1 - rank, 0), "one contiguous tensor in host memory"),
        (lambda: dist.all_reduce(there, op=dist.ReduceOp.MIN, group=group), "SUM and MAX"),
        (lambda: dist.broadcast(there, 0, group=group), "broadcast"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call()
    # A message of another size than the one that is waited for is a mistake, and no lost peer.
    if rank == 0:
        group.send([there], 1, 0).wait()
    else:
        with pytest.raises(
            RuntimeError, match="rank 0 sends message 0 of 16 bytes where message 0 of 8 was expected"
        ) as caught:
            group.recv([there[:2]], 0, 0).wait()
        assert not groups.is_communication_error(caught.value)
    dist.destroy_process_group()


def test_wrong_use_is_told() -> None:
    run_ranks(2, _refused)


def _waits(rank: int, size: int, store: dist.Store) -> None:
    """Rank 0 waits in each place where one can wait for rank 1, which does nothing; then both recover."""
    group = _group(rank, size, store)
    much = torch.ones(16 * MANY, dtype=torch.uint8)

    def half() -> None:
        group.recv([much[:1]], 1, 6).wait()  # the connection is there, the message is not
        group.recv([much], 1, 6).wait()

    waits: list[Callable[[], object]] = [
        lambda: group.recv([much], 1, 1).wait(),  # for a connection
        lambda: group.send([much], 1, 2).wait(),  # for a peer that takes nothing
        half,
        lambda: group.barrier().wait(),
        lambda: dist.all_gather_object([None, None], "x", group=group),
    ]
    for generation, wait in enumerate(waits, 1):
        if rank == 0:
            threading.Timer(0.2, lambda: groups.abandon("test")).start()
            began = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="abandoned: test"):
                wait()
            assert time.monotonic() - began < 5
        else:
            if wait is half:
                group.send([much[:1]], 0, 6).wait()
            store.wait([f"abandoned{generation}"])
            groups.abandon("test")
        store.set(f"abandoned{generation}", "")
        report = groups.drain(5.0)
        assert report.quiet, report
        groups.detach_all()
        groups.attach(store, generation, 20.0)
        dist.all_reduce(one := torch.ones(1), group=group)
        assert one.item() == 2
    dist.destroy_process_group()


def test_every_wait_can_be_ended() -> None:
    run_ranks(2, _waits)


def _alone(rank: int, size: int, store: dist.Store) -> None:
    """No other rank has said where it is: the wait in the store ends, too, and at the time-out any wait."""
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    _together(store, rank, size)
    if rank == 0:
        group = groups.create_control_group()
        assert group is not None
        group.set_timeout(datetime.timedelta(seconds=0.3))
        with pytest.raises(dist.DistBackendError, match="rank 1 does not connect: Connection timed out"):
            group.recv([torch.zeros(1)], 1, 0).wait()
        group.set_timeout(datetime.timedelta(seconds=30))  # the abandonment comes first, however late it is
        threading.Timer(0.2, lambda: groups.abandon("test")).start()
        with pytest.raises(dist.DistBackendError, match="abandoned: test"):
            group.send([torch.zeros(1)], 1, 1).wait()
        assert groups.drain(5.0).quiet
    store.set(f"done{rank}", "")
    store.wait([f"done{r}" for r in range(size)])


def test_a_peer_that_is_not_there() -> None:
    run_ranks(2, _alone)


def _killed(rank: int, size: int, store: dist.Store) -> None:
    group = _group(rank, size, store)
    one = torch.zeros(1)
    others = [peer for peer in range(size) if peer != rank]
    sent = [group.send([one], peer, 0) for peer in others]
    for peer in others:
        group.recv([one], peer, 0).wait()
    for work in sent:
        work.wait()  # below this rank waits in the store's one connection, which a send needs to find its peer
    if rank == 0:
        store.wait([f"ready{r}" for r in range(1, size)])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"ready{rank}", "")
    with pytest.raises(dist.DistBackendError, match="connection from rank 0: Connection reset by peer"):
        group.recv([one], 0, 0).wait()
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        for tag in itertools.count(9):  # to be connected; the kernel closes a dead rank's door last
            group.send([one], 0, tag).wait()
            time.sleep(0.01)
    if rank == 1:
        group.send([one + 5], 2, 0).wait()
    if rank == 2:
        group.recv([one], 1, 0).wait()
        assert one.item() == 5, "the others' connections are untouched"
    store.set(f"end{rank}", "")
    store.wait([f"end{r}" for r in range(1, size)])


def test_a_killed_peer_is_noticed_by_whoever_needs_it() -> None:
    run_ranks(3, _killed, allowed={0: -signal.SIGKILL})


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def _strangers(rank: int, size: int, store: dist.Store) -> None:
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    before = _listening()
    group = groups.create_control_group()
    assert group is not None
    (port,) = _listening() - before
    ours = b"STREAM02" + bytes(16) + (1 - rank).to_bytes(4, "little") + bytes(4)
    guests = []
    for said in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 10, ours + bytes(16), os.urandom(1 << 16)) * 20:
        guest = socket.create_connection(("127.0.0.1", port))
        guest.setblocking(False)
        if said:
            guest.send(said)
        guests.append(guest)
    for _ in range(3):
        dist.all_reduce(total := torch.ones(1), group=group)
        assert total.item() == size
    for guest, number in zip(guests, range(100), strict=True):
        guest.setblocking(True)
        guest.settimeout(10)
        if number % 5 in (2, 3, 4):
            try:
                if number % 5 == 3:
                    assert len(guest.recv(32, socket.MSG_WAITALL)) == 32, "a random number, and a proof"
                assert guest.recv(1) == b"", "a stranger learns nothing"
            except ConnectionResetError:
                pass  # it had said more than was read
        guest.close()
    dist.all_reduce(total := torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group()
    del group
    deadline = time.monotonic() + 5
    while _listening() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _listening() - before


def test_strangers_are_refused_and_harmless() -> None:
    run_ranks(2, _strangers)


def _crowd(rank: int, size: int, store: dist.Store) -> None:
    """More strangers than a rank has file descriptors stand in front of it and say nothing."""
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    before = _listening()
    group = groups.create_control_group()
    assert group is not None
    if rank == 0:
        (port,) = _listening() - before
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        store.set("port", str(port))
        quiet, _ = _open()
        most = 0
        while not store.check(["come"]):
            most = max(most, _open()[0] - quiet)  # there is always one left to look with
            time.sleep(0.01)
        assert 0 < most <= 256 // 4 + 2
    else:
        guests = [socket.create_connection(("127.0.0.1", int(store.get("port"))), 10) for _ in range(300)]
        deadline = time.monotonic() + 20
        while sum(_has_ended(g) for g in guests) < 300 - 256 // 4:  # the first ones have to make room
            assert time.monotonic() < deadline
            time.sleep(0.05)
        store.set("come", "")
    dist.all_reduce(total := torch.ones(1), group=group)
    assert total.item() == size
    dist.barrier()
    dist.destroy_process_group()


def _has_ended(guest: socket.socket) -> bool:
    guest.setblocking(False)
    try:
        return guest.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def test_a_crowd_of_strangers_does_not_take_all_file_descriptors() -> None:
    run_ranks(2, _crowd)


def _recovers(rank: int, size: int, store: dist.Store) -> None:
    """What a generation leaves behind: nothing."""
    group = _group(rank, size, store)
    counts = []
    for generation in range(1, 31):
        dist.all_reduce(total := torch.ones(1), group=group)
        assert total.item() == size
        counts.append(_open())  # the first ones are of the first groups, before anything was to be closed
        store.set(f"at{generation}-{rank}", "")
        store.wait([f"at{generation}-{r}" for r in range(size)])
        groups.abandon("next")
        assert groups.drain(5.0).quiet
        groups.detach_all()
        groups.attach(store, generation, 20.0)
    deadline = time.monotonic() + 10  # the old backends are closed in the background
    while _more(_open(), counts[:5]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _more(_open(), counts[:5]), (_open(), counts)
    store.set(f"end{rank}", "")
    store.wait([f"end{r}" for r in range(size)])
    dist.destroy_process_group()


def _more(now: tuple[int, int], before: list[tuple[int, int]]) -> bool:
    return any(now[i] > max(count[i] for count in before) for i in (0, 1))


def _open() -> tuple[int, int]:
    """Files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_thirty_generations_leave_nothing_behind() -> None:
    run_ranks(3, _recovers)

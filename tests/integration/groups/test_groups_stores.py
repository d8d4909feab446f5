"""Groups spread over several TCPStores: each rank knows its own servers only, and none of them may be missed."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import RegroupError
from flashrecovery.groups import native_build, registry
from flashrecovery.groups.stores import _CLIENTS, OneStore, StoresInUse
from flashrecovery.groups.torch_private import GroupRequest, HashStore
from flashrecovery.plan.membership.stores import server_of
from flashrecovery.runtime.environment import STORES_ENV
from tests.support.groups_ranks import RankFunction, _Host, run_ranks

SETS = ([0, 1], [2, 3], [0, 2], [1, 3])


class _Counted(dist.Store):  # type: ignore[misc]
    """Passes everything on, and says how often it was asked for what."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.asked = inner, Counter[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self.asked["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        return self.inner.get(key)

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self.asked["wait"] += 1
        self.inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked["multi_get"] += 1
        return self.inner.multi_get(keys)


@contextmanager
def _hosts(count: int) -> Iterator[list[_Host]]:
    hosts = [_Host.start() for _ in range(count)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.stop()


def _address(host: _Host) -> tuple[str, int]:
    return ("127.0.0.1", host.number)


def _init(rank: int, size: int, store: dist.Store) -> list[dist.ProcessGroup]:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    mine = [g for g in (dist.new_group(ranks) for ranks in SETS) if g is not dist.GroupMember.NON_GROUP_MEMBER]
    store.set(f"made {rank}", "")  # a rank that abandons its groups closes connections that a peer may still be making
    store.wait([f"made {r}" for r in range(size)])
    return mine


def _work(size: int, mine: list[dist.ProcessGroup]) -> None:
    """Every group sums over its own ranks."""
    for group in [None, *mine]:
        members = list(range(size)) if group is None else dist.get_process_group_ranks(group)
        dist.all_reduce(t := torch.tensor([float(dist.get_rank())]), group=group)
        assert t.item() == sum(members)


def _apart(rank: int, size: int, servers: int) -> set[int]:
    """The servers that the rank needs."""
    return {0} | {server_of(ranks, size, servers) for ranks in SETS if rank in ranks}


def _again() -> None:
    assert groups.drain(5.0).quiet
    groups.detach_all()


def _killed(hosts: list[_Host]) -> RankFunction:
    def body(rank: int, size: int, store: dist.Store) -> None:
        mine = _init(rank, size, store)
        first = groups.Servers(tuple(map(_address, hosts[:2])), 20.0)
        groups.abandon("first")
        _again()
        groups.attach(first, 1, 20.0)
        _work(size, mine)
        assert set(_CLIENTS.made) == {_address(hosts[i]) for i in _apart(rank, size, 2)}
        kept = dict(_CLIENTS.made)
        dist.barrier()
        groups.abandon("second")
        _again()
        if rank == 0:
            os.kill(hosts[1].pid, signal.SIGKILL)
            store.set("killed", "1")
        store.wait(["killed"])
        # ranks 2 and 3 need the dead server for [2, 3]; the others wait for them until they are told
        told = threading.Timer(2.0, groups.abandon, ["others could not"])
        told.start()
        with pytest.raises(RegroupError):
            groups.attach(first, 2, 20.0)
        told.join()
        _again()
        groups.attach(groups.Servers(tuple(map(_address, (hosts[0], hosts[2]))), 20.0), 3, 20.0)
        _work(size, mine)
        assert _CLIENTS.made[_address(hosts[0])] is kept[_address(hosts[0])]  # it still held
        assert _address(hosts[1]) not in _CLIENTS.made

    return body


def test_a_dead_server_is_replaced_and_the_others_are_kept() -> None:
    with _hosts(3) as hosts:
        run_ranks(4, _killed(hosts))


def _made_late(hosts: list[_Host]) -> RankFunction:
    def body(rank: int, size: int, store: dist.Store) -> None:
        mine = _init(rank, size, dist.TCPStore(*_address(hosts[0]), is_master=False))
        groups.abandon("the default group's store is lost")
        _again()
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{r}" for r in range(size)])
        if rank == 0:
            os.kill(hosts[0].pid, signal.SIGKILL)
            store.set("killed", "1")
        store.wait(["killed"])
        groups.attach(groups.Servers((_address(hosts[1]),), 20.0), 1, 20.0)
        late = [g for g in (dist.new_group(r) for r in ([1, 2], None)) if g is not dist.GroupMember.NON_GROUP_MEMBER]
        _work(size, [*mine, *late])

    return body


def test_groups_made_after_a_recovery_do_not_need_a_store_that_is_lost() -> None:
    with _hosts(2) as hosts:
        run_ranks(4, _made_late(hosts))


def _silent(hosts: list[_Host]) -> RankFunction:
    def body(rank: int, size: int, store: dist.Store) -> None:
        mine = _init(rank, size, store)
        groups.abandon("first")
        _again()
        began = time.monotonic()
        threading.Timer(0.5, groups.abandon, ["a store does not answer"]).start()
        with pytest.raises(RegroupError, match="abandoned"):
            groups.attach(groups.Servers(tuple(map(_address, hosts[:2])), 20.0), 1, 20.0)
        assert time.monotonic() - began < 5.0
        _again()
        groups.attach(groups.Servers((_address(hosts[0]),), 20.0), 2, 20.0)
        _work(size, mine)

    return body


def test_nobody_hangs_in_a_server_that_does_not_answer() -> None:
    with _hosts(2) as hosts:
        os.kill(hosts[1].pid, signal.SIGSTOP)
        run_ranks(4, _silent(hosts))


def _start(hosts: list[_Host]) -> RankFunction:
    def body(rank: int, size: int, store: dist.Store) -> None:
        os.environ[STORES_ENV] = json.dumps([_address(host) for host in hosts])
        mine = _init(rank, size, store)
        _work(size, mine)
        # a group over all ranks stays where torch has its default group
        needed = {server_of(ranks, size, 2) for ranks in SETS if rank in ranks}
        assert set(_CLIENTS.made) == {_address(hosts[i]) for i in needed}
        kept = dict(_CLIENTS.made)
        groups.abandon("first")
        _again()
        groups.attach(groups.Servers(tuple(map(_address, hosts)), 20.0), 1, 20.0)
        _work(size, mine)
        assert all(_CLIENTS.made[address] is client for address, client in kept.items())
        late = dist.new_group([0, 1])  # after a recovery, where its store is now
        _work(size, [late] if rank < 2 else [])

    return body


def test_a_start_is_spread_too_and_its_connections_serve_the_first_recovery() -> None:
    with _hosts(2) as hosts:
        run_ranks(4, _start(hosts))


def _woken(wait: Callable[[], object]) -> threading.Thread:
    def body() -> None:
        with pytest.raises(dist.DistError):
            wait()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_waits_end_also_in_a_store_that_is_connected_after_the_stop() -> None:
    request = GroupRequest("g", (0, 1), 0, 2, {"cpu": "gloo"}, groups.torch_private.DEFAULT_TIMEOUT, None, None)
    stores = StoresInUse(registry.native(), OneStore(HashStore()), 2, "fr/gen1/")
    store = stores.of(request)
    waiting = _woken(lambda: store.wait(["never"]))
    time.sleep(0.1)
    stores.stop("test")
    waiting.join()
    late = StoresInUse(registry.native(), OneStore(HashStore()), 2, "fr/gen1/")
    late.stop("test")
    _woken(lambda: late.of(request).wait(["never"])).join()


def test_the_addresses_of_all_members_come_at_once() -> None:
    """gloo asks for one after the other: a group of a thousand ranks would ask a server four million times."""
    groups.build()
    native, size, meeting = native_build.native(), 5, dist.HashStore()
    stores, made = [_Counted(meeting) for _ in range(size)], {}

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = datetime.timedelta(seconds=20)
        made[rank] = dist.ProcessGroupGloo(native.address_store(stores[rank], size), rank, size, options)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensors = [torch.tensor([float(rank)]) for rank in range(size)]
    works = [made[rank].allreduce([tensors[rank]]) for rank in range(size)]
    for work in works:
        work.wait()
    assert all(tensor.item() == sum(range(size)) for tensor in tensors)
    assert all(store.asked == {"set": 1, "wait": 1, "multi_get": 1} for store in stores), stores


def test_what_is_no_address_is_asked_for_as_it_is() -> None:
    groups.build()
    native, inner = native_build.native(), dist.HashStore()
    store = native.address_store(inner, 3)
    for key in ("7", "x/3", "x/", "x", "x/03", ""):
        inner.set(key, f"value of {key!r}")
        assert store.get(key) == f"value of {key!r}".encode()
    with pytest.raises(dist.DistStoreError):
        store.wait(["x/1"], datetime.timedelta(milliseconds=20))  # of the addresses of three ranks none is there

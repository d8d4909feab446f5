"""Detached groups: the local stand-in, the setup log, and frameworks that are built on them."""

from __future__ import annotations

import importlib
import os
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashrecovery import groups
from flashrecovery.errors import SetupDiffersError, UnsupportedError
from flashrecovery.worker.script_checks.stray_collectives import StrayCollectiveWatch
from tests.support.groups_ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Here once, and not in each forked rank: torch imports it for DDP and FSDP."""
    importlib.import_module("torch._dynamo")


def _alone(body: Callable[[], None], world: int = 4, rank: int = 1) -> Callable[[int, int, dist.Store], None]:
    """``body`` on one rank of a detached world in which no other rank exists."""

    def run(process: int, processes: int, store: dist.Store) -> None:
        groups.install()
        groups.set_detached(True)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=world)
        body()

    return run


def _local_semantics() -> None:
    size, rank = 4, 1
    mine = torch.tensor([1.0, 2.0])
    dist.all_reduce(t := mine.clone())
    assert torch.equal(t, mine)
    dist.broadcast(t, 0)
    assert torch.equal(t, mine)
    dist.all_gather(listed := [torch.zeros(2) for _ in range(size)], mine)
    assert all(torch.equal(x, mine) for x in listed)
    dist.all_gather_into_tensor(out := torch.zeros(size, 2), mine)
    assert torch.equal(out, mine.expand(size, 2))
    dist.reduce_scatter_tensor(out := torch.zeros(1), torch.arange(4.0))
    assert out.item() == rank
    dist.reduce_scatter(out := torch.zeros(2), [mine + i for i in range(size)])
    assert torch.equal(out, mine + rank)
    dist.all_to_all_single(out := torch.zeros(4), torch.arange(4.0))
    assert torch.equal(out, torch.arange(4.0))
    dist.all_to_all(listed := [torch.zeros(1) for _ in range(size)], [torch.ones(1) * i for i in range(size)])
    assert [x.item() for x in listed] == [0, 1, 2, 3]
    dist.scatter(out := torch.ones(2), None, 0)
    dist.send(mine, 0)
    dist.recv(t, 0)
    dist.barrier()
    dist.monitored_barrier()
    work = dist.all_reduce(t, async_op=True)
    assert work.is_completed() and work.get_future().wait() is not None
    dist.all_gather_object(objects := [None] * size, {"a": 1})
    assert objects == [{"a": 1}] * size
    dist.broadcast_object_list(given := ["mine"], 1)
    assert given == ["mine"]
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
        dist.all_reduce(t)
    assert all(g.detached for g in groups.groups())
    single = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(t, group=single)
    assert not groups.groups()[-1].detached
    assert [g.ops_started > 0 for g in groups.groups()] == [True, False, True]
    assert groups.groups()[0].ranks == (0, 1, 2, 3) and groups.groups()[0].rank == 1


def test_local_stand_in() -> None:
    run_ranks(1, _alone(_local_semantics))


def _frameworks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for kind in ("ddp", "fsdp", "hsdp"):
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = (
                init_device_mesh("cpu", (4,))
                if kind == "fsdp"
                else init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
            )
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def test_frameworks_are_built_without_peers() -> None:
    run_ranks(1, _alone(_frameworks))


def _log_of(store: dist.Store, rank: int, size: int, shape: int = 3) -> list[object]:
    results: list[object] = []
    dist.all_reduce(t := torch.ones(shape) * (rank + 1))
    results.append(t)
    work = dist.all_reduce(t := torch.ones(3, dtype=torch.bfloat16) * (rank + 1), async_op=True)
    work.get_future().wait()
    results.append(t)
    dist.all_gather_object(objects := [None] * size, {"rank": rank})
    results.append(objects)
    dist.reduce_scatter_tensor(out := torch.zeros(1), torch.arange(float(size)) + rank)
    results.append(out)
    strided = torch.zeros(4, 2)[::2]
    dist.all_gather(listed := [torch.zeros(2, 2) for _ in range(size)], strided + rank)
    results.append(listed)
    if rank == 0:
        dist.send(torch.ones(2) * 5, 1)
    if rank == 1:
        dist.recv(t := torch.zeros(2), 0)
        results.append(t)
    dist.all_reduce(torch.ones(400_000))  # over 1 MiB: not kept
    big = [bytes(2_000_000) if rank == 0 else None]
    dist.broadcast_object_list(big, 0)  # objects are kept
    results.append(big)
    pair = dist.new_group([0, 1])
    dist.broadcast(t := torch.ones(1) * (rank + 7), 0, group=pair)
    results.append(t)
    return results


def _record_and_replay(process: int, processes: int, store: dist.Store) -> None:
    rank, size = min(process, 1), 2
    groups.install()
    if process == 2:
        store.wait(["log"])
        groups.set_detached(True)
        groups.replay_setup_log(bytes.fromhex(store.get("log").decode()))
        groups.start_setup_log()
    else:
        groups.start_setup_log()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    results = _log_of(store, rank, size)
    log = groups.take_setup_log()
    torch.save(results, buffer := __import__("io").BytesIO())
    if process == 1:
        store.set("results", buffer.getvalue().hex())
        store.set("log", log.hex())
        assert 2_000_000 < len(log) < 2_010_000
    if process == 2:
        assert buffer.getvalue().hex() == store.get("results").decode()
        assert log.hex() == store.get("log").decode(), "a replacement can be replaced as well"
        assert groups.setup_difference() == ""
    if process == 2:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size)
        groups.replay_setup_log(log)
        assert "(operation 0 of group '0') is not made this time" in groups.setup_difference()
        with pytest.raises(RuntimeError, match="not a setup log"):
            groups.replay_setup_log(b"something else")
        with pytest.raises(RuntimeError, match="cut off"):
            groups.replay_setup_log(log[:-5])


def test_setup_log() -> None:
    run_ranks(3, _record_and_replay)


RECORDED_WORDS = "a sent configuration"
OTHERS: dict[str, tuple[int, Callable[[], object], str]] = {
    "dtype": (
        0,
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32)),
        "operation 0 of group '0' is all_reduce of Int[2] and was all_reduce of Float[2]",
    ),
    "shape": (0, lambda: dist.all_reduce(torch.ones(2, 1)), "is all_reduce of Float[2, 1] and was"),
    "size": (0, lambda: dist.all_reduce(torch.ones(9)), "is all_reduce of Float[9] and was"),
    "operation": (
        0,
        lambda: dist.broadcast(torch.ones(2), 0),
        "is broadcast of Float[2] and was all_reduce of Float[2]",
    ),
    "barrier": (0, dist.barrier, "is barrier and was all_reduce of Float[2]"),
    "no-barrier": (1, lambda: dist.all_reduce(torch.ones(2)), "is all_reduce of Float[2] and was barrier"),
    "many": (
        2,
        lambda: dist.all_gather([torch.ones(1) for _ in range(2)], torch.ones(1)),
        "operation 2 of group '0' is all_gather of Float[1], Float[1] and was all_gather of Half[2], Half[2]",
    ),
    "not-kept": (
        3,
        lambda: dist.all_reduce(torch.ones(400_001)),
        "is all_reduce of Float[400001] and was all_reduce of Float[400000]",
    ),
}
"""After how many operations another one is made than was recorded, and what is said of it."""


def _few(count: int) -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(2)),
        dist.barrier,
        lambda: dist.all_gather([torch.ones(2, dtype=torch.half) for _ in range(2)], torch.ones(2, dtype=torch.half)),
        lambda: dist.all_reduce(torch.ones(400_000)),
    )[:count]:
        call()


def _another_set_up(process: int, processes: int, store: dist.Store) -> None:
    rank = min(process, 1)
    groups.install()
    if process == 2:
        store.wait(["log"])
        groups.set_detached(True)
        log = bytes.fromhex(store.get("log").decode())
    else:
        groups.start_setup_log()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"job {process // 2}", store), rank=rank, world_size=2)
    if process < 2:
        _few(4)
        dist.broadcast_object_list([RECORDED_WORDS], 1)
        if process == 1:
            store.set("log", groups.take_setup_log().hex())
        return
    for count, other, said in OTHERS.values():
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=2)
        groups.replay_setup_log(log)
        _few(count)
        assert groups.setup_difference().endswith("is not made this time")
        with pytest.raises(SetupDiffersError, match=re.escape(said)):
            other()
        assert said in groups.setup_difference()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=2)
    groups.replay_setup_log(log)
    _few(4)
    words = [f"{RECORDED_WORDS} that has become longer"]
    dist.broadcast_object_list(words, 1)  # its own, so it has what the script needs
    assert words == [f"{RECORDED_WORDS} that has become longer"]
    assert groups.setup_difference().startswith("operation 5 of group '0' is broadcast of Byte[")


def test_another_collective_than_the_recorded_one_is_refused_before_it_gets_anything() -> None:
    run_ranks(3, _another_set_up)


def _hook_and_counters(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    assert groups.groups() == [] and groups.main_op() is None and groups.failure_count() == 0
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    seen: list[tuple[str, str]] = []
    groups.set_operation_hook(lambda group, op: seen.append((group, op)))
    dist.all_reduce(torch.ones(1))
    other = threading.Thread(target=dist.barrier)
    other.start()
    dist.distributed_c10d._get_default_store().wait([])
    other.join()  # the hook comes before the launch: two threads' operations would be launched in any order
    groups.set_operation_hook(None)
    dist.all_reduce(torch.ones(1))
    assert seen == [("0", "all_reduce"), ("0", "barrier")]

    def refuse(group: str, op: str) -> None:
        groups.set_operation_hook(None)
        raise KeyError("from the hook")

    groups.set_operation_hook(refuse)
    with pytest.raises(KeyError, match="from the hook"):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    world = groups.groups()[0]
    assert world.ops_started == 4 and world.pending == () and groups.failure_count() == 0
    work = dist.irecv(torch.ones(1), 1 - rank)
    op = groups.main_op()
    assert op is not None and (op.group, op.op, op.sequence) == ("0", "recv", 4)
    assert 0 <= time.monotonic() - op.since < 5
    store.set(f"receiving {rank}", "")
    if rank == 1:  # a rank that abandons first closes the connection of the other one's receive, which fails of that
        store.wait(["abandoned"])
        return
    store.wait(["receiving 1"])
    assert groups.abandon("reason") == 1 and groups.failure_count() == 1
    with pytest.raises(dist.DistBackendError, match="reason"):
        work.wait()
    assert groups.main_op() is None
    store.set("abandoned", "")


def test_hook_and_counters() -> None:
    run_ranks(2, _hook_and_counters)


def _dead_peer_by_type(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    if rank == 1:
        store.wait(["connected"])  # its end would be an error of rank 0's init_process_group
        os._exit(0)
    store.set("connected", "")
    with pytest.raises(dist.DistBackendError) as caught:
        while True:
            dist.all_reduce(torch.ones(1))
    assert groups.is_communication_error(caught.value) and "abandoned" not in str(caught.value)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    with pytest.raises(RuntimeError, match="invalid root rank") as misuse:
        dist.broadcast(torch.ones(1), 17)
    assert not groups.is_communication_error(misuse.value)


def test_a_dead_peer_is_told_by_type() -> None:
    run_ranks(2, _dead_peer_by_type)


def _refused(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with pytest.raises(UnsupportedError, match="DETAIL"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.set_debug_level(dist.DebugLevel.OFF)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "True"
    with pytest.raises(UnsupportedError, match="TORCH_GLOO_LAZY_INIT=True"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers torch's own stand-in

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    assert groups.groups() == []


def test_what_cannot_be_recovered_is_refused() -> None:
    run_ranks(1, _refused)


def _one_rank(rank: int, size: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    assert groups.control_group() is None
    groups.abandon("x")
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    assert groups.drain(5.0).quiet
    groups.detach_all()
    dist.all_reduce(torch.ones(1))
    assert groups.attach(store, 1, 5.0).groups == 0
    dist.all_reduce(torch.ones(1))


def test_a_world_of_one() -> None:
    run_ranks(1, _one_rank)


def _extra_control_group(rank: int, size: int, store: dist.Store) -> None:
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    assert groups.control_group() is None
    made = groups.create_control_group("extra")
    assert made is not None and groups.control_group("extra") is made
    everyone = groups.create_control_group()
    assert everyone is not None and everyone is groups.control_group()
    assert dist.new_group([0, 1]).group_name == "1"
    dist.all_reduce(t := torch.ones(1), group=everyone)
    assert t.item() == size


def test_control_group_on_request() -> None:
    run_ranks(2, _extra_control_group)


def _stand_ins(rank: int, world: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group = groups.control_group()
    dist.all_reduce(torch.ones(1))
    before = [(g.progress.collectives, groups.operation_count(), groups.stand_in_count()) for g in groups.groups()]
    if rank == 0:  # as after a discarded attempt: the others make no such collectives
        groups.stand_in(True)
        dist.all_reduce(mine := torch.full((2,), 5.0))
        dist.all_gather(listed := [torch.zeros(2) for _ in range(world)], mine)
        dist.barrier()
        assert torch.equal(mine, torch.full((2,), 5.0)) and all(torch.equal(x, mine) for x in listed)
        assert groups.stand_in_count() - before[0][2] == 3
    dist.barrier(group=group)  # the recovery's own group goes on
    if rank == 0:
        groups.stand_in(False)
    after = [
        (g.progress.collectives, groups.operation_count(), 0) for g in groups.groups() if g.name != "flashrecovery"
    ]
    assert [a[:2] for a in after] == [b[:2] for b in before][: len(after)], "a stand-in's answers stay local"
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == world


def test_stand_ins_answer_for_a_while_and_the_group_stays_connected() -> None:
    run_ranks(3, _stand_ins)


def _outside(rank: int, world: int, store: dist.Store) -> None:
    groups.install()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    told: list[str] = []
    handled = [False]
    watch = StrayCollectiveWatch(told.append, lambda: handled[0], lambda: None, calls=False)
    watch.start()
    dist.all_reduce(torch.ones(1))
    watch.watch(True)
    dist.barrier(group=groups.control_group())
    assert told == [], "the recovery's own"
    handled[0] = True
    dist.all_reduce(torch.ones(1))
    assert told == [], "one in which a death does no harm"
    handled[0] = False
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    assert len(told) == 1 and "test_groups_detached.py:" in told[0] and told[0].startswith("all_reduce at "), told


def test_a_collective_outside_is_named_once_with_file_and_line() -> None:
    run_ranks(2, _outside)

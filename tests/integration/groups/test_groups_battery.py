"""Every c10d operation on managed groups gives what it gives on stock groups, before and after an exchange."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from flashrecovery import groups
from tests.support.groups_ranks import run_ranks

Check = Callable[[], object]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Here once, and not in each forked rank: torch imports it for DDP and FSDP."""
    importlib.import_module("torch._dynamo")


def _operations(rank: int, size: int) -> dict[str, Check]:
    world = dist.group.WORLD
    assert world is not None
    peer_next, peer_prev = (rank + 1) % size, (rank - 1) % size
    mine = lambda n=2: torch.arange(1.0, n + 1) * (rank + 1)  # noqa: E731

    def all_reduce() -> torch.Tensor:
        dist.all_reduce(t := mine())
        return t

    def all_reduce_max_async() -> torch.Tensor:
        work = dist.all_reduce(t := mine(), op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        assert work.is_completed() and work.is_success()
        return t

    def future() -> object:
        work = dist.all_reduce(mine(), async_op=True)
        return work.get_future().wait()[0]

    def future_then() -> object:
        work = dist.all_reduce(mine(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / 2).wait()

    def broadcast() -> torch.Tensor:
        dist.broadcast(t := mine(), size - 1)
        return t

    def all_gather() -> object:
        dist.all_gather(out := [torch.zeros(2) for _ in range(size)], mine())
        return out

    def all_gather_into() -> torch.Tensor:
        dist.all_gather_into_tensor(out := torch.zeros(2 * size), mine())
        return out

    def reduce_scatter_tensor() -> torch.Tensor:
        dist.reduce_scatter_tensor(out := torch.zeros(1), mine(size))
        return out

    def reduce_scatter() -> torch.Tensor:
        dist.reduce_scatter(out := torch.zeros(2), [mine() + i for i in range(size)])
        return out

    def all_to_all_single() -> torch.Tensor:
        dist.all_to_all_single(out := torch.zeros(size), mine(size))
        return out

    def all_to_all_uneven() -> torch.Tensor:
        splits = [1] * size
        dist.all_to_all_single(out := torch.zeros(size), mine(size), splits, splits)
        return out

    def all_to_all() -> object:
        try:
            dist.all_to_all(out := [torch.zeros(1) for _ in range(size)], [mine(1) + i for i in range(size)])
        except RuntimeError:  # stock gloo has it from torch 2.12 on; then ours must, too
            return "not supported"
        return out

    def reduce() -> object:
        dist.reduce(t := mine(), 0)
        return t if rank == 0 else None

    def gather() -> object:
        dist.gather(mine(), out := [torch.zeros(2) for _ in range(size)] if rank == 0 else None, 0)
        return out

    def gather_single() -> object:  # torch has it from 2.15 on
        out = torch.zeros(2 * size) if rank == 0 else None
        try:
            dist.gather_single(mine(), out, 0)
        except RuntimeError:  # stock gloo does not have it; then ours must not, either
            return "not supported"
        return out

    def scatter() -> torch.Tensor:
        dist.scatter(out := torch.zeros(2), [mine() + i for i in range(size)] if rank == 0 else None, 0)
        return out

    def send_recv() -> object:
        t = mine()
        if rank == 0:
            dist.send(t, 1, tag=7)
        elif rank == 1:
            dist.recv(t, 0, tag=7)
        return t

    def recv_any() -> object:
        t = mine()
        if rank == 0:
            dist.send(t, 1)
        elif rank == 1:
            assert dist.recv(t) == 0
        return t

    def isend_irecv() -> object:
        got = torch.zeros(2)
        works = [dist.irecv(got, peer_prev), dist.isend(mine(), peer_next)]
        for work in works:
            assert work is not None
            work.wait()
        return got

    def batch() -> torch.Tensor:
        got = torch.zeros(2)
        ops = [dist.P2POp(dist.isend, mine(), peer_next), dist.P2POp(dist.irecv, got, peer_prev)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got

    def objects() -> object:
        dist.all_gather_object(out := [None] * size, {"rank": rank})
        dist.broadcast_object_list(listed := [rank, "x"], 0)
        dist.scatter_object_list(scattered := [None], [f"for {i}" for i in range(size)] if rank == 0 else None, 0)
        dist.gather_object(rank, gathered := [None] * size if rank == 0 else None, 0)
        return out, listed, scattered, gathered

    def coalesced(kind: str, in_background: bool) -> object:
        outs = [torch.zeros(2 * size), torch.zeros(2 * size)]
        ins = [mine(), mine() + 1]
        with dist.distributed_c10d._coalescing_manager(world, async_ops=in_background) as manager:
            for out, t in zip(outs, ins, strict=True):
                if kind == "reduce":
                    dist.all_reduce(t)
                elif kind == "gather":
                    dist.all_gather_into_tensor(out, t)
                else:
                    dist.reduce_scatter_tensor(t, out.fill_(rank + 1))
        if in_background:
            manager.wait()
        return outs, ins

    def barriers() -> None:
        dist.barrier()
        dist.monitored_barrier()
        dist.barrier(async_op=True).wait()

    def native_coalesced() -> object:
        ts = [mine(), mine(3)]
        world.allreduce_coalesced(ts).wait()
        return ts

    def sparse() -> torch.Tensor:
        dist.all_reduce(t := torch.eye(3).to_sparse() * (rank + 1))
        return t.to_dense()

    def functional() -> object:
        return [
            funcol.all_reduce(mine(), "sum", world) + 0,
            funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(mine(), "sum", world.group_name)),
            funcol.all_gather_tensor(mine(), 0, world) + 0,
            funcol.reduce_scatter_tensor(mine(size), "sum", 0, world) + 0,
            funcol.all_to_all_single(mine(size), None, None, world) + 0,
            funcol.broadcast(mine(), 0, world) + 0,
            *(t + 0 for t in funcol.all_reduce_coalesced([mine(), mine()], "sum", world)),
            *(t + 0 for t in funcol.all_gather_into_tensor_coalesced([mine(), mine()], world)),
        ]

    def properties() -> object:
        c10d = dist.distributed_c10d
        return (
            dist.get_backend(),
            type(world).__name__,
            world.size(),
            dist.get_rank(world),
            c10d._resolve_process_group(world.group_name) is world,
            str(c10d._get_pg_default_device(world)),
            str(c10d._get_object_coll_device(world)),
            type(c10d._get_default_store()).__name__,
            dist.get_process_group_ranks(world),
        )

    def store() -> object:
        held = dist.distributed_c10d._get_default_store()
        held.set(f"key{rank}", "value")
        world.get_group_store().set("mine", "x")
        held.multi_set([f"a{rank}"], ["1"])
        held.wait([f"a{i}" for i in range(size)])
        return held.get("key0"), held.compare_set("key0", "value", "value"), held.multi_get(["a0", "key1"])

    kinds = {
        f"coalesced {k} {b}": (lambda k=k, b=b: coalesced(k, b)) for k in ("reduce", "gather", "rs") for b in (0, 1)
    }
    named: list[Check] = [
        all_reduce, all_reduce_max_async, future, future_then, broadcast, all_gather, all_gather_into,
        reduce_scatter_tensor, reduce_scatter, all_to_all_single, all_to_all_uneven, all_to_all, reduce, gather,
        scatter, send_recv, recv_any, isend_irecv, batch, objects, barriers, native_coalesced, sparse, functional,
        properties, store,
    ]  # fmt: skip
    if hasattr(dist, "gather_single"):
        named.append(gather_single)
    return {**{f.__name__: f for f in named}, **kinds}


def _subgroups(rank: int, size: int) -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    results: list[object] = []
    halves = [dist.new_group([0, 1]), dist.new_group(list(range(size)), timeout=dist.default_pg_timeout)]
    for group in halves:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(t := torch.ones(2) * rank, group=group)
            results.append((dist.get_backend(group), group.group_name, t))
    local = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(t := torch.ones(1) * rank, group=local)
    results.append((local.group_name, t))
    mesh = init_device_mesh("cpu", (size,))
    sharded = distribute_tensor(torch.arange(float(size * 2)), mesh, [Shard(0)])
    results.append(sharded.redistribute(mesh, [Replicate()]).to_local())
    results.append((sharded + 1).sum().full_tensor())
    return results


def _train(kind: str, rank: int, size: int, exchange: Callable[[], None]) -> list[object]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model[0]), fully_shard(model[2]), fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses: list[object] = []
    for step in range(6):
        if step == 3:
            exchange()
        torch.manual_seed(step * size + rank)
        loss = model(torch.randn(3, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    for p in model.parameters():
        losses.append(p.detach().to_local() if hasattr(p, "to_local") else p.detach())
    return losses


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _collect(rank: int, size: int, store: dist.Store, exchange: Callable[[], None]) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, operation in _operations(rank, size).items():
        results[name] = operation()
    results["subgroups"] = _subgroups(rank, size)
    exchange()
    for name, operation in _operations(rank, size).items():
        results[f"{name} again"] = operation()
    results["ddp"] = _train("ddp", rank, size, exchange)
    results["fsdp"] = _train("fsdp", rank, size, exchange)
    return results


def _battery(rank: int, size: int, store: dist.Store) -> None:
    def start(prefix: str) -> None:
        dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=size)

    start("stock")
    reference = _collect(rank, size, store, lambda: None)
    dist.destroy_process_group()

    groups.install()
    start("managed")
    generation = 0

    def exchange() -> None:
        nonlocal generation
        generation += 1
        dist.barrier()
        report = groups.attach(store, generation, 20.0)
        assert report.groups == len([g for g in groups.groups() if g.size > 1])

    found = _collect(rank, size, store, exchange)
    assert generation == 3
    wrong = [name for name, value in reference.items() if not _equal(value, found[name])]
    assert not wrong, [(n, reference[n], found[n]) for n in wrong]
    unsupported = [name for name, value in found.items() if isinstance(value, str)]
    assert groups.failure_count() == len(unsupported) and groups.main_op() is None
    names = [g.name for g in groups.groups()]
    assert names[1] == "flashrecovery" and names[0] != names[1]
    dist.destroy_process_group()
    assert groups.groups() == []


@pytest.mark.parametrize("size", [2, 3])
def test_all_operations_equal_stock(size: int) -> None:
    run_ranks(size, _battery, deadline_s=90)

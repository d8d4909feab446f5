"""A small elastic training script whose replicas have several ranks: losses and digests of each rank's part of the
state as exact numbers, by the rank's number.

``--kind hsdp``: FSDP2 on a mesh of (replicate, shard). ``--kind tensor``: layers that the script itself divides within
a replica, in DistributedDataParallel over the data-parallel group.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from elastic import Numbers, come_badly
from elastic_fsdp2 import Net, digest_of, gathered, is_joining, tensors_of
from pacing import take_time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flashrecovery


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a replica; its gradient is each one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _Copy(torch.autograd.Function):
    """The same on the ranks of a replica; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sharded(torch.nn.Module):
    """Two linear layers, of which each rank of a replica has a part; as Megatron does it."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, inner = group, 64 // group.size()
        torch.manual_seed(5)
        up, down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        mine = slice(group.rank() * inner, (group.rank() + 1) * inner)
        self.up = torch.nn.Parameter(up.weight.detach()[mine].clone())
        self.down = torch.nn.Parameter(down.weight.detach()[:, mine].clone())
        self.norm = torch.nn.LayerNorm(16)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(_Copy.apply(x, self.group) @ self.up.T)
        return self.norm(x + self.dropout(_Sum.apply(hidden @ self.down.T, self.group)))


def mesh_of(args: argparse.Namespace) -> Any:
    replicas = dist.get_world_size() // args.each
    if args.refused == "order":  # replicas of ranks that no numbering with a distance gives
        order = torch.tensor([[0, 1], [3, 2]])
        return torch.distributed.device_mesh.DeviceMesh("cpu", order, mesh_dim_names=("replicate", "shard"))
    if args.stride:  # the ranks of a replica are not neighbours
        order = torch.arange(dist.get_world_size()).view(args.each, replicas).T
        return torch.distributed.device_mesh.DeviceMesh("cpu", order, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (replicas, args.each), mesh_dim_names=("replicate", "shard"))


def build(args: argparse.Namespace, mesh: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    if args.kind == "tensor":
        model: torch.nn.Module = torch.nn.Sequential(*(Sharded(mesh.get_group("shard")) for _ in range(2)))
        return DistributedDataParallel(model, process_group=mesh.get_group("replicate"), bucket_cap_mb=0.002)
    model = Net(args.tied, is_joining() and args.joining == "other-model")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not args.keep}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor], mesh: Any) -> None:
    """Put a state that :func:`whole` has made into the parts of this rank."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's state
    optimizer.zero_grad()
    model_rank = mesh.get_local_rank("shard")
    for name, tensor in tensors_of(model, optimizer).items():
        if isinstance(tensor, DTensor):
            rows = -(-tensor.shape[0] // mesh.size(1)) * model_rank
            tensor.to_local().copy_(state[name][rows : rows + tensor.to_local().shape[0]])
        else:
            tensor.copy_(state[name][model_rank] if isinstance(state[name], list) else state[name])


def whole(tensors: dict[str, torch.Tensor], args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    if args.kind == "hsdp":
        return gathered(tensors)
    everybody: list[Any] = [None] * args.each
    dist.all_gather_object(everybody, tensors, group=mesh.get_group("shard"))
    return {name: [other[name] for other in everybody] for name in tensors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="hsdp", choices=["hsdp", "tensor"])
    parser.add_argument("--each", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--refused", default="")
    parser.add_argument("--joining", default="", help="what a process that comes later does: die, exit, other-model")
    for flag in ("keep", "mixed", "tied", "clip", "stride"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    args, _ = parser.parse_known_args()
    dist.init_process_group("gloo")
    if is_joining() and (args.joining != "die-one" or dist.get_rank() == dist.get_world_size() - 1):
        come_badly(args.joining.removesuffix("-one"))
    recovery = flashrecovery.init()
    mesh = mesh_of(args)
    if args.refused == "pairs":  # a group of parts of several replicas
        dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    elif args.refused == "one-sided":  # a group that only one of the replicas has
        dist.new_group([0, 1])
    model = build(args, mesh)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim > 1]}]
    groups.append({"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    first = 0
    if args.start_from:
        start = torch.load(args.start_from)
        first = start["version"]
        if args.kind == "tensor":
            for _ in range(2):  # DDP rebuilds its buckets after a first step; in the middle of a run they are final
                model(torch.randn(2, 16)).sum().backward()
        with torch.no_grad():
            fill(model, optimizer, start["state"], mesh)
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": start["groups"]})
        scheduler.load_state_dict(start["scheduler"])
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = recovery.elastic_batches(
        Numbers(), global_batch=args.global_batch, micro_batch=args.micro_batch, seed=3, first_step=first
    )
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            total = torch.zeros(())
            for batch in batches.of(step):
                x, y = batch.data
                loss = torch.nn.functional.mse_loss(model(x), y) * batch.weight
                loss.backward()
                total += loss.detach()
            take_time(args.step_time, number)
            if args.clip:
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rank, size = dist.get_rank(), dist.get_world_size()
            replicate, shard = mesh.get_group("replicate"), mesh.get_group("shard")
            assert (replicate.size(), shard.size()) == (size // args.each, args.each)
            here = (
                dist.get_process_group_ranks(shard)[shard.rank()],
                dist.get_process_group_ranks(replicate)[replicate.rank()],
            )
            assert here == (rank, rank)
            if args.kind == "hsdp":
                assert (mesh.size(0), mesh.size(1)) == (size // args.each, args.each)
                assert mesh.mesh[replicate.rank(), shard.rank()] == rank == dist.get_global_rank(shard, shard.rank())
                assert mesh.get_local_rank("replicate") == replicate.rank()
                assert mesh["shard"].mesh.tolist() == dist.get_process_group_ranks(shard)
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            print(f"step={number} rank={rank} size={size} loss_hex={total.item().hex()}", flush=True)
        if not recovery.void:
            digest = digest_of(tensors_of(model, optimizer))
            print(f"part={number + 1} rank={rank} size={size} {digest}", flush=True)
            if args.save_to:
                state = {
                    "state": whole(tensors_of(model, optimizer), args, mesh),
                    "groups": optimizer.state_dict()["param_groups"],
                    "scheduler": scheduler.state_dict(),
                    "version": number + 1,
                }
                if dist.get_rank() == 0:
                    torch.save(state, f"{args.save_to}/{number + 1}.pt")
    end = digest_of(tensors_of(model, optimizer))
    print(f"digest rank={dist.get_rank()} {end}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

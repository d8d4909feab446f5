"""A small elastic training script with FSDP2: losses and digests of each rank's part of the state as exact numbers, by
the rank's number in its group.

Rows do not divide evenly in any size, one parameter has fewer rows than there are ranks, and two layers share a weight.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from elastic import Masked, Numbers, come_badly, own_device, wide_layers
from pacing import take_time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import flashrecovery


class Scaled(torch.nn.Module):
    """One row: all but one of the ranks have nothing of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Net(torch.nn.Module):
    def __init__(self, tied: bool, other: bool = False, wide: int = 0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 61)
        if other:  # as many numbers in another shape, and a name of which there are two
            self.first.weight = torch.nn.Parameter(self.first.weight.detach().view(122, 8))
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(61, 61), torch.nn.GELU(), Masked61(), torch.nn.Dropout(0.1))
            for _ in range(2)
        )
        self.scaled = Scaled(61)
        self.norm = torch.nn.LayerNorm(61)
        self.down = torch.nn.Linear(61, 16, bias=False)
        self.last = torch.nn.Linear(16, 16, bias=False)
        self.again = torch.nn.Linear(16, 16, bias=False)
        if tied:
            self.again.weight = self.last.weight
        self.wide = torch.nn.Sequential(*wide_layers(wide)) if wide else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.wide(x))
        for block in self.blocks:
            x = x + block(x)
        x = self.down(self.norm(self.scaled(x)))
        return x + self.again(torch.tanh(self.last(x)))


class Masked61(Masked):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.register_buffer("mask", (torch.arange(61) % 5 > 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask.to(x.dtype)


class Counting(torch.optim.SGD):
    """Keeps something of each parameter that is neither a number nor sharded."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = torch.zeros(3)
        return result


def is_joining() -> bool:
    """Whether this process has come later than the job's start."""
    return os.environ.get("FLASHRECOVERY_GENERATION", "0") != "0"


def build(args: argparse.Namespace) -> tuple[FSDPModule, Any]:
    torch.manual_seed(5)
    device = own_device()
    model = Net(args.tied, is_joining() and args.joining == "other-model", args.wide).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",) if args.named else None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not args.keep}
    if args.refused == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif args.refused == "post-forward":
        options["reshard_after_forward"] = 2
    elif args.refused == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    elif args.refused == "dimension":
        options["shard_placement_fn"] = lambda p: torch.distributed.tensor.Shard(p.ndim - 1 if p.shape[-1] == 16 else 0)
    elif args.refused == "ignored":
        options["ignored_params"] = {model.scaled.scale}
    for block in model.blocks:
        fully_shard(block, **options)
    root = fully_shard(model, **options)
    if args.refused == "divide":
        root.set_gradient_divide_factor(3.0)
    elif args.refused == "compile":
        model.compile()
    return root, mesh


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name}/{key}": value for key, value in sorted(optimizer.state[parameter].items())}
    return found


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(name.encode() + str(tuple(local.shape)).encode() + local.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Put a gathered state into the parts of this rank."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's state
    optimizer.zero_grad()
    for name, tensor in tensors_of(model, optimizer).items():
        if isinstance(tensor, DTensor):
            rows = -(-tensor.shape[0] // dist.get_world_size()) * dist.get_rank()
            tensor.to_local().copy_(state[name][rows : rows + tensor.to_local().shape[0]])
        else:
            tensor.copy_(state[name])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--wide", type=int, default=0, help="the width of a large layer")
    parser.add_argument("--refused", default="")
    parser.add_argument("--joining", default="", help="what a process that comes later does: die, exit, other-model")
    for flag in ("keep", "mixed", "tied", "named", "clip", "keep-gradients"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    args, _ = parser.parse_known_args()
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    if is_joining():
        come_badly(args.joining)
    recovery = flashrecovery.init()
    model, mesh = build(args)
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw" and args.refused != "state":
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    else:
        kind = Counting if args.refused == "state" else torch.optim.SGD
        optimizer = kind(groups, lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    first = 0
    if args.start_from:
        start = torch.load(args.start_from, map_location=device)
        first = start["version"]
        with torch.no_grad():
            fill(model, optimizer, start["state"])
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": start["groups"]})
        scheduler.load_state_dict(start["scheduler"])
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = recovery.elastic_batches(
        Numbers(), global_batch=args.global_batch, micro_batch=args.micro_batch, seed=3, first_step=first
    )
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            total = torch.zeros((), device=device)
            for batch in batches.of(step):
                x, y = (part.to(device) for part in batch.data)
                loss = torch.nn.functional.mse_loss(model(x), y) * batch.weight
                loss.backward()
                total += loss.detach()
            take_time(args.step_time, number)
            if args.clip:
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not args.keep_gradients)
            scheduler.step()
            rank, size = dist.get_rank(), dist.get_world_size()
            assert (mesh.size(), mesh.get_local_rank(), mesh.mesh.tolist()) == (size, rank, list(range(size)))
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            print(f"step={number} rank={rank} size={size} loss_hex={total.item().hex()}", flush=True)
        if not recovery.void:
            digest = digest_of(tensors_of(model, optimizer))
            print(f"part={number + 1} rank={rank} size={size} {digest}", flush=True)
            if args.save_to:
                state = {
                    "state": gathered(tensors_of(model, optimizer)),
                    "groups": optimizer.state_dict()["param_groups"],
                    "scheduler": scheduler.state_dict(),
                    "version": number + 1,
                }
                if dist.get_rank() == 0:
                    torch.save(state, f"{args.save_to}/{number + 1}.pt")
    print(f"digest rank={dist.get_rank()} {digest_of(gathered(tensors_of(model, optimizer)))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

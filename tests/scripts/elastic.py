"""A small elastic training script: losses and digests of each step as exact numbers, by the rank's number in its group.

Dropout draws random numbers, there are two parameter groups of the optimizer and a scheduler, and the gradients come
in several buckets.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from pacing import take_time
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

BUG = int(os.environ.get("FLASHRECOVERY_TEST_BUG", "-1"))
"""In this step rank 1 raises, whenever it comes there."""


def own_device() -> torch.device:
    """This rank's GPU, which is the process's current one from then on; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


class Masked(torch.nn.Module):
    """A buffer that never changes, but is broadcast by DistributedDataParallel in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(64) % 5 > 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """97 samples, each of its own numbers."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        return x, x.roll(1).cumsum(0)


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
        for name, value in sorted(optimizer.state[parameter].items()):
            found.update(name.encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


def build(wide: int) -> torch.nn.Sequential:
    """``wide``: of a layer besides, if it is not 0."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.LayerNorm(64),
        torch.nn.GELU(),
        Masked(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 48),
        torch.nn.Tanh(),
        torch.nn.Linear(48, 16),
    )
    return torch.nn.Sequential(*model, *wide_layers(wide)) if wide else model


def wide_layers(width: int) -> list[torch.nn.Module]:
    """From 16 numbers to 16: state of 12 bytes times the square of the width."""
    linear = torch.nn.Linear
    return [linear(16, width), torch.nn.Tanh(), linear(width, width), torch.nn.Tanh(), linear(width, 16)]


def misbehave(mode: str, model: torch.nn.Sequential, recovery: flashrecovery.Recovery) -> None:
    """What an elastic job cannot have."""
    if mode == "loader":
        recovery.data(torch.utils.data.DataLoader(Numbers()))
    elif mode == "per-rank":
        recovery.register(own=torch.Generator().manual_seed(dist.get_rank()))
    elif mode == "subgroup":
        dist.new_group([0, 1])
        dist.new_group([2, 3])
    elif mode == "batch-norm":
        model.insert(1, torch.nn.BatchNorm1d(64))


def come_badly(how: str) -> None:
    """What a process that comes into a running job does instead of coming to its first step."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("this process does not come")
    elif how == "exit":
        sys.exit(0)
    elif how == "hang":
        time.sleep(1000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--mode", default="ddp")
    parser.add_argument("--wide", type=int, default=0, help="the width of a large layer")
    parser.add_argument("--joining", help="what a process that comes later does: die, raise, exit, hang, other-seed")
    parser.add_argument("--show-batches", action="store_true", help="print which samples each micro-batch has")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    args, _ = parser.parse_known_args()
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    seed = torch.tensor(3 if dist.get_rank() == 0 else 100 + dist.get_rank(), device=device)
    dist.broadcast(seed, 0)  # as a rank that comes later has to know without taking part in it
    if args.joining and os.environ.get("FLASHRECOVERY_GENERATION", "0") != "0":
        come_badly(args.joining)
        seed += args.joining == "other-seed"
    recovery = flashrecovery.init()
    model = build(args.wide).to(device)
    misbehave(args.mode, model, recovery)
    ddp = args.mode != "plain"
    trained = DistributedDataParallel(model, bucket_cap_mb=0.01) if ddp else model
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    start = torch.load(args.start_from, map_location=device) if args.start_from else None
    first = 0
    if start is not None:
        for _ in range(2):  # DDP rebuilds its buckets after a first step; in the middle of a run they are final
            trained(torch.randn(2, 16).to(device)).sum().backward()
        optimizer.zero_grad()
        first = start["version"]
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        scheduler.load_state_dict(start["scheduler"])
    recovery.register(model=trained, optimizer=optimizer, scheduler=scheduler)
    if args.mode == "no-batches":
        next(recovery.steps(1))
    batches = recovery.elastic_batches(
        Numbers(),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        seed=int(seed),
        averaged=ddp,
        first_step=first,
    )
    torch.manual_seed(1000 + dist.get_rank())  # of no meaning in an elastic job
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            if number == BUG and dist.get_rank() == 1:
                raise ValueError("bad sample 4711")
            total = torch.zeros((), device=device)
            shown, turns = [], batches.of(step)
            mine = len(turns)  # of those that are left
            turns = list(turns) if args.mode == "in-a-list" else turns
            for batch in turns:
                shown.append(f"{batch.number}:{'/'.join(first.hex() for first in batch.data[0][:, 0].tolist())}")
                if args.show_batches and len(shown) == mine:  # before its gradients are reduced with the others'
                    whose = f"rank={dist.get_rank()} size={dist.get_world_size()}"
                    print(f"batches={number} {whose} {' '.join(shown)}", flush=True)
                x, y = (part.to(device) for part in batch.data)
                loss = torch.nn.functional.mse_loss(trained(x), y) * batch.weight
                loss.backward()
                total += loss.detach()
                if args.mode == "broken-off" and number == 2:
                    break
            take_time(args.step_time, number)
            if not ddp:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            size = dist.get_world_size()
            print(f"step={number} rank={dist.get_rank()} size={size} loss_hex={total.item().hex()}", flush=True)
        if not recovery.void:
            print(f"state={number + 1} size={size} {digest_of(model, optimizer)}", flush=True)
            if args.save_to and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "version": number + 1}
                torch.save(state, f"{args.save_to}/{number + 1}.pt")
    print(f"digest rank={dist.get_rank()} {digest_of(model, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

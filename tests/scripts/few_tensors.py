"""DDP with fewer tensors than ranks, or FSDP2: ``few_tensors.py STEPS MODEL [MILLISECONDS]``. Each rank prints a digest
of its parameters, buffers, optimizer state and random numbers at the end."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from pacing import take_time
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import flashrecovery

BUG = int(os.environ.get("FLASHRECOVERY_TEST_BUG", "-1"))
"""In this step rank 1 raises, whenever it comes there."""


HANDLES = os.environ.get("FLASHRECOVERY_TEST_HANDLES", "")
"""``say``: signals are printed; ``leave``: and all ranks leave their loops after one; ``STEP``: they ask
``recovery.leaving``, for which rank 1 waits in this step, and leave together."""
_told: list[int] = []


def _handle(number: int, _: object) -> None:
    _told.append(number)
    print(f"handler {number}", flush=True)


def model_of(kind: str) -> nn.Module:
    if kind == "one":
        return nn.Linear(4, 4, bias=False)
    if kind == "frozen":
        frozen = nn.Linear(4, 8).requires_grad_(False)
        return nn.Sequential(frozen, nn.Linear(8, 4))
    if kind == "norm":
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Numbers(Dataset[torch.Tensor]):
    """160 samples, each of its own numbers."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def of_this_rank(tensor: torch.Tensor) -> bytes:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy().tobytes()


def main() -> None:
    steps, kind, milliseconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    inner = model_of(kind)
    model = fully_shard(inner) if kind == "fsdp" else nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recovery.register(model=model, optimizer=optimizer)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if HANDLES in ("say", "leave") else ():
        signal.signal(number, _handle)
    asks = int(HANDLES) if HANDLES.isdigit() else -1
    assert asks < 0 or not recovery.leaving
    torch.manual_seed(100 + rank)
    data = recovery.data(DataLoader(Numbers(), batch_size=8, num_workers=2)) if kind == "loader" else None
    for step in recovery.steps(steps):
        with step:
            if step.index == BUG and rank == 1:
                raise ValueError("bad sample 4711")
            x = torch.randn(8, 4) + torch.rand(1)
            if data is not None:
                x = x + next(data)
            loss = ((model(x) - x.sin()) ** 2).mean()
            while asks == step.index and rank == 1 and not recovery.leaving:
                time.sleep(0.01)
            leaving = torch.tensor(float(asks >= 0 and recovery.leaving))
            if asks >= 0:
                dist.all_reduce(leaving)
            optimizer.zero_grad()
            loss.backward()
            take_time(milliseconds, step.index)
            optimizer.step()
        print(f"step={step.index} rank={rank} loss_hex={loss.item().hex()}", flush=True)
        if leaving.item():
            print(f"leaving in step {step.index}", flush=True)
            break
        if HANDLES == "leave":
            anybody = torch.tensor(len(_told))
            dist.all_reduce(anybody)
            if anybody.item():
                print("saved by the script", flush=True)
                break
    digest = hashlib.sha256()
    for tensor in inner.state_dict().values():
        digest.update(of_this_rank(tensor))
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(of_this_rank(value))
    digest.update(torch.get_rng_state().numpy().tobytes())
    print(f"digest rank={rank} {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

"""One rank of ``flashrecovery run --preflight`` (:mod:`.preflight`): a process of its own, which says on its standard
output how far it has come."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from flashrecovery.cli.preflight import FOLDER_ENV, PARENT_ENV
from flashrecovery.runtime.process_control import die_with_parent

_GEMM = {"cuda": 2048, "cpu": 256}
"""Rows and columns of the matrices."""
_ROUNDS = {"cuda": 200, "cpu": 4}
_NUMBERS = {"cuda": 1 << 24, "cpu": 1 << 18}
"""Of each rank, in the all-reduce."""
_GEMM_S = 20.0
_PEERS = datetime.timedelta(seconds=300)
"""More than a preflight takes: it decides which ranks are late."""
_REDUCES = 8


def say(**what: object) -> None:
    """One line for :mod:`.preflight`."""
    print(json.dumps(what), flush=True)


def matrices(size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices of integers from -2 to 2, and their product, whose numbers are exact in every type: computed by the
    host in double precision, then rounded once. Shape: (size, size) each."""
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randint(-2, 3, (size, size), generator=generator).double() for _ in range(2))
    return left.to(device, dtype), right.to(device, dtype), (left @ right).to(dtype).to(device)


def gemm(device: torch.device) -> str:
    """What is wrong with products on this device; "": nothing."""
    began, size = time.monotonic(), _GEMM[device.type]
    # Sums of parts that are rounded to bfloat16 would not be exact.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for dtype in (torch.float32, torch.bfloat16):
        left, right, expected = matrices(size, device, dtype)
        for number in range(_ROUNDS[device.type]):
            wrong = int((torch.mm(left, right) != expected).sum())
            if wrong:
                return f"{wrong} of {size * size} numbers of a {dtype} product are wrong (GEMM number {number})"
            if time.monotonic() - began > _GEMM_S:
                break
    return ""


def all_reduce(device: torch.device, rank: int, world: int) -> str:
    """What is wrong with sums over all ranks; "": nothing."""
    numbers = torch.arange(_NUMBERS[device.type], device=device) % 7
    expected = (numbers * world + world * (world - 1) // 2).float()
    for number in range(_REDUCES):
        mine = (numbers + rank).float()
        dist.all_reduce(mine)
        wrong = int((mine != expected).sum())
        if wrong:
            return f"{wrong} of {mine.numel()} sums over {world} ranks are wrong (all-reduce number {number})"
    return ""


def device_of(local_rank: int) -> tuple[torch.device, str]:
    """The device of a local rank, and its name: GPUs are shared where there are fewer than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), f"CPU rank {local_rank} of {os.uname().nodename}"
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "")
    return device, f"GPU {device.index} of {os.uname().nodename} ({properties.name}{f', {uuid}' if uuid else ''})"


def main() -> int:
    die_with_parent(int(os.environ[PARENT_ENV]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, name = device_of(int(os.environ["LOCAL_RANK"]))
    say(device=name, passed="start")
    wrong = gemm(device)
    if wrong:
        say(wrong=wrong)
        return 1
    say(passed="gemm")
    alone = device.type == "cuda" and torch.cuda.device_count() >= world
    meet = f"file://{os.environ[FOLDER_ENV]}/store"
    dist.init_process_group("nccl" if alone else "gloo", meet, timeout=_PEERS, world_size=world, rank=rank)
    wrong = all_reduce(device if alone else torch.device("cpu"), rank, world)
    if wrong:
        say(wrong=wrong)
        return 1
    say(passed="all-reduce")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

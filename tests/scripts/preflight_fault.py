"""A rank of the preflight check whose device is bad: ``PREFLIGHT_FAULT=RANK:gemm|sum|exit|hang|stay|talk``;
``talk``: it is not bad, and prints much."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.cli import preflight_rank

rank, _, fault = os.environ["PREFLIGHT_FAULT"].partition(":")
mm, all_reduce = torch.mm, dist.all_reduce


def wrong_mm(*arguments: Any) -> torch.Tensor:
    product = mm(*arguments)
    product[3, 5] += 1
    return product


def wrong_sum(numbers: torch.Tensor) -> None:
    all_reduce(numbers)
    numbers[7] += 1


if rank == os.environ["RANK"]:
    if fault == "gemm":
        torch.mm = wrong_mm  # type: ignore[assignment]
    elif fault == "sum":
        dist.all_reduce = wrong_sum
    elif fault == "exit":
        sys.exit("the device is gone")
    elif fault == "stay":
        torch.mm = lambda *arguments: time.sleep(600)  # type: ignore[assignment]
    elif fault == "talk":
        print("NCCL INFO " * 20_000, file=sys.stdout, flush=True)
        print("NCCL INFO " * 20_000, file=sys.stderr, flush=True)
    elif fault == "hang":
        time.sleep(600)
sys.exit(preflight_rank.main())

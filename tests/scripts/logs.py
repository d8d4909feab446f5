"""What scripts do before their first step to log a run: ids, folders and files; and what a replacement does with it.

``logs.py DIR [--tracker tensorboard|tensorboardX|wandb] [--framework deepspeed]``. Rank 0 logs.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import secrets
import tempfile
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

STEPS = 8


def logger(folder: Path) -> logging.Logger:
    log = logging.getLogger("run")
    log.setLevel("INFO")
    log.addHandler(logging.FileHandler(folder / "train.log", mode="w"))
    log.info("header")
    return log


def tracker(name: str) -> Any:
    """Something with ``log(values, step)``."""
    if name == "wandb":
        import wandb

        run = wandb.init(project="logs", mode="offline")
        return lambda values, step: run.log(values, step=step, commit=True)
    if name in ("tensorboard", "tensorboardX"):
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        else:
            from tensorboardX import SummaryWriter
        writer = SummaryWriter()

        def log(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log
    return lambda values, step: None


def built(framework: str) -> tuple[Any, Any, Any]:
    """Recovery, the model, and what does a step with a loss."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    if framework == "deepspeed":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "flash_recovery": {"enabled": True},
        }
        engine, *_ = deepspeed.initialize(model=net, config=config)

        def update(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return engine.recovery, engine, update
    recovery = flashrecovery.init()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery.register(model=model, optimizer=optimizer)

    def step_with(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return recovery, model, step_with


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--tracker", default="")
    parser.add_argument("--framework", default="torch")
    args = parser.parse_args()
    os.chdir(args.dir)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    recovery, model, update = built(args.framework)
    print(f"told {rank} {recovery.is_replacement} {recovery.first_launch}", flush=True)
    if rank == 0:
        run = Path(f"{datetime.now():%Y%m%d-%H%M%S.%f}-{uuid.uuid4().hex[:8]}-{secrets.token_hex(2)}")
        run.mkdir()
        scratch = tempfile.mkdtemp(dir=".", prefix="scratch")
        (run / "config.json").write_text(json.dumps({"scratch": scratch, "seed": int(time.time())}))
        log = logger(run)
        with open(run / "loss.csv", "w", newline="") as file:
            csv.writer(file).writerow(["step", "loss"])
        track = tracker(args.tracker)
    for step in recovery.steps(STEPS):
        with step:
            dist.barrier()  # a rank that dies from here on has a step to do again that is not logged
            torch.manual_seed(100 + step.index)
            loss = model(torch.randn(4, 8)).square().mean()
            update(loss)
        if rank == 0 and step.committed:
            log.info("step %d", step.index)
            with open(run / "loss.csv", "a", newline="") as file:
                csv.writer(file).writerow([step.index, loss.item().hex()])
            track({"loss": loss.item()}, step=step.index)


if __name__ == "__main__":
    main()

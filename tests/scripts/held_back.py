"""examples/gpt/train_ddp.py with an optimizer that the device can hold back: fused, and gradients that are views of
DDP's buckets, so that nothing on the host reads them before the optimizer does.

``--optimizer``: adamw, adam, sgd (with momentum), adagrad; ``plain``: AdamW that is not fused. ``--scaler``: a
GradScaler, with one step that overflows on all ranks (``--overflow STEP``). ``--dies RANK:STEP``: the rank's first
process is killed before its backward pass, when all others have launched their optimizers. ``--compiled``:
torch.compile makes the optimizer's step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import flashrecovery
import training

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"fused": True}),
    "plain": (torch.optim.AdamW, {}),
}


def main() -> None:
    flags = training.parser(__doc__)
    flags.add_argument("--optimizer", choices=KINDS, default="adamw")
    flags.add_argument("--scaler", action="store_true")
    flags.add_argument("--overflow", type=int, default=-1)
    flags.add_argument("--dies", default="")
    flags.add_argument("--compiled", action="store_true")
    args = flags.parse_args()
    device = training.start_process_group()
    recovery = flashrecovery.init()

    model = DistributedDataParallel(training.build_model(args, device), gradient_as_bucket_view=True)
    kind, options = KINDS[args.optimizer]
    optimizer = kind(model.parameters(), lr=args.lr, **options)
    scheduler = training.build_scheduler(optimizer, args.steps)
    if args.compiled:
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=4, enabled=args.scaler)
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

    training.seed_rank(args.seed)
    data = recovery.data(training.build_loader(args))
    log = training.StepLog(args)
    for step in recovery.steps(args.steps):
        with step:
            x, y = next(data)
            loss = model(x.to(device), y.to(device))
            optimizer.zero_grad()
            if args.dies == f"{dist.get_rank()}:{step.index}" and os.environ.get("FLASHRECOVERY_GENERATION") == "0":
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)
            scaler.scale(loss * (float("inf") if step.index == args.overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if step.committed:
            log.step(step.index, loss)

    training.print_digest(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small GPT with DistributedDataParallel, and keep training when a rank dies::

    flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/train_ddp.py --steps 200
    torchrun --nproc-per-node 4 examples/gpt/train_ddp.py          # the same script, without recovery
    python examples/gpt/train_ddp.py                               # also alone

Losses are each rank's own. The last thing in a step's body is the optimizer; no collective follows it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
import training


def main() -> None:
    """Train as the flags say."""
    args = training.parser(__doc__).parse_args()
    device = training.start_process_group()
    recovery = flashrecovery.init()

    model = DistributedDataParallel(training.build_model(args, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = training.build_scheduler(optimizer, args.steps)
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler)

    training.seed_rank(args.seed)
    data = recovery.data(training.build_loader(args))
    log = training.StepLog(args)
    recovery.report(tokens_per_step=log.tokens)
    for step in recovery.steps(args.steps):
        with step:
            x, y = next(data)
            loss = model(x.to(device), y.to(device))
            time.sleep(args.step_time / 1e3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, loss)

    if args.digest:
        training.print_digest(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

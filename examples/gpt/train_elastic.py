"""Train a small GPT with DistributedDataParallel; where a lost rank cannot be replaced, go on with fewer::

    flashrecovery run --nproc-per-node 4 --elastic 2:4 --run-dir runs/elastic examples/gpt/train_elastic.py --steps 400
    flashrecovery resize runs/elastic --to 3       # one rank leaves
    flashrecovery resize runs/elastic --to 4       # and comes back

On one machine a killed rank is replaced, because there is room for it. With ``replace: never`` in a ``--config`` file
(``elastic: {min: 2, max: 4, replace: never}``) the others go on without it. The global batch is the same in any size;
losses are each rank's own.
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
    parser = training.parser(__doc__)
    parser.add_argument("--global-batch-size", type=int, default=16, help="blocks of all ranks together in a step")
    args = parser.parse_args()
    device = training.start_process_group()
    recovery = flashrecovery.init()

    model = DistributedDataParallel(training.build_model(args, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = training.build_scheduler(optimizer, args.steps)
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler)

    batches = recovery.elastic_batches(
        training.build_dataset(args), global_batch=args.global_batch_size, micro_batch=args.batch_size, seed=args.seed
    )
    log = training.StepLog(args)
    log.tokens = args.global_batch_size * args.context
    recovery.report(tokens_per_step=log.tokens)
    for step in recovery.steps(args.steps):
        with step:
            total = torch.zeros((), device=device)
            for batch in batches.of(step):  # this rank's micro-batches: more of them when there are fewer ranks
                x, y = batch.data
                loss = model(x.to(device), y.to(device))
                (loss * batch.weight).backward()
                total += loss.detach() * batch.weight
            time.sleep(args.step_time / 1e3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, total)

    if args.digest:
        training.print_digest(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

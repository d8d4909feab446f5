"""Train a small GPT with Hugging Face accelerate, without a Trainer, and keep training when a rank dies::

    pip install accelerate==1.15.0
    flashrecovery run --standby 1 -- accelerate launch --config_file examples/gpt/launchers/accelerate.yaml \\
        examples/gpt/train_accelerate.py
    accelerate launch --multi_gpu --num_processes 4 examples/gpt/train_accelerate.py    # the same, without recovery

Precision and number of processes are the launcher's, as always with accelerate.
"""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import corpus
import flashrecovery
import training
from data import BlockDataset


def main() -> None:
    """Train as the flags say."""
    flags = training.parser(__doc__)
    flags.add_argument("--accumulate", type=int, default=2, help="micro-batches an optimizer step")
    args = flags.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    recovery = flashrecovery.init()
    if accelerator.is_main_process:
        training.emit(f"{accelerator.num_processes} processes, precision {accelerator.mixed_precision}")

    blocks = BlockDataset(corpus.prepare(args.data, args.data_dir, int(args.corpus_mib * 2**20)), args.context)
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(blocks, batch_size=args.batch_size, shuffle=True, generator=order, drop_last=True)
    built = training.build_model(args, torch.device("cpu"))
    model, optimizer, loader = accelerator.prepare(built, torch.optim.AdamW(built.parameters(), lr=args.lr), loader)
    scheduler = accelerator.prepare_scheduler(training.build_scheduler(optimizer.optimizer, args.steps))
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler, accelerator=accelerator)

    training.seed_rank(args.seed)
    data = recovery.data(loader)
    log = training.StepLog(args)
    for step in recovery.steps(args.steps):
        with step:
            for _ in range(args.accumulate):
                x, y = next(data)
                with accelerator.accumulate(model):
                    loss = model(x, y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            time.sleep(args.step_time / 1e3)
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, loss)

    if args.digest:
        training.print_digest(model, optimizer.optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()

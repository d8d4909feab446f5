"""The Megatron example, which writes down what it holds: with megatron-core's own ``dist_checkpointing.save``.

With ``--load DIR`` it begins with what megatron-core's own ``dist_checkpointing.load`` reads there, with nothing of
flash-recovery; otherwise with what ``flashrecovery run --resume`` gives it. Then it takes the steps that are left.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import pretrain_gpt  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import argparse

import torch.distributed as dist
from logical_values import load, save

import fr_megatron
import training
from megatron_data import build_loader
from megatron_model import build_chunks, build_optimizer, model_config, parser, start_groups


def main() -> None:
    """As the example."""
    flags = parser(__doc__)
    flags.add_argument("--values", type=Path, required=True, help="where to write")
    flags.add_argument("--load", type=Path, help="what to read")
    args: argparse.Namespace = flags.parse_args()
    device = training.start_process_group()
    start_groups(args)
    config = model_config(args)
    chunks = build_chunks(args, config)
    optimizer, scheduler = build_optimizer(args, config, chunks)
    if args.load:
        load(chunks, optimizer, scheduler, args.load)
        save(chunks, optimizer, scheduler, args.values)
        dist.destroy_process_group()
        return
    recovery = fr_megatron.attach(chunks, optimizer, scheduler)
    data = recovery.data(build_loader(args))
    log, written = training.StepLog(args), False
    for step in recovery.steps(args.steps):
        with step:
            if not written:
                save(chunks, optimizer, scheduler, args.values)
            written = True
            batches = [next(data) for _ in range(args.micro_batches)]
            log.step(step.index, pretrain_gpt.train_step(args, chunks, optimizer, scheduler, batches, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

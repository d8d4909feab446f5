"""Train a small GPT with FSDP2 (``fully_shard``) or HSDP, and keep training when a rank dies::

    flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/train_fsdp.py --steps 200
    flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/train_fsdp.py --replicate 2    # HSDP, 2x2
    torchrun --nproc-per-node 4 examples/gpt/train_fsdp.py         # the same script, without recovery

Plain FSDP has no second copy of a shard: recovery then keeps one in the next rank's host memory.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashrecovery
import training
from model import GPT


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> None:
    """Shard each block and then the rest, over all ranks or over ``world / replicate`` of them."""
    world = dist.get_world_size()
    if world % args.replicate:
        raise SystemExit(f"--replicate {args.replicate}: the world has {world} ranks, which is not a multiple")
    if args.replicate > 1:
        mesh = init_device_mesh(
            device.type, (args.replicate, world // args.replicate), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Train as the flags say."""
    flags = training.parser(__doc__)
    flags.add_argument("--replicate", type=int, default=1, metavar="R", help="HSDP: that many copies of each shard")
    args = flags.parse_args()
    device = training.start_process_group()
    recovery = flashrecovery.init()

    model = training.build_model(args, device)
    shard(model, args, device)
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

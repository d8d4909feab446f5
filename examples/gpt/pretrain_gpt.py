"""Train a GPT of megatron-core, in any parallel layout, and keep training when a rank dies::

    FR_MEGATRON_CPU=1 flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/pretrain_gpt.py \\
        --tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 --steps 50

``FR_MEGATRON_CPU=1`` is for machines without a GPU (see fr_megatron/cpu). Megatron-LM is not needed.
"""

from __future__ import annotations

import fr_megatron.digest  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

import training
from megatron_data import build_loader
from megatron_model import build_chunks, build_optimizer, model_config, parser, start_groups


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over this rank's tokens."""
    mask = loss_mask.reshape(-1).float()
    loss = (losses.float().reshape(-1) * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}


def forward_step(
    data: Iterator[dict[str, Tensor]], model: Any, device: torch.device, pause_s: float
) -> tuple[Tensor, Callable[..., Any]]:
    """One micro-batch through one chunk."""
    batch = {name: tensor.to(device) for name, tensor in next(data).items()}
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch)
    time.sleep(pause_s)
    length = batch["tokens"].size(1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=device), 1)[None, None]
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, partial(loss_function, batch["loss_mask"])


def train_step(
    args: argparse.Namespace,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    batches: list[Any],
    device: torch.device,
) -> Tensor:
    """One optimizer step; returns the mean loss of its micro-batches, NaN on stages that have none."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Every chunk goes over the same micro-batches.
    data = [iter(batches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=partial(forward_step, device=device, pause_s=args.step_time / 1e3 / args.micro_batches),
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=args.micro_batches,
        seq_length=args.context,
        micro_batch_size=args.batch_size,
        forward_only=False,
    )
    updated, _, _ = optimizer.step()
    if updated:
        scheduler.step(increment=1)
    return torch.stack([r["loss"] for r in results]).mean() if results else torch.tensor(float("nan"))


def main() -> None:
    """Train as the flags say."""
    args = parser(__doc__).parse_args()
    device = training.start_process_group()
    start_groups(args)
    config = model_config(args)
    chunks = build_chunks(args, config)
    optimizer, scheduler = build_optimizer(args, config, chunks)
    recovery = fr_megatron.attach(chunks, optimizer, scheduler)

    data = recovery.data(build_loader(args))
    log = training.StepLog(args)
    samples = args.micro_batches * args.batch_size * parallel_state.get_data_parallel_world_size()
    recovery.report(tokens_per_step=samples * args.context)
    for step in recovery.steps(args.steps):
        with step:
            batches = [next(data) for _ in range(args.micro_batches)]
            loss = train_step(args, chunks, optimizer, scheduler, batches, device)
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, loss)

    if args.digest:
        training.emit(
            f"digest rank={dist.get_rank()} {training.digest(fr_megatron.digest.state(chunks, optimizer, scheduler))}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

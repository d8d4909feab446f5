"""A small training script with megatron-core in whatever layout: losses of each step as exact numbers, and digests of
the whole state, which do not depend on the layout.

With ``--save-to`` it writes each version down with megatron-core's own ``dist_checkpointing.save``; with
``--start-from`` it begins with what megatron-core's own ``load`` reads there: nothing of flash-recovery has a part in
that.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch
import torch.distributed as dist
from elastic_megatron import Tokens
from logical_values import begin_with, digest, save
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

import flashrecovery
import megatron_model
import pretrain_gpt
import training


def virtual_stages(args: Any, sizes: flashrecovery.ParallelLayout) -> int | None:
    """As many as the flags say, in layouts whose micro-batches the interleaved schedule can compute."""
    micro_batches = args.global_batch // args.batch_size // sizes.dp
    fits = sizes.pp > 1 and micro_batches % sizes.pp == 0
    return args.num_virtual_stages_per_pipeline_rank if fits else None


def train_step(args: Any, chunks: list[Any], optimizer: Any, scheduler: Any, batches: Any, step: Any) -> float:
    turns = [batches.of(step, chunk) for chunk in range(len(chunks))]
    data = [(batch.data for batch in of_chunk) for of_chunk in turns]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    device = next(chunks[0].parameters()).device
    results = get_forward_backward_func()(
        forward_step_func=partial(pretrain_gpt.forward_step, device=device, pause_s=0.0),
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(turns[0]),
        seq_length=args.context,
        micro_batch_size=args.batch_size,
        forward_only=False,
    )
    updated, _, _ = optimizer.step()
    if updated:
        scheduler.step(increment=1)
    return float(torch.stack([r["loss"] for r in results]).sum()) if results else 0.0


def place(sizes: flashrecovery.ParallelLayout) -> tuple[str, int]:
    """The layout as it is now, with the replicas that there are, and this process's rank."""
    dp = parallel_state.get_data_parallel_world_size()
    more = {"cp": parallel_state.get_context_parallel_world_size()}
    more |= {"ep": parallel_state.get_expert_model_parallel_world_size()}
    shown = "".join(f"{name}={size}," for name, size in more.items() if size > 1)
    return f"tp={sizes.tp},pp={sizes.pp},{shown}dp={dp}", dist.get_rank()


def main() -> None:
    parser = megatron_model.parser(__doc__)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--mode", default="")
    parser.add_argument("--takes", default="", help="context parallelism (cp), expert parallelism (ep), or cp,ep")
    parser.add_argument("--gated", action="store_true", help="a gated MLP, and grouped queries")
    parser.add_argument("--save-to", type=Path, help="a directory for the values of each version")
    parser.add_argument("--start-from", type=Path, help="such values; the name is the version")
    small = {"steps": 12, "layers": 2, "heads": 2, "width": 16, "context": 8, "batch_size": 2, "lr": 1e-2}
    parser.set_defaults(**small)
    args = parser.parse_args()
    training.start_process_group()
    more = {"cp": args.context_parallel_size} if "cp" in args.takes else {}
    more |= {"ep": args.expert_model_parallel_size} if "ep" in args.takes else {}
    sizes = flashrecovery.layout(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size, **more)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = sizes.tp, sizes.pp
    args.num_virtual_stages_per_pipeline_rank = virtual_stages(args, sizes)
    if more:
        args.context_parallel_size, args.expert_model_parallel_size = sizes.cp, sizes.ep
        needed = args.num_experts is not None and sizes.tp > 1  # Megatron demands it of MoE layers
        args.sequence_parallel = needed and args.mode != "whole-sequences"
    megatron_model.start_groups(args)
    if args.mode == "needs-tp" and sizes.tp == 1:
        raise ValueError("sequence parallelism without tensor parallelism")
    if args.mode == "late" and sizes.changed:
        time.sleep(8)  # time for something to happen before the first step
    config = megatron_model.model_config(args)
    if args.gated:
        activation = torch.nn.functional.silu
        config = dataclasses.replace(config, gated_linear_unit=True, activation_func=activation, num_query_groups=2)
    chunks = megatron_model.build_chunks(args, config)
    optimizer, scheduler = megatron_model.build_optimizer(args, config, chunks)
    first = begin_with(chunks, optimizer, scheduler, args.start_from) if args.start_from else 0
    recovery = fr_megatron.attach(chunks, optimizer, scheduler)
    if args.mode == "loader":
        recovery.data(torch.utils.data.DataLoader(Tokens(args.context)))
    batches = recovery.elastic_batches(
        Tokens(args.context), global_batch=args.global_batch, micro_batch=args.batch_size, seed=3, first_step=first
    )
    assert sizes.dp == parallel_state.get_data_parallel_world_size()
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            layout, rank = place(sizes)
            print(f"begin={number} layout={layout} {digest(chunks, optimizer, scheduler)}", flush=True)
            loss = train_step(args, chunks, optimizer, scheduler, batches, step)
            time.sleep(args.step_time / 1e3)
            print(f"step={number} rank={rank} layout={layout} loss_hex={loss.hex()}", flush=True)
            state = digest(chunks, optimizer, scheduler)  # in the block: it communicates
            if args.save_to and not sizes.changed:
                save(chunks, optimizer, scheduler, args.save_to / str(number + 1))
        if not recovery.void:
            print(f"state={number + 1} layout={layout} {state}", flush=True)
    layout, rank = place(sizes)
    print(f"digest rank={rank} layout={layout} {digest(chunks, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small elastic training script with megatron-core: losses and digests of each step as exact numbers, by the rank's
number in its group. The digests are of the whole state, gathered from all ranks: weights, what is stepped on, Adam's
state.

Dropout draws from torch's random stream and from those that Megatron tracks, gradients are clipped, and the learning
rate warms up.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron_whole_state import State
from pacing import take_time
from torch import Tensor

import megatron_model
import pretrain_gpt
import training

VOCABULARY = 256


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """97 samples, each of its own tokens."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (self._length + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


# -- the loop --------------------------------------------------------------------------------------


def start_calculator(args: argparse.Namespace) -> None:
    """As the mode says."""
    ramp = [12, 12, 1000] if args.mode == "ramp-up" else None
    if args.mode in ("calculator", "ramp-up", "decreased"):
        num_microbatches_calculator.init_num_microbatches_calculator(
            dist.get_rank(),
            ramp,
            args.global_batch + (args.mode == "decreased"),
            args.batch_size,
            dist.get_world_size(),
            args.mode == "decreased",
        )


def train_step(args: argparse.Namespace, state: State, batches: Any, step: Any) -> Tensor:
    """One optimizer step; returns the sum of the losses of this replica's micro-batches."""
    chunks = state.chunks
    for chunk in chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    numbers = [0] * len(chunks) if args.mode == "same-chunk" else range(len(chunks))
    turns = [batches.of(step, number) for number in numbers]
    data = [(batch.data for batch in of_chunk) for of_chunk in turns]
    number = num_microbatches_calculator.get_num_microbatches() if args.mode == "calculator" else len(turns[0])
    device = next(chunks[0].parameters()).device
    results = get_forward_backward_func()(
        forward_step_func=partial(pretrain_gpt.forward_step, device=device, pause_s=0.0),
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=number - (args.mode == "left-over"),
        seq_length=args.context,
        micro_batch_size=args.batch_size,
        forward_only=False,
    )
    updated, _, _ = state.optimizer.step()
    if updated:
        state.scheduler.step(increment=1)
    if not results:  # not the last stage
        return torch.tensor(torch.nan)
    return torch.stack([result["loss"] for result in results]).sum()


def freeze_some() -> None:
    """Of each stage and slice something is not trained: no rank divides it, and all replicas have it."""
    build = megatron_model._model

    def frozen(*args: Any) -> Any:
        model = build(*args)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("position_embeddings" not in name and "linear_fc1" not in name)
        return model

    megatron_model._model = frozen


def experts_in_the_first_stage() -> None:
    """The layers of the other stages are dense."""
    build = megatron_model.get_gpt_layer_local_spec

    def of_stage(num_experts: int | None, **more: Any) -> Any:
        return build(num_experts=num_experts if parallel_state.is_pipeline_first_stage() else None, **more)

    megatron_model.get_gpt_layer_local_spec = of_stage


def note_peers(chunk: Any) -> None:
    """As Transformer Engine's attention does with context parallelism, which is not there on a CPU."""
    for module in chunk.modules():
        if type(module).__name__ == "SelfAttention":
            module.cp_group = parallel_state.get_context_parallel_group()
            module.cp_global_ranks = dist.get_process_group_ranks(module.cp_group)


def main() -> None:
    parser = megatron_model.parser(__doc__)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--mode", default="")
    parser.add_argument("--save-to", help="a directory for the state of each version")
    parser.add_argument("--start-from", help="such a state")
    small = {"steps": 12, "layers": 1, "heads": 2, "width": 16, "context": 8, "batch_size": 2, "lr": 1e-2}
    parser.set_defaults(**small)
    args = parser.parse_args()
    training.start_process_group()
    if args.mode == "some":  # a group of the first ones
        dist.new_group([0, 1])
    if args.mode == "first":  # only one rank has a group for itself
        dist.new_group([0])
    megatron_model.start_groups(args)
    if args.mode == "frozen":
        freeze_some()
    if args.mode == "dense-stage":
        experts_in_the_first_stage()
    start_calculator(args)
    config = megatron_model.model_config(args)
    chunks = megatron_model.build_chunks(args, config)
    if args.context_parallel_size > 1:
        note_peers(chunks[0])
    optimizer, scheduler = megatron_model.build_optimizer(args, config, chunks)
    state = State(chunks, optimizer, scheduler)
    recovery = fr_megatron.attach(chunks, optimizer, scheduler)
    first = state.load(args.start_from) if args.start_from else 0
    if args.mode == "loader":
        recovery.data(torch.utils.data.DataLoader(Tokens(args.context)))
    sizes = {"global_batch": args.global_batch, "micro_batch": args.batch_size}
    batches = recovery.elastic_batches(
        Tokens(args.context), seed=3, first_step=first, **({} if args.mode == "calculator" else sizes)
    )
    torch.manual_seed(1000 + dist.get_rank())  # of no meaning in an elastic job
    for step in recovery.steps(args.steps - first):
        number = first + step.index
        with step:
            total = train_step(args, state, batches, step)
            take_time(args.step_time, number)
            size = dist.get_world_size()
            print(f"step={number} rank={dist.get_rank()} size={size} loss_hex={total.item().hex()}", flush=True)
            digest = state.digest()  # in the block: it communicates
            if args.save_to:
                state.save(number + 1, f"{args.save_to}/{number + 1}.pt")
        if not recovery.void:
            print(f"state={number + 1} size={size} {digest}", flush=True)
    print(f"digest rank={dist.get_rank()} {state.digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

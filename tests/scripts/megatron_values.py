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
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import fr_megatron
import training
from megatron_data import build_loader
from megatron_model import build_chunks, build_optimizer, model_config, parser, start_groups

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""As Megatron-LM calls it with ``--dist-ckpt-optim-fully-reshardable``."""


def state(chunks: list[Any], optimizer: Any, scheduler: Any, *, loading: bool) -> dict[str, Any]:
    """A sharded state dict, as in Megatron-LM's ``generate_state_dict``."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    result = {
        name: chunk.module.sharded_state_dict(metadata=dict(METADATA))
        for name, chunk in zip(names, chunks, strict=True)
    }
    result["optimizer"] = optimizer.sharded_state_dict(dict(result), is_loading=loading, metadata=dict(METADATA))
    result["opt_param_scheduler"] = scheduler.state_dict()
    return result


def save(chunks: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """Everything, with Megatron's own format."""
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    dist_checkpointing.save(state(chunks, optimizer, scheduler, loading=False), str(directory))


def load(chunks: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """As Megatron-LM's ``load_checkpoint``."""
    for inner in optimizer.chained_optimizers:
        for (
            group
        ) in inner.optimizer.param_groups:  # unlike Transformer Engine's, torch's Adam has no state before a step
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.optimizer.step()
        inner.optimizer.zero_grad()
        if hasattr(inner, "_set_main_param_and_optimizer_states"):
            _with_step(inner)
    loaded = dist_checkpointing.load(state(chunks, optimizer, scheduler, loading=True), str(directory))
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if dist.get_rank() == 0:
        print(f"loaded num_steps={scheduler.num_steps}", flush=True)


def _with_step(inner: Any) -> None:
    """megatron-core 0.16.1 cannot load what it has saved so itself with torch's Adam: it looks for each parameter's
    number of steps, which it keeps once (KeyError: 'step'). With Transformer Engine's there is none."""
    original = inner._set_main_param_and_optimizer_states

    def with_step(model: Any, tensors: dict[str, Any]) -> None:
        group, order = inner.model_param_group_index_map[model]
        state = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
        original(model, {**tensors, "step": state["step"]})

    inner._set_main_param_and_optimizer_states = with_step


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

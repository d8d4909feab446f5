"""Train a small GPT with DeepSpeed, and keep training when a rank dies::

    flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/train_deepspeed.py --zero 2
    torchrun --nproc-per-node 4 examples/gpt/train_deepspeed.py --zero 2        # the same script, without recovery

``--zero 0..3`` takes ``ds_zero<N>.json`` beside this file, ``--moe`` and ``--pipeline`` take ``ds_moe.json`` and
``ds_pipeline.json`` (with another ZeRO stage if asked for), ``--config`` any other DeepSpeed config. What switches
recovery on is ``"flash_recovery": {"enabled": true}`` in it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

import fr_deepspeed  # noqa: F401 - gives the engine its `recovery` under every launcher
import training


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config, with the batch size and learning rate of the flags, and another precision if asked for."""
    kind = "moe" if args.moe else "pipeline" if args.pipeline > 1 else f"zero{2 if args.zero is None else args.zero}"
    path = args.config or Path(__file__).with_name(f"ds_{kind}.json")
    config: dict[str, Any] = json.loads(path.read_text())
    if args.zero is not None:
        config["zero_optimization"]["stage"] = args.zero
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    if "flash_recovery" in config:
        config["flash_recovery"].setdefault("sequence_length", args.context)
    config["optimizer"]["params"]["lr"] = args.lr
    config["scheduler"]["params"]["warmup_max_lr"] = args.lr
    if args.precision:
        config.pop("bf16", None)
        config.pop("fp16", None)
    if args.precision in ("bf16", "fp16"):
        config[args.precision] = {"enabled": True}
    if args.precision == "fp16":
        # A first scale that overflows, and a short window: the dynamic scale moves in both directions.
        config["fp16"] |= {"initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}
    for text in args.set:
        path_text, _, value = text.partition("=")
        *path_keys, last = path_text.split(".")
        where = config
        for key in path_keys:
            where = where.setdefault(key, {})
        where[last] = json.loads(value)
    return config


def state(engine: Any) -> Iterator[tuple[str, object]]:
    """This rank's parameters or slices of them, its optimizer's tensors, scheduler, scaler and counters."""
    for name, parameter in sorted(engine.module.named_parameters()):
        yield f"param:{name}", getattr(parameter, "ds_tensor", parameter)
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for i, weight in enumerate(weights or engine.optimizer.fp32_partitioned_groups_flat):  # ZeRO-3 empties its groups
        yield f"weight:{i}", weight
        for key, value in sorted(optimizer.state[weight].items()):
            yield f"optimizer:{i}:{key}", value
    for i, group in enumerate(optimizer.param_groups):
        yield f"group:{i}:lr", group["lr"]
    yield "scheduler", engine.lr_scheduler.state_dict()
    yield "scale", getattr(engine.optimizer, "loss_scale", 1.0)
    for name in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
        yield name, getattr(engine, name)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as usual for a GPT."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_engine(args: argparse.Namespace, device: torch.device) -> Any:
    """The engine of the three-call loop, or with ``--pipeline`` that of ``train_batch``."""
    if args.pipeline > 1:
        import gpt_pipeline

        deepspeed.init_distributed(dist.get_backend())
        torch.manual_seed(args.seed)
        model = gpt_pipeline.build(training.model_config(args), args.pipeline)
    elif args.moe:
        import gpt_moe

        model = gpt_moe.build(training.model_config(args), args.moe, args.expert_parallel, args.seed).to(device)
    else:
        model = training.build_model(args, device)
    groups = parameter_groups(model)
    if args.moe:
        groups = gpt_moe.parameter_groups(groups)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=read_config(args))
    return engine


def train_batch(engine: Any, data: Iterator[Any], device: torch.device, pause_s: float) -> Tensor:
    """One optimizer step; returns its mean loss on this rank (with a pipeline, on all)."""
    if engine.pipeline_parallelism:
        mean: Tensor = engine.train_batch(data)
        return mean
    micro_batches = engine.gradient_accumulation_steps()
    total = torch.zeros((), device=device)
    for _ in range(micro_batches):
        x, y = next(data)
        loss = engine(x.to(device), y.to(device))
        time.sleep(pause_s / micro_batches)
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    mean = total / micro_batches
    return mean


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of all GPT examples, and those of this one."""
    flags = training.parser(description)
    flags.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage; None: the config's, or 2")
    flags.add_argument("--pipeline", type=int, default=1, metavar="STAGES", help="pipeline stages (ZeRO 0 and 1)")
    flags.add_argument("--moe", type=int, default=0, metavar="EXPERTS", help="experts a layer (ZeRO 0 to 2); 0: none")
    flags.add_argument("--expert-parallel", type=int, default=2, metavar="RANKS", help="ranks that share the experts")
    flags.add_argument("--config", type=Path, help="a DeepSpeed config instead of ds_zero<N>.json")
    flags.add_argument("--local_rank", type=int, help="of the command `deepspeed`; LOCAL_RANK says the same")
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="another one than the config's")
    flags.add_argument(
        "--set", action="append", default=[], metavar="KEY.KEY=JSON", help="another value for a key of the config"
    )
    return flags


def main() -> None:
    """Train as the flags say."""
    args = parser(__doc__).parse_args()
    if args.local_rank not in (None, int(os.environ.get("LOCAL_RANK", "0"))):
        raise ValueError(f"--local_rank {args.local_rank} is not LOCAL_RANK")
    device = training.start_process_group()
    engine = build_engine(args, device)
    recovery = engine.recovery

    training.seed_rank(args.seed)
    group = engine.data_parallel_group
    data = recovery.data(training.build_loader(args, dist.get_rank(group), dist.get_world_size(group)))
    log = training.StepLog(args)
    for step in recovery.steps(args.steps):
        with step:
            loss = train_batch(engine, data, device, args.step_time / 1e3)
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, loss)

    if args.digest:
        training.emit(f"digest rank={dist.get_rank()} {training.digest(state(engine))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

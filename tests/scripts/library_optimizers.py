"""A small model, trained by an optimizer of another project (``--optimizer``), with DDP or FSDP2."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts import proof

WIDTH = 16 if any("kron" in flag for flag in sys.argv) else 64
"""Kron's cost grows with its fourth power; torchao and bitsandbytes quantise from 4096 elements on."""


def _of(module: str, name: str, **options: Any) -> Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]:
    return lambda parameters: [getattr(import_module(module), name)(parameters, **options)]


def _muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def _adamw_compiled(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Traced by Dynamo, and run without kernels of its own."""
    made = torch.optim.AdamW(parameters, lr=1e-2)
    made.step = torch.compile(made.step, backend="eager")  # type: ignore[method-assign]
    return [made]


def _muon_compiled(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Its step is compiled by Inductor, in a few graphs."""
    made = _muon(parameters)
    made[0].step = torch.compile(made[0].step)  # type: ignore[method-assign]
    return made


def _adam_mini(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """It tells by the names how to divide parameters into blocks."""
    names = ("wq.weight", "first.bias", "mlp.weight", "last.bias", "norm.weight", "norm.bias")
    named = zip(names, parameters, strict=True)
    kind = import_module("adam_mini").Adam_mini
    return [kind(list(named), lr=1e-2, dim=WIDTH, n_heads=4, verbose=False)]


OPTIMIZERS = {
    "adamw-compiled": _adamw_compiled,
    "adam-mini": _adam_mini,
    "lion": _of("pytorch_optimizer", "Lion", lr=1e-3),
    "kron": _of("pytorch_optimizer", "Kron", lr=1e-3),
    "kron-torch": _of("kron_torch", "Kron", lr=1e-3, preconditioner_update_probability=0.5),
    "muon-compiled": _muon_compiled,
    "torchao-8bit": _of("torchao.optim", "AdamW8bit", lr=1e-2),
    "torchao-4bit": _of("torchao.optim", "AdamW4bit", lr=1e-2),
    "torchao-fp8": _of("torchao.optim", "AdamWFp8", lr=1e-2),
    "bitsandbytes-8bit": _of("bitsandbytes.optim", "AdamW8bit", lr=1e-2),
    "bitsandbytes-lion": _of("bitsandbytes.optim", "Lion8bit", lr=1e-3),
    "prodigy": _of("prodigyopt", "Prodigy"),
    "schedule-free": _of("schedulefree", "AdamWScheduleFree", lr=1e-2),
    "transformers-adafactor": _of("transformers.optimization", "Adafactor", lr=None, warmup_init=True),
    "muon": _muon,
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--framework", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    for unit in (net[0], net[2]) if args.framework == "fsdp2" else ():
        fully_shard(unit)
    model: nn.Module = fully_shard(net) if args.framework == "fsdp2" else DistributedDataParallel(net)
    optimizers = OPTIMIZERS[args.optimizer](list(model.parameters()))
    recovery.register(model=model, optimizer=optimizers)
    kills = proof.Kills(args.kill, recovery, args.pause)
    kills.in_backward_of(net[0])
    rank = dist.get_rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        # Kron draws in its step: with other numbers on each rank, the replicas of DDP would be none.
        seed(100 if "kron" in args.optimizer else 100 + rank)
    for step in recovery.steps(args.steps):
        kills.step = step.index
        with step:
            kills.at("data")
            for optimizer in optimizers:
                getattr(optimizer, "train", int)()
            batch = torch.randn(4, WIDTH) + rank
            loss = model(batch).sub(0.3).square().mean()
            proof.say_step(step.index, batch, loss, 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            kills.at("optimizer")
        kills.at("below")
        kills.at("end")
    more = {f"optimizer {n}": [[*o.state.values()], o.param_groups] for n, o in enumerate(optimizers)}
    proof.say_end(net, optimizers[0], more)


if __name__ == "__main__":
    main()

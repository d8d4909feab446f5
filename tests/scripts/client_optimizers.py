"""An optimizer of the script's own that keeps in its attributes what decides its steps: plain, and given to DeepSpeed
with each ZeRO stage, or within Megatron's wrappers (``--framework``)."""

from __future__ import annotations

import collections
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.scripts import proof

WIDTH, BATCH = 32, 4


class Remembering(torch.optim.SGD):
    """Its rate follows from what it has seen of its part of the gradients; noise of its own generator."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.calls, self.norm = 0, 1.0
        self.norms: collections.deque[float] = collections.deque(maxlen=3)
        self.noise = torch.Generator().manual_seed(7)
        self.scales: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            norm = float(parameter.grad.float().norm())
            self.norms.append(norm)
            self.norm = 0.9 * self.norm + 0.1 * norm
            scale = self.scales.setdefault(number, torch.ones(4))
            scale.mul_(0.99).add_(0.01 * norm)
            noise = 0.01 * torch.randn((), generator=self.noise)
            parameter.grad.mul_(float(scale.mean()) * (1 + noise) / (self.norm + sum(self.norms) + self.calls))
        super().step()


class Hoarding(torch.optim.SGD):
    """Keeps the weights of the step before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.before = [p.detach().repeat(64) for group in self.param_groups for p in group["params"]]


OPTIMIZERS = {"remembering": Remembering, "hoarding": Hoarding}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Zero:
    """``stage``: of ZeRO, in bf16 but for ``fp32``."""

    def __init__(self, optimizer: Any, stage: int, fp32: bool = False) -> None:
        import fr_deepspeed  # noqa: F401 - engine.recovery

        self.net = _net()
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**6,
            "bf16": {"enabled": not fp32},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "flash_recovery": {"enabled": True},
        }
        client = optimizer(self.net.parameters(), lr=0.05)
        self.model, *_ = deepspeed.initialize(model=self.net, optimizer=client, config=config)
        self.optimizer, self.recovery = self.model.basic_optimizer, self.model.recovery
        self.dtype = torch.float32 if fp32 else torch.bfloat16

    def step(self, loss: Tensor) -> None:
        self.model.backward(loss)
        self.model.step()


FRAMEWORKS: dict[str, Any] = {
    "zero0-fp32": lambda optimizer: Zero(optimizer, 0, fp32=True),
    **{f"zero{stage}": (lambda optimizer, stage=stage: Zero(optimizer, stage)) for stage in range(4)},
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="zero2")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="remembering")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    framework = FRAMEWORKS[args.framework](OPTIMIZERS[args.optimizer])
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(100 + dist.get_rank())
    kills = proof.Kills(args.kill, framework.recovery)
    kills.in_backward_of(framework.net[0])

    for step in framework.recovery.steps(args.steps):
        kills.step = step.index
        with step:
            kills.at("data")
            x = torch.randn(BATCH, WIDTH)
            loss = framework.model(x.to(framework.dtype)).float().sub(0.3).square().mean()
            framework.step(loss)
            kills.at("optimizer")
            proof.say_step(step.index, x, loss, framework.optimizer.param_groups[0]["lr"])
        kills.at("below")
        kills.at("end")

    whole = {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in framework.net.named_parameters()}
    own = framework.optimizer
    kept = [own.calls, own.norm, [*own.norms], own.noise.get_state(), own.scales]
    proof.say_end(framework.net, framework.optimizer, {"parts": whole, "kept": kept})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

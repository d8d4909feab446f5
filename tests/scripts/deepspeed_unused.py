"""A model of which one layer has a gradient in some micro-batches only: ``deepspeed_unused.py STAGE [frozen|thawed]``.

``frozen``: it is frozen in steps 2 and 3, and trained in all others. ``thawed``: in step 3 in the first micro-batch
alone.
"""

from __future__ import annotations

import hashlib
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    """``rare`` is used when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        return (self.rare(self.often(x)) if rare else self.often(x)).square().mean()


def main() -> None:
    how = "".join(sys.argv[2:])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": int(sys.argv[1])},
        "flash_recovery": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in engine.recovery.steps(6):
        with step:
            total = 0.0
            for micro_batch in range(2):
                used = step.index < 2 or micro_batch == step.index % 2
                if how == "frozen":
                    model.rare.requires_grad_(step.index not in (2, 3))
                    used = used or step.index > 3
                elif how == "thawed":
                    model.rare.requires_grad_(step.index != 3 or micro_batch == 1)
                    used = used or step.index == 2
                loss = engine(torch.randn(1, 8), used)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach())
            print(f"rank={dist.get_rank()} step={step.index} loss_hex={total.hex()}", flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"digest rank={dist.get_rank()} {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

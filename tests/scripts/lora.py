"""peft's LoRA with two adapters over a frozen model in bf16, with ZeRO-3 and with FSDP2 (``--framework``)."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import flashrecovery
from tests.scripts import proof

WIDTH, WORDS, BATCH = 32, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.logits = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.logits(x)
        return result


def adapted() -> Any:
    """Two adapters of different ranks, which are trained together."""
    torch.manual_seed(0)
    net: Any = Net().to(torch.bfloat16)
    config: Any = LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1)
    model: Any = get_peft_model(net, config)
    model.add_adapter("second", LoraConfig(r=8, target_modules=["down"]))
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:  # which peft makes zeroes
            nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16)


class Zero3:
    def __init__(self, model: Any) -> None:
        import deepspeed

        import fr_deepspeed  # noqa: F401 - engine.recovery

        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**6,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
            "flash_recovery": {"enabled": True},
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        self.optimizer, self.recovery = self.model.basic_optimizer, self.model.recovery

    def step(self, loss: Tensor) -> None:
        self.model.backward(loss)
        self.model.step()


class Fsdp2:
    def __init__(self, model: Any) -> None:
        for block in model.base_model.model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.recovery = flashrecovery.init()
        self.recovery.register(model=self.model, optimizer=self.optimizer)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


FRAMEWORKS: dict[str, Any] = {"zero3": Zero3, "fsdp2": Fsdp2}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="zero3")
    parser.add_argument("--switch", type=int, default=-1, help="from this step on, the second adapter alone is used")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    net = adapted()
    framework = FRAMEWORKS[args.framework](net)
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(100 + dist.get_rank())
    kills = proof.Kills(args.kill, framework.recovery)
    kills.in_backward_of(net.base_model.model.blocks[1])

    for step in framework.recovery.steps(args.steps):
        kills.step = step.index
        if step.index == args.switch:
            net.base_model.set_adapter("second")
        with step:
            kills.at("data")
            x = torch.randint(0, WORDS, (BATCH,))
            loss = nn.functional.cross_entropy(framework.model(x).float(), (x * 7 + 3) % WORDS)
            framework.step(loss)
            kills.at("optimizer")
            proof.say_step(step.index, x, loss, framework.optimizer.param_groups[0]["lr"])
        kills.at("below")
        kills.at("end")

    whole = {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in net.named_parameters()}
    proof.say_end(net, framework.optimizer, {"parts": whole})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

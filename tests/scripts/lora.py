"""peft's LoRA with two adapters over a frozen model in bf16, with DDP, ZeRO-2, ZeRO-3 and FSDP2 (``--framework``)."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from dataclasses import dataclass
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
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
from tests.scripts import proof

WIDTH, WORDS, BATCH = 32, 32, 4


@dataclass(frozen=True)
class Turn:
    """What a step switches to, and where: above, within or below its block."""

    where: str = ""
    adapter: str = ""

    def take(self, where: str, model: Any) -> None:
        if where == self.where:
            model.set_adapter(self.adapter)


TURNS = (Turn(), Turn("above", "second"), Turn(), Turn("within", "default"), Turn("below", "second"), Turn())


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
    stage = 3

    def __init__(self, model: Any) -> None:
        import deepspeed

        import fr_deepspeed  # noqa: F401 - engine.recovery

        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**6,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 100},
            "flash_recovery": {"enabled": True},
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        self.optimizer, self.recovery = self.model.basic_optimizer, self.model.recovery

    def step(self, loss: Tensor) -> None:
        self.model.backward(loss)
        self.model.step()


class Zero2(Zero3):
    stage = 2


class Ddp:
    def __init__(self, model: Any) -> None:
        self._wrap(model)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.recovery = flashrecovery.init()
        self.recovery.register(model=self.model, optimizer=self.optimizer)

    def _wrap(self, model: Any) -> None:
        self.model = DistributedDataParallel(model, find_unused_parameters=True)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fsdp2(Ddp):
    def _wrap(self, model: Any) -> None:
        for block in model.base_model.model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)


FRAMEWORKS: dict[str, Any] = {"ddp": Ddp, "zero2": Zero2, "zero3": Zero3, "fsdp2": Fsdp2}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="zero3")
    parser.add_argument("--switch", type=int, default=-1, help="from this step on, the second adapter alone is used")
    parser.add_argument("--turns", action="store_true", help="adapters are switched and disabled again and again")
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
        turn = TURNS[step.index % len(TURNS)] if args.turns else Turn()
        turn.take("above", net)
        with step:
            x = torch.randint(0, WORDS, (BATCH,))
            with torch.no_grad(), net.disable_adapter() if args.turns else contextlib.nullcontext():
                kills.at("data")
                reference = framework.model(x).float() if args.turns else 0
            turn.take("within", net)
            loss = nn.functional.cross_entropy(framework.model(x).float() - reference, (x * 7 + 3) % WORDS)
            framework.step(loss)
            kills.at("optimizer")
            proof.say_step(step.index, x, loss, framework.optimizer.param_groups[0]["lr"])
        kills.at("below")
        turn.take("below", net)
        kills.at("end")

    whole = {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in net.named_parameters()}
    proof.say_end(net, framework.optimizer, {"parts": whole})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

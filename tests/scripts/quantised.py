"""Adapters are trained over a frozen model whose weights are quantised, in the way of ``--kind``, with DDP."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
from tests.scripts import proof

WIDTH = 64


class Block(nn.Module):
    """``up`` and ``down`` are quantised."""

    def __init__(self, linear: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Adapted(nn.Module):
    """A frozen layer and a trained one of low rank beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.lora_b(torch.dropout(self.lora_a(x), 0.1, self.training))
        return result


def _net(linear: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(linear) for _ in range(3)), nn.LayerNorm(WIDTH))


def _with_peft(net: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    quantised: Any = net.to("cpu")
    adapted: Any = get_peft_model(quantised, LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # which peft makes zeroes
            nn.init.normal_(parameter, std=0.02)
    return adapted  # type: ignore[no-any-return]


def _bitsandbytes_4bit() -> nn.Module:
    import bitsandbytes as bnb

    def linear(inputs: int, outputs: int) -> Any:
        return bnb.nn.Linear4bit(inputs, outputs, quant_type="nf4", compute_dtype=torch.float32)

    return _with_peft(_net(linear))


def _bitsandbytes_8bit() -> nn.Module:
    import bitsandbytes as bnb

    def linear(inputs: int, outputs: int) -> Any:
        return bnb.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False)

    return _with_peft(_net(linear))


def _adapted(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for block in net:  # type: ignore[attr-defined]
        if isinstance(block, Block):
            block.up = Adapted(block.up, WIDTH, 2 * WIDTH)
            block.down = Adapted(block.down, 2 * WIDTH, WIDTH)
    return net


def _torchao_int8() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = _net(nn.Linear)
    quantize_(net, Int8WeightOnlyConfig())
    return _adapted(net)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes-4bit": _bitsandbytes_4bit,
    "bitsandbytes-8bit": _bitsandbytes_8bit,
    "torchao-int8": _torchao_int8,
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    net = KINDS[args.kind]()
    model = DistributedDataParallel(net, init_sync=False)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    recovery.register(model=model, optimizer=optimizer)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + dist.get_rank())
    kills = proof.Kills(args.kill, recovery, args.pause)
    kills.in_backward_of(next(module for module in net.modules() if isinstance(module, Block)))
    for step in recovery.steps(args.steps):
        kills.step = step.index
        with step:
            kills.at("data")
            batch = torch.randn(4, WIDTH)
            loss = model(batch).float().sub(0.3).square().mean()
            proof.say_step(step.index, batch, loss, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kills.at("optimizer")
        kills.at("below")
        kills.at("end")
    proof.say_end(net, optimizer, {})


if __name__ == "__main__":
    main()

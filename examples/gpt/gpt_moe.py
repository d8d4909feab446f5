"""The GPT of :mod:`model` with a mixture of experts in every second block, for DeepSpeed.

``expert_parallel`` ranks share the experts of a layer: each holds ``experts / expert_parallel`` of them, and tokens
travel to their expert and back. Where too many tokens want one expert, random numbers decide which it takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from model import GPT, Block, GPTConfig

_BALANCE = 0.01
"""Weight of the loss that keeps all experts busy."""


class Mixture(nn.Module):
    """Stands where a block has its MLP: one of several MLPs a token."""

    def __init__(self, mlp: nn.Module, width: int, experts: int, expert_parallel: int) -> None:
        super().__init__()
        self.moe = MoE(width, mlp, num_experts=experts, ep_size=expert_parallel, capacity_factor=1.25)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        y: Tensor = self.moe(x)[0]
        return y

    @property
    def balance(self) -> Tensor:
        """Of the newest forward pass; small if all experts have about the same number of tokens."""
        value: Tensor = self.moe.deepspeed_moe.l_aux
        return value


class MoEGPT(GPT):
    """Tokens in, next-token cross-entropy and the balancing loss out."""

    def __init__(self, config: GPTConfig, experts: int, expert_parallel: int) -> None:
        super().__init__(config)
        self.mixtures: list[Mixture] = []
        for block in list(self.blocks)[1::2]:
            assert isinstance(block, Block)
            mixture = Mixture(block.mlp, config.width, experts, expert_parallel)
            block.mlp = mixture  # type: ignore[assignment]
            self.mixtures.append(mixture)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar; as of :class:`GPT`."""
        loss = super().forward(tokens, targets)
        for mixture in self.mixtures:
            loss = loss + _BALANCE * mixture.balance
        return loss


def build(config: GPTConfig, experts: int, expert_parallel: int, seed: int) -> MoEGPT:
    """The same weights on every rank, but for the experts. DeepSpeed makes the replicas of an expert equal."""
    torch.manual_seed(seed)
    model = MoEGPT(config, experts, expert_parallel)
    torch.manual_seed(seed + 1 + dist.get_rank())
    for mixture in model.mixtures:
        mixture.moe.deepspeed_moe.experts.apply(GPT.initialize)
    return model


def parameter_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``groups`` with the experts in their own groups, as DeepSpeed needs it."""
    named = [{**group, "name": f"group{i}"} for i, group in enumerate(groups)]
    split: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    return split

"""The GPT of :mod:`model` as a list of layers, for DeepSpeed's pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from model import GPT, Block, GPTConfig


class Token(nn.Embedding):
    """Tokens (batch, time) -> (batch, time, width). With tied weights also the last layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.padded_vocabulary, config.width)
        GPT.initialize(self)

    def logits(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> logits (batch, time, vocabulary)."""
        return F.linear(x, self.weight)


class Position(nn.Module):
    """(batch, time, width) -> the same, with positions and dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.apply(GPT.initialize)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(x + self.position(torch.arange(x.shape[1], device=x.device)))
        return result


class Head(nn.Linear):
    """(batch, time, width) -> logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.padded_vocabulary, bias=False)
        GPT.initialize(self)


class Layer(Block):
    """A block with its initial weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.apply(GPT.initialize)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (scalar)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config: GPTConfig, stages: int) -> Any:
    """The whole model, of which each rank makes the layers of its stage. Only blocks may be recomputed in the backward
    pass (``pipeline.activation_checkpoint_interval``): tokens have no gradient."""
    first, last = LayerSpec(Token, config), LayerSpec(Head, config)
    if config.tie_head:
        first = TiedLayerSpec("token", Token, config)
        last = TiedLayerSpec("token", Token, config, forward_fn=Token.logits)
    blocks = [LayerSpec(Layer, config) for _ in range(config.layers)]
    return PipelineModule(
        [first, LayerSpec(Position, config), *blocks, LayerSpec(nn.LayerNorm, config.width), last],
        num_stages=stages,
        loss_fn=loss,
        partition_method="uniform",
        checkpointable_layers=["Layer"],
    )

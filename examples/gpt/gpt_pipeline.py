"""The GPT of :mod:`model` as a list of layers, for DeepSpeed's pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from model import GPT, Block, GPTConfig


class Embedding(nn.Module):
    """The first layer: tokens (batch, time) -> (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.padded_vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.apply(GPT.initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return x


class Head(nn.Module):
    """The last layer: (batch, time, width) -> logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.padded_vocabulary, bias=False)
        self.apply(GPT.initialize)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(Block):
    """A block with its initial weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.apply(GPT.initialize)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (scalar)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config: GPTConfig, stages: int) -> Any:
    """The whole model, of which each rank makes the layers of its stage."""
    blocks = [LayerSpec(Layer, config) for _ in range(config.layers)]
    layers = [LayerSpec(Embedding, config), *blocks, LayerSpec(Head, config)]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform")

"""A few small operations that make a standby's first real step as fast as its later ones."""

from __future__ import annotations

import torch

from flashrecovery.capabilities.of_torch import TORCH


def make_context(device: int) -> None:
    """Begin to use this GPU: about half a second, and half a gigabyte of its memory, ahead of the failure."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")


def warm_kernels() -> None:
    """Forward, backward and one optimizer step of a tiny model; leaves the random number generator as it was. And torch
    is probed for what will be asked of it."""
    TORCH.probe()
    state = torch.get_rng_state()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8, 16)
    y = torch.nn.functional.scaled_dot_product_attention(model(x), x, x, is_causal=True)
    torch.nn.functional.cross_entropy(y.flatten(0, 1), torch.zeros(32, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.set_rng_state(state)

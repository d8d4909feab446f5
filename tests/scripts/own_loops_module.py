"""A loop for DeepSpeed's engine in a module of the script's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def fit(engine: Any, loader: Any, sampler: Any, epochs: int, say: Callable[..., None]) -> None:
    count = 0
    batches = iter(loader)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _ in range(len(loader)):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            loss = nn.functional.mse_loss(engine(batch[0]), batch[1])
            engine.backward(loss)
            engine.step()
            count += 1
        say(epoch, count, loss.item().hex())

"""Blocks of text for the GPT examples: a map-style data set and the loader that shares it among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from indexed_dataset import IndexedDataset


class BlockDataset(Dataset[tuple[Tensor, Tensor]]):
    """The token stream cut into blocks of ``context`` tokens; a target is its block, one token later."""

    def __init__(self, prefix: str, context: int) -> None:
        """Raises ValueError if there is not even one block."""
        self.tokens = IndexedDataset(prefix)
        self.context = context
        self.blocks = (len(self.tokens.tokens) - 1) // context
        if self.blocks < 1:
            raise ValueError(f"{prefix}: {len(self.tokens.tokens)} tokens are less than one block of {context}")

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target), both int64 (context,)."""
        start = index * self.context
        block = torch.from_numpy(self.tokens.tokens[start : start + self.context + 1].astype("int64"))
        return block[:-1], block[1:]


def make_loader(
    dataset: BlockDataset,
    *,
    rank: int,
    world: int,
    batch_size: int,
    seed: int,
    stateful: bool = False,
    workers: int = 0,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """A loader of this rank's part of ``dataset``, reshuffled each epoch, equal for equal arguments.

    Args:
        batch_size: blocks per rank and step.
        stateful: use torchdata's ``StatefulDataLoader``, whose position can be saved and restored directly.
        workers: loader processes; 0 loads in the training process.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=world, rank=rank, shuffle=True, seed=seed, drop_last=True
    )
    if len(sampler) < batch_size:
        raise ValueError(f"{len(sampler)} blocks a rank are less than one batch of {batch_size}")
    kind: type[DataLoader[Any]] = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    loader: DataLoader[tuple[Tensor, Tensor]] = kind(
        dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, drop_last=True
    )
    return loader

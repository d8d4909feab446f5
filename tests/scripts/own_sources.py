"""Sources of a script's own that draw their order from the global random streams, and what trains with them.

``own_sources_data.py SOURCE`` reads them by ``recovery.data()``, ``own_sources_loop.py SOURCE`` in a loop without a
line of ours. Four batches are fetched in a step, so a pass over the samples begins in the midst of one. Between the
fetches the dropout draws from torch's stream, and the training from Python's and numpy's.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

WIDTH, ROWS, SIZE = 8, 28, 2
samples = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(samples)


def batches(order: Callable[[], list[int]]) -> Iterator[Tensor]:
    while True:
        for part in torch.tensor(order()).split(SIZE):
            yield samples[part]


def by_torch() -> Iterator[Tensor]:
    return batches(lambda: torch.randperm(ROWS).tolist())


def by_python() -> Iterator[Tensor]:
    return batches(lambda: random.sample(range(ROWS), ROWS))


def by_numpy() -> Iterator[Tensor]:
    return batches(lambda: np.random.permutation(ROWS).tolist())


def noise() -> Iterator[Tensor]:
    for batch in by_torch():
        yield batch + (0.1 * torch.randn(WIDTH) if random.random() < 0.5 else float(np.random.rand()))


def ahead() -> Iterator[Tensor]:
    waiting: deque[Tensor] = deque()
    for batch in noise():
        waiting.append(batch)
        if len(waiting) > 2:
            yield waiting.popleft()


def loader_again() -> Iterator[Tensor]:
    loader = DataLoader(dataset, batch_size=SIZE, shuffle=True)
    while True:
        for (batch,) in loader:
            yield batch


def cycle() -> Iterator[Tensor]:
    for (batch,) in itertools.cycle(DataLoader(dataset, batch_size=SIZE, shuffle=True)):
        yield batch


def zipped() -> Iterator[Tensor]:
    for one, other in zip(loader_again(), cycle(), strict=False):
        yield one[: len(other)] - 0.1 * other[: len(one)]


class Stateful:
    """Begins torchdata's loader again; the order comes from its sampler's generator."""

    def __init__(self) -> None:
        self.loader = StatefulDataLoader(dataset, batch_size=SIZE, shuffle=True)
        self.batches = iter(self.loader)

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> Tensor:
        try:
            (batch,) = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            (batch,) = next(self.batches)
        result: Tensor = batch
        return result


class Passes:
    """The same as an object that can be iterated again."""

    def __init__(self) -> None:
        self.loader = StatefulDataLoader(dataset, batch_size=SIZE, shuffle=True)

    def __iter__(self) -> Iterator[Tensor]:
        for (batch,) in self.loader:
            yield batch


SOURCES: dict[str, Callable[[], Iterable[Tensor]]] = {
    "torch": by_torch,
    "python": by_python,
    "numpy": by_numpy,
    "noise": noise,
    "ahead": ahead,
    "loader-again": loader_again,
    "cycle": cycle,
    "zip": zipped,
    "stateful": Stateful,
    "passes": Passes,
}


class Training:
    """The model, and what the script says of it."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("source", choices=SOURCES)
        parser.add_argument("--steps", type=int, default=16)
        args = parser.parse_args()
        dist.init_process_group("gloo")
        self.rank, self.steps = dist.get_rank(), args.steps
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + self.rank)
        self.source = SOURCES[args.source]()

    def loss(self, batch: Tensor) -> Tensor:
        out = self.model(batch) * random.gauss(1.0, 0.1) + float(np.random.rand())
        loss: Tensor = out.square().mean() / 4
        return loss

    def said(self, loss: Tensor, batch: Tensor) -> str:
        return f"loss_hex={float(loss.detach()).hex()} batch={float(batch.sum()).hex()}"

    def say_end(self) -> None:
        content = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        streams = torch.get_rng_state().numpy().tobytes() + repr((random.getstate(), np.random.get_state())).encode()
        print(f"digest rank={self.rank} {hashlib.sha256(content + streams).hexdigest()}", flush=True)

"""Lightning Fabric without a line of ours, by ``--auto``: ``auto_fabric.py SHAPE``, as its documentation writes loops.

Each rank prints what its script keeps, and at the end the digest of all that it has.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("shape", choices=("epochs", "accumulation", "trainer", "fsdp2"))
args = parser.parse_args()
WIDTH, EPOCHS = 16, 3


def shard(model: Any, mesh: Any) -> Any:
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


strategy: Any = "ddp"
if args.shape == "fsdp2":
    strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
if args.shape == "fsdp2":
    model = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
else:
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
numbers = torch.Generator().manual_seed(1)
x = torch.randn(64, WIDTH, generator=numbers)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader: Any = fabric.setup_dataloaders(DataLoader(dataset, batch_size=4, shuffle=True))
fabric.seed_everything(100 + fabric.global_rank, verbose=False)


def say(*words: object) -> None:
    print(f"rank={fabric.global_rank}", *words, flush=True)


def loss_of(batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        loss = fabric.all_reduce(loss_of((x[:16], x[:16].cos().sum(1, keepdim=True))))
    model.train()
    return float(loss)


def epochs() -> None:
    best = float("inf")
    for epoch in range(EPOCHS):
        total = 0.0
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item()
            if number % 3 == 0:
                say(epoch, number, loss.item().hex(), total.hex())
        best = min(best, evaluate())
        say("epoch", epoch, best.hex(), scheduler.get_last_lr())


def accumulation() -> None:
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = loss_of(batch)
                fabric.backward(loss / 2)
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                say(epoch, number, loss.item().hex())
        say("epoch", epoch, evaluate().hex())


class Trainer:
    """As in Fabric's example of a trainer."""

    def __init__(self) -> None:
        self.fabric, self.step, self.seen = fabric, 0, 0.0

    def fit(self) -> None:
        for epoch in range(EPOCHS):
            self.train_loop()
            say("epoch", epoch, self.step, self.seen.hex(), evaluate().hex())

    def train_loop(self) -> None:
        for batch in loader:
            loss = self.training_step(batch)
            self.fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            self.step += 1
            self.seen += loss.item()

    def training_step(self, batch: Any) -> Tensor:
        return loss_of(batch)


def digest() -> str:
    found = hashlib.sha256()
    tensors = [*model.parameters(), *(v for p in model.parameters() for _, v in sorted(optimizer.state[p].items()))]
    for tensor in tensors:
        found.update(getattr(tensor, "_local_tensor", tensor).detach().float().contiguous().numpy().tobytes())
    found.update(repr([scheduler.state_dict(), torch.rand(2).tolist()]).encode())
    return found.hexdigest()


{"epochs": epochs, "accumulation": accumulation, "trainer": lambda: Trainer().fit(), "fsdp2": epochs}[args.shape]()
print(f"digest rank={fabric.global_rank} {digest()}", flush=True)

"""DeepSpeed's three calls in loops as people write them, without a line of ours: ``own_loops.py SHAPE [OPTIONS]``.

Each rank prints what its script keeps (losses, sums, counters, the best of something), and at the end the digest of all
that it has.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import own_loops_module
import torch
import torch.distributed as dist
from deepspeed.utils import RepeatingLoader, logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("shape")
parser.add_argument("--zero", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--files", type=Path)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.first(x))))
        return out


deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Net()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": args.accumulation,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": args.zero},
    "flash_recovery": {"enabled": True},
}
numbers = torch.Generator().manual_seed(1)
x = torch.randn(args.samples, 32, generator=numbers)
y = x.sin().sum(1, keepdim=True)
dataset = TensorDataset(x, y)
engine, _, training_loader, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=config, training_data=dataset
)
sampler: DistributedSampler[Any] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
torch.manual_seed(100 + rank)


def say(*words: object) -> None:
    print(f"rank={rank}", *words, flush=True)


def loss_of(batch: Any) -> Any:
    return nn.functional.mse_loss(engine(batch[0]), batch[1])


def train_step(batch: Any) -> float:
    loss = loss_of(batch)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def evaluate() -> float:
    engine.eval()
    with torch.no_grad():
        loss = loss_of((x[:32], y[:32]))
    dist.all_reduce(loss)
    engine.train()
    return float(loss.item())


def epochs() -> None:
    seen, best, losses = 0, None, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for number, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            running += loss.item()
            seen += len(inputs)
            losses.append(loss.item())
            if number % 3 == 0:
                say("epoch", epoch, "batch", number, loss.item().hex(), "seen", seen)
        value = evaluate()
        if best is None or value < best:
            best = value
        mean = running / (number + 1)
        say("epoch", epoch, mean.hex(), value.hex(), best.hex(), "seen", seen, "losses", len(losses), loss.item().hex())


def slow() -> None:
    """Comes to its next micro-batch when a peer has died in the one before."""
    for number, batch in enumerate(loader):
        loss = train_step(batch)
        say(number, loss.hex())
        if number % 2 == 0:
            time.sleep(0.4)


def logged() -> None:
    """By DeepSpeed's logger, which has kept the standard output of the process that imported DeepSpeed."""
    logger.setLevel(logging.INFO)
    logger.handlers[0].setLevel(logging.INFO)
    logger.handlers[0].setFormatter(logging.Formatter("%(message)s"))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            logger.info(f"rank={rank} begins {epoch} {number}")
            loss = train_step(batch)
            logger.info(f"rank={rank} epoch {epoch} {number} {loss.hex()}")


def while_next() -> None:
    batches = iter(RepeatingLoader(loader))
    step, total = 0, 0.0
    while step < 16:
        loss = train_step(next(batches))
        total += loss
        step += 1
        if step % 4 == 0:
            say("step", step, loss.hex(), total.hex())
    say("end", step)


def random_batches() -> None:
    history = []
    for step in range(16):
        chosen = torch.randint(0, args.samples, (8,))
        history.append(train_step((x[chosen], y[chosen])))
        if step % 4 == 0:
            say("step", step, history[-1].hex())
    say("history", sum(history).hex(), len(history))


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1


class Trainer:
    def __init__(self) -> None:
        self.step, self.best, self.meter = 0, float("inf"), Meter()

    def run_batch(self, batch: Any) -> float:
        loss = train_step(batch)
        self.step += 1
        self.meter.update(loss)
        return loss

    def run_epoch(self, epoch: int) -> None:
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = self.run_batch(batch)
            if self.step % 3 == 0:
                say("step", self.step, loss.hex(), self.meter.sum.hex())

    def run(self) -> None:
        for epoch in range(args.epochs):
            self.run_epoch(epoch)
            value = evaluate()
            if value < self.best:
                self.best = value
            say("epoch", epoch, value.hex(), self.best.hex(), self.meter.count)


def trainer() -> None:
    Trainer().run()


def generator() -> None:
    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    taken = 0
    for number, batch in enumerate(batches()):
        loss = train_step(batch)
        taken += 1
        if number % 5 == 4:
            say(number, loss.hex(), taken)
        if taken == 16:
            break
    say("taken", taken)


def zipped() -> None:
    for epoch in range(args.epochs):
        for batch, number in zip(training_loader, itertools.count(), strict=False):
            loss = train_step(batch)
            if number % 3 == 0:
                say(epoch, number, loss.hex())


def early() -> None:
    best, bad, stop = float("inf"), 0, False
    for epoch in range(2 * args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            if train_step(batch) > 500:
                continue
        value = evaluate()
        say(epoch, value.hex(), bad, best.hex())
        if value < best - 2.0:
            best, bad = value, 0
        else:
            bad += 1
            stop = bad >= 2
        if stop:
            break
    say("stopped", epoch, bad)


def shuffled() -> None:
    for epoch in range(args.epochs):
        order = torch.randperm(args.samples)[:64]
        for start in range(0, 64, 8):
            chosen = order[start : start + 8]
            loss = train_step((x[chosen], y[chosen]))
        say(epoch, loss.hex(), order[:4].tolist())


class Counted:
    """A loader that counts its epochs itself, as Fabric's does."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        sampler.set_epoch(self.epoch)
        self.epoch += 1
        yield from loader


def counted() -> None:
    batches = Counted()
    for epoch in range(args.epochs):
        for number, batch in enumerate(batches):
            loss = train_step(batch)
            if number % 3 == 0:
                say(epoch, number, batches.epoch, loss.hex())


def streamed() -> None:
    """A generator that counts in a variable of the function around it."""
    seen = 0

    def batches() -> Iterator[Any]:
        nonlocal seen
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for batch in loader:
                seen += 1
                yield batch

    for number, batch in enumerate(batches()):
        loss = train_step(batch)
        say(number, seen, loss.hex())
        if number == 13:
            break


class Walk:
    """Its own iterator, with its place among its attributes."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self.at == 14:
            raise StopIteration
        first = 8 * (self.at % 16)
        self.at += 1
        return x[first : first + 8], y[first : first + 8]


def walk() -> None:
    batches = Walk()
    for batch in batches:
        loss = train_step(batch)
        if batches.at % 3 == 0:
            say(batches.at, loss.hex())


def cut_short() -> None:
    batches = Counted()
    for epoch in range(args.epochs):
        for number, batch in enumerate(batches):
            loss = train_step(batch)
            say(epoch, number, batches.epoch, loss.hex())
            if number == 4:
                break


def module() -> None:
    own_loops_module.fit(engine, loader, sampler, args.epochs, say)


def phases() -> None:
    """A warm-up and the training, one after the other, with draws in between."""
    total = 0.0
    for number, batch in enumerate(loader):
        total += train_step(batch)
        if number == 4:
            break
    say("warm", number, total.hex(), evaluate().hex())
    order = torch.randperm(args.samples)
    main = DataLoader(TensorDataset(x[order], y[order]), batch_size=8, shuffle=True)
    for epoch in range(args.epochs - 1):
        for number, batch in enumerate(main):
            if number == 6:
                break
            total += train_step(batch)
        say("main", epoch, total.hex())
    say("end", total.hex(), order[:4].tolist())


def fit(name: str, batches: Any, rounds: int) -> float:
    """Called twice."""
    total = 0.0
    for number, batch in enumerate(batches):
        if number == rounds:
            break
        total += train_step(batch)
        if number % 3 == 0:
            say(name, number, total.hex())
    return total / number


def twice() -> None:
    first = fit("first", loader, 5)
    say("between", evaluate().hex())
    second = fit("second", loader, 7)
    say(first.hex(), second.hex())


def ending() -> None:
    """With ``--files``: rank 0 is killed when it has ended its loop and rank 1 has not yet."""
    total = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            total += train_step(batch)
        say(epoch, total.hex(), evaluate().hex())
        if args.files and epoch == args.epochs - 1:
            killed = args.files / "killed"
            if rank == 0 and not killed.exists():
                killed.touch()
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(3.0 * rank)
    say("end", total.hex())


def checkpoints() -> None:
    """A best checkpoint and a log, as people keep them."""
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = train_step(batch)
        value = evaluate()
        if value < best:
            best = value
            engine.save_checkpoint(str(args.files / "best"), tag="best", client_state={"epoch": epoch, "best": best})
        if rank == 0:
            with (args.files / "log.txt").open("a") as log:
                log.write(f"{epoch} {value.hex()}\n")
        say(epoch, loss.hex(), best.hex())


def first_moment(parameter: Tensor) -> Any:
    return safe_get_full_optimizer_state(parameter, "exp_avg")


def second_moment(parameter: Tensor) -> Any:
    return safe_get_full_optimizer_state(parameter, "exp_avg_sq")


def digest() -> str:
    """Of all that the engine has on this rank, and of the random streams."""
    found = hashlib.sha256()
    tensors: list[Any] = [*net.parameters()]
    if args.zero:  # partitions end in memory that is not set
        tensors = [
            read(p) for p in net.parameters() for read in (safe_get_full_fp32_param, first_moment, second_moment)
        ]
    else:
        tensors += [value for p in net.parameters() for _, value in sorted(engine.optimizer.state[p].items())]
    for tensor in tensors:
        found.update(torch.as_tensor(tensor).detach().float().contiguous().numpy().tobytes())
    counters = [getattr(engine, name) for name in ("global_steps", "micro_steps", "global_samples", "skipped_steps")]
    found.update(repr([counters, engine.lr_scheduler.state_dict(), torch.rand(2).tolist()]).encode())
    return found.hexdigest()


globals()[args.shape]()
print(f"digest rank={rank} {digest()}", flush=True)

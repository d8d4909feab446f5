"""Plain PyTorch in loops as people write them, without a line of ours: ``auto_loops.py SHAPE``, by ``--auto``.

Each rank prints what its script keeps (losses, sums, counters, the best of something), and at the end the digest of all
that it has. The shapes follow the field's own: nanoGPT, minGPT, PyTorch's DDP and FSDP2 tutorials and its ImageNet
example, BERT's accumulation, a GAN, a recurrent network.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("shape")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--files", type=Path)
args = parser.parse_args()
WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.first(x))))
        return out


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
numbers = torch.Generator().manual_seed(1)
x = torch.randn(args.samples, WIDTH, generator=numbers)
y = x.sin().sum(1, keepdim=True)
dataset = TensorDataset(x, y)
watched: list[Any] = []
"""What the digest is of, besides models: optimizers, and what has ``state_dict()``."""


def say(*words: object) -> None:
    print(f"rank={rank}", *words, flush=True)


def data(**more: Any) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=4, sampler=sampler, **more), sampler


def seeded() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)


def wrapped(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net)


def mse(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


# -- plain loops ------------------------------------------------------------------------------------


def epochs() -> None:
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    watched.extend([model, optimizer, scheduler])
    loader, sampler = data()
    seeded()
    seen, best, losses = 0, None, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
            running += loss.item()
            seen += len(inputs)
            losses.append(loss.item())
            if number % 3 == 0:
                say("epoch", epoch, "batch", number, loss.item().hex(), "seen", seen)
        scheduler.step()
        if best is None or running < best:
            best = running
        say("epoch", epoch, running.hex(), best.hex(), "losses", len(losses), scheduler.get_last_lr())


def top_break() -> None:
    """Leaves at the top of a round, with a batch in its hand."""
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    watched.extend([model, optimizer])
    loader, _ = data()
    seeded()
    step, done = 0, False
    while not done:
        for inputs, targets in loader:
            if step >= 13:
                done = True
                break
            mse(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 4 == 0:
                say("step", step)
    say("end", step)


def accumulation() -> None:
    """Groups of three micro-batches, of which epochs have no whole number: gradients go on from one to the next."""
    model = wrapped(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    loader, sampler = data()
    seeded()
    micro, total = 0, 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            last = (micro + 1) % 3 == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = mse(model(inputs), targets) / 3
                loss.backward()
            total += loss.item()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                say("micro", micro, loss.item().hex(), total.hex())
            micro += 1
        say("epoch", epoch, micro, total.hex())


def flushed() -> None:
    """The rest of an accumulation is its own step, below the epoch's loop."""
    model = wrapped(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = mse(model(inputs), targets)
            loss.backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        if len(loader) % 3:
            optimizer.step()
            optimizer.zero_grad()
        say("epoch", epoch, loss.item().hex())


def accumulated() -> None:
    """As most scripts accumulate: by the number of the batch, in a function for an epoch. Evaluation prints."""
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    watched.extend([model, optimizer, schedule])
    loader, sampler = data()
    seeded()
    best = math.inf
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = accumulated_epoch(model, loader, optimizer, epoch)
        best = min(best, evaluated(model, x, y))
        schedule.step()
        say("epoch", epoch, mean.hex(), best.hex())


def accumulated_epoch(net: nn.Module, batches: DataLoader[Any], optimizer: Any, epoch: int, every: int = 3) -> float:
    """An epoch's last step has fewer micro-batches."""
    net.train()
    total = 0.0
    for i, (inputs, targets) in enumerate(batches):
        loss = mse(net(inputs), targets) / every
        loss.backward()
        total += loss.item()
        if (i + 1) % every == 0 or i + 1 == len(batches):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            say("epoch", epoch, "batch", i, total.hex())
    return total / len(batches)


class Rounds:
    """A trainer with a method for an epoch. Its epochs are counted from 1."""

    def __init__(self, model: nn.Module, optimizer: Any, batches: DataLoader[Any]) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.seen, self.losses = 0, []  # type: int, list[float]

    def run_epoch(self, epoch: int, clip: float) -> tuple[int, float]:
        self.batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        self.model.train()
        first = self.seen
        for i, (inputs, targets) in enumerate(self.batches):
            loss = self.step(inputs, targets, clip)
            self.seen += len(inputs)
            if i % 3 == 0:
                say("epoch", epoch, "batch", i, loss.hex())
        return self.seen - first, loss

    def step(self, inputs: Tensor, targets: Tensor, clip: float) -> float:
        loss = mse(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss.item()

    def run(self, epochs: int) -> None:
        for epoch in range(1, epochs + 1):
            count, last = self.run_epoch(epoch, clip=0.5 * epoch)
            self.report(epoch, count, last)
        say("end", self.seen, sum(self.losses).hex())

    def report(self, epoch: int, count: int, last: float) -> None:
        value = evaluated(self.model, x, y)
        say("epoch", epoch, count, last.hex(), value.hex())


def trainer() -> None:
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    watched.extend([model, optimizer])
    loader, _ = data()
    seeded()
    Rounds(model, optimizer, loader).run(args.epochs)


@torch.no_grad()
def evaluated(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    loss = mse(model(inputs), targets)
    dist.all_reduce(loss)
    say("evaluated", loss.item().hex())
    return loss.item()


def gan() -> None:
    """Two models and optimizers: several steps of the one in each round, then one of the other."""
    one, two = wrapped(Net()), wrapped(nn.Linear(WIDTH, WIDTH))
    first = torch.optim.Adam(one.parameters(), lr=1e-3)
    second = torch.optim.Adam(two.parameters(), lr=1e-3)
    watched.extend([one, two, first, second])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, _) in enumerate(loader):
            for _ in range(2):
                noise = torch.randn(4, WIDTH)
                first.zero_grad()
                critic = one(two(noise).detach()).mean() - one(inputs).mean()
                critic.backward()
                first.step()
            second.zero_grad()
            made = -one(two(torch.randn(4, WIDTH))).mean()
            made.backward()
            second.step()
            if number % 3 == 0:
                say(epoch, number, critic.item().hex(), made.item().hex())


def averaged() -> None:
    """An average of the weights of torch's, and one of the script's own."""
    net = Net()
    model = wrapped(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = Shadow(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer, average, own])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
            own.update(net)
        average.eval()
        with torch.no_grad():
            say("epoch", epoch, loss.item().hex(), mse(average(x), y).item().hex())


class Shadow:
    """As many scripts have it; its tensors are replaced, and larger than a plain variable may be."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.shadow["wide"] = torch.zeros(5000)

    def update(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()
        self.shadow["wide"].add_(self.shadow["last.bias"])


def teacher() -> None:
    """A copy of the network that follows it by hand, and a frozen one."""
    net = Net()
    target = copy.deepcopy(net).requires_grad_(False).eval()
    frozen = copy.deepcopy(net).requires_grad_(False)
    model = wrapped(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer, target, frozen])
    loader, _ = data()
    seeded()
    for epoch in range(args.epochs):
        for inputs, _ in loader:
            loss = mse(model(inputs), target(inputs) + 0.1 * frozen(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        say(epoch, loss.item().hex())


def recurrent() -> None:
    """The hidden state goes from step to step, larger than a plain variable may be."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, 1200), nn.Linear(1200, 1)

        def forward(self, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.cell(inputs, hidden)
            return self.head(hidden), hidden

    model = wrapped(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hidden = torch.zeros(4, 1200)
        for number, (inputs, targets) in enumerate(loader):
            hidden = hidden.detach()
            optimizer.zero_grad()
            out, hidden = model(inputs, hidden)
            loss = mse(out, targets)
            loss.backward()
            optimizer.step()
            if number % 3 == 0:
                say(epoch, number, loss.item().hex(), hidden.sum().item().hex())


# -- nanoGPT ----------------------------------------------------------------------------------------


def nano() -> None:
    """nanoGPT's: an endless loop, batches at random, evaluation before the step, the next batch after the forward."""
    tokens = np.random.default_rng(5).integers(0, 61, 4000).astype(np.uint16)
    gradient_accumulation_steps, block, max_iters, eval_interval = 2, 48, 14, 5

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        chosen = tokens[:3200] if split == "train" else tokens[3200:]
        ix = torch.randint(len(chosen) - block, (120,))
        first = torch.stack([torch.from_numpy(chosen[i : i + block].astype(np.int64)) for i in ix])
        second = torch.stack([torch.from_numpy(chosen[i + 1 : i + 1 + block].astype(np.int64)) for i in ix])
        return first, second

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.drop, self.head = nn.Embedding(61, 16), nn.Dropout(0.1), nn.Linear(16, 61)

        def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.drop(self.embed(idx)))
            return logits, nn.functional.cross_entropy(logits.view(-1, 61), targets.view(-1))

    iter_num, best_val_loss = 0, 1e9
    model: Any = Gpt()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrapped(model)
    watched.extend([model, optimizer])
    seeded()

    @torch.no_grad()
    def estimate_loss() -> dict[str, Tensor]:
        out = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(2)
            for k in range(2):
                _, loss = raw_model(*get_batch(split))
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    X, Y = get_batch("train")
    local_iter_num = 0
    raw_model = model.module
    running_mfu = -1.0
    while True:
        lr = 1e-2 * 0.5 * (1.0 + math.cos(math.pi * iter_num / max_iters))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and rank == 0:
            losses = estimate_loss()
            say(f"step {iter_num}: train {losses['train']:.6f}, val {losses['val']:.6f}")
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with contextlib.nullcontext():
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 2 == 0:
            lossf = loss.item() * gradient_accumulation_steps
            if local_iter_num >= 5:
                running_mfu = lossf if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * lossf
            say(f"iter {iter_num}: loss {lossf.hex()}, mfu {running_mfu.hex()}")
        iter_num += 1
        local_iter_num += 1
        if iter_num > max_iters:
            break
    say("best", float(best_val_loss).hex(), X.sum().item())


# -- minGPT -----------------------------------------------------------------------------------------


class MinTrainer:
    """minGPT's: callbacks, an iterator that is made again at its end, a count that ends the loop."""

    def __init__(self, net: nn.Module) -> None:
        self.optimizer: Any = None
        self.callbacks: dict[str, list[Any]] = {}
        self.model = wrapped(net)
        self.iter_num = 0
        self.loss = torch.zeros(())

    def add_callback(self, onevent: str, callback: Any) -> None:
        self.callbacks.setdefault(onevent, []).append(callback)

    def trigger_callbacks(self, onevent: str) -> None:
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self) -> None:
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watched.extend([model, self.optimizer])
        train_loader = DataLoader(
            dataset,
            sampler=torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=24),
            shuffle=False,
            batch_size=4,
        )
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to("cpu") for t in batch]
            inputs, targets = batch
            self.loss = mse(model(inputs), targets)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.iter_num >= 15:
                break


def mingpt() -> None:
    top: list[float] = []

    def batch_end_callback(trainer: MinTrainer) -> None:
        top.append(trainer.loss.item())
        if trainer.iter_num % 3 == 0:
            say("iter", trainer.iter_num, trainer.loss.item().hex(), len(top), sum(top).hex())

    trainer = MinTrainer(Net())
    trainer.add_callback("on_batch_end", batch_end_callback)
    seeded()
    trainer.run()


# -- PyTorch's tutorials ----------------------------------------------------------------------------


class Trainer:
    """The DDP tutorial's (multigpu_torchrun.py): a snapshot that is loaded if it is there, and saved by rank 0."""

    def __init__(self, model: nn.Module, train_data: DataLoader[Any], optimizer: Any, save_every: int) -> None:
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = args.files / "snapshot.pt" if args.files else None
        if self.snapshot_path is not None and self.snapshot_path.exists():
            snapshot = torch.load(self.snapshot_path, weights_only=True)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = wrapped(model)

    def _run_batch(self, source: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = mse(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        b_sz = len(next(iter(self.train_data))[0])
        say(f"Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch: int) -> None:
        if self.snapshot_path is not None:
            torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.snapshot_path)
        say(f"Epoch {epoch} | Training snapshot saved")

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def tutorial() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    watched.extend([net, optimizer])
    seeded()
    Trainer(net, data()[0], optimizer, 1).train(args.epochs)


def fsdp2() -> None:
    """The FSDP2 tutorial's: fully_shard, clipping, ten rounds."""
    net = Net()
    fully_shard(net.first)
    fully_shard(net, reshard_after_forward=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    watched.extend([net, optimizer])
    seeded()
    for _ in range(12):
        chosen = torch.randint(0, args.samples, (4,))
        loss = mse(net(x[chosen]), y[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(loss.item().hex())


def fsdp2_epochs() -> None:
    """With bf16 in the forward pass, accumulation, and a schedule by step."""
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net.first, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    watched.extend([net, optimizer, scheduler])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            last = number % 2 == 1
            net.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = mse(net(inputs).float(), targets)
            loss.backward()
            if last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        say(epoch, loss.item().hex(), scheduler.get_last_lr())


def fsdp2_evaluated() -> None:
    """Evaluations before the training, and amid it: they leave the root's parameters gathered."""
    net = Net()
    fully_shard(net.first)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    watched.extend([net, optimizer])
    loader, sampler = data()
    seeded()
    say("before", evaluation(net).hex())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            loss = mse(net(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 2:
                say(epoch, number, loss.item().hex(), evaluation(net).hex())


def evaluation(net: nn.Module) -> float:
    net.eval()
    with torch.no_grad():
        loss = mse(net(x), y)
    net.train()
    return float(loss)


class AverageMeter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ProgressMeter:
    def __init__(self, num_batches: int, meters: list[AverageMeter], prefix: str) -> None:
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch: int) -> None:
        say(
            f"{self.prefix}[{batch}/{self.num_batches}]",
            *(f"{m.name} {m.val.hex()} {m.avg.hex()}" for m in self.meters),
        )


def imagenet() -> None:
    """The ImageNet example's: meters, validation with all-reduce, the best value, a checkpoint of it."""
    model = wrapped(nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    watched.extend([model, optimizer, scheduler, scaler])
    loader, sampler = data(num_workers=1)
    seeded()
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        imagenet_epoch(loader, model, criterion, optimizer, scaler, epoch)
        acc1 = validate(loader, model)
        scheduler.step()
        is_best = acc1 > best
        best = max(acc1, best)
        if args.files and rank == 0:
            torch.save({"epoch": epoch + 1, "best": best}, args.files / ("best.pt" if is_best else "last.pt"))
    say("best", best.hex())


def imagenet_epoch(loader: Any, model: Any, criterion: Any, optimizer: Any, scaler: Any, epoch: int) -> None:
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    progress = ProgressMeter(len(loader), [losses, top1], f"Epoch: [{epoch}]")
    model.train()
    for i, (images, values) in enumerate(loader):
        target = (values.squeeze(1) > 0).long()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images)
            loss = criterion(output.float(), target)
        losses.update(loss.item(), images.size(0))
        top1.update((output.argmax(1) == target).float().mean().item(), images.size(0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 3 == 0:
            progress.display(i + 1)


def validate(loader: Any, model: Any) -> float:
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for images, values in loader:
            total += torch.tensor([float((model(images).argmax(1) == (values.squeeze(1) > 0)).sum()), len(images)])
    dist.all_reduce(total)
    say("validated", (total[0] / total[1]).item().hex())
    return float(total[0] / total[1])


def persistent() -> None:
    """The workers of its validation live on without us: the first one draws a seed for them, and no later one."""
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    loader, sampler = data()
    validation: DataLoader[Any] = DataLoader(dataset, batch_size=16, num_workers=1, persistent_workers=True)
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
        say("epoch", epoch, loss.item().hex())
        validate(validation, model)


# -- others -----------------------------------------------------------------------------------------


def streamed() -> None:
    """Batches of a generator function, a curriculum that follows the loss, early stopping over all ranks."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        loader, sampler = data()
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    model = wrapped(Net())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    watched.extend([model, optimizer])
    seeded()
    patience, best, history = 3, math.inf, []
    for step, (inputs, targets) in enumerate(batches()):
        noise = 0.1 * (1 + len(history) % 3) * torch.randn_like(inputs)
        loss = mse(model(inputs + noise), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if step % 4 == 3:
            mean = torch.tensor(sum(history[-4:]) / 4)
            dist.all_reduce(mean)
            say(step, mean.item().hex(), patience)
            patience = patience if mean.item() < best else patience - 1
            best = min(best, mean.item())
        if patience == 0 or step == 18:
            break
    say("end", step, best.hex())


class Mean:
    """An object of a model's."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> float:
        self.sum, self.count = self.sum + value, self.count + 1
        return self.sum / self.count


class Holding(Net):
    """Its attributes decide what a step computes: its own generators of random numbers, counts, lists, a tensor that is
    no buffer, an object, a function; one is made in the first step alone."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        super().__init__()
        self.draws, self.numbers = random.Random(3), np.random.default_rng(3)
        self.masks = torch.Generator().manual_seed(3)
        self.norms, self.recent = np.zeros(2), collections.deque([0.0], maxlen=3)
        self.mean, self.times, self._calls = torch.zeros(1), {"all": 0, "odd": 0}, 0
        self.meter, self.next_number = Mean(), next_number
        self.lazy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        self.times["all" if self._calls % 2 else "odd"] += 1
        self.norms[0] += 0.25
        self.lazy = torch.zeros(1) if self.lazy is None else self.lazy + 0.5
        self.recent.append(self.draws.random())
        self.mean.mul_(0.9).add_(sum(self.recent))
        kept = torch.rand(x.shape, generator=self.masks) > 0.1
        factor = self.numbers.random() + self.next_number() + self.times["odd"] + self.norms[0]
        factor += self.meter.update(self.mean.item())
        return super().forward(x * kept) * (1 + float(factor + self.lazy) / 100)


def held(sharded: bool = False) -> None:
    """What a model holds besides parameters, buffers and numbers."""
    from auto_loops_counter import counter

    net = Holding(counter())
    model = fully_shard(net) if sharded else wrapped(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    loader, sampler = data()
    seeded()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 0:
                say("epoch", epoch, "batch", number, loss.item().hex(), net.times, [*net.recent])


def held_sharded() -> None:
    """The classes of its modules are FSDP2's."""
    held(sharded=True)


def by_hand() -> None:
    """No wrapper: the script averages the gradients, and draws from its own generators."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    watched.extend([net, optimizer])
    own = {"torch": torch.Generator().manual_seed(7 + rank), "numpy": np.random.default_rng(8 + rank)}
    seeded()
    for step in range(14):
        chosen = torch.randint(0, args.samples, (4,), generator=own["torch"])
        noise = torch.from_numpy(own["numpy"].normal(size=(4, WIDTH))).float() * random.random()
        loss = mse(net(x[chosen] + noise), y[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        say(step, loss.item().hex())


def skips() -> None:
    """Rounds that take no step, together on all ranks; a plateau schedule; batches at the top of the loop."""
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    watched.extend([model, optimizer, plateau])
    loader, sampler = data()
    seeded()
    skipped = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            if (epoch + number) % 4 == 1:
                skipped += 1
                continue
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
        plateau.step(float(torch.tensor(epoch % 2)))
        say(epoch, loss.item().hex(), skipped, plateau.get_last_lr())


MILESTONES: list[int] = []
COUNTS = {"rounds": 0, "epochs": 0}
seen_samples = 0
last_loss: float | None = None


def count(samples: int, loss: float) -> None:
    global last_loss, seen_samples
    seen_samples += samples
    last_loss = loss if last_loss is None else 0.9 * last_loss + 0.1 * loss
    COUNTS["rounds"] += 1
    if COUNTS["rounds"] % 4 == 0:
        MILESTONES.append(seen_samples)


def left() -> None:
    """Epochs that are left early, a round that takes no step, a limit of steps for all; what the file keeps."""
    global seen_samples
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    watched.extend([model, optimizer, scheduler])
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank))
    seeded()
    seen_samples = 0
    step = 0
    for epoch in range(1, 9):
        meter = AverageMeter("Loss")
        for number, (inputs, targets) in enumerate(loader):
            if number % 5 == 3:
                say("skipped", epoch, number)
                continue
            loss = mse(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            meter.update(loss.item(), len(inputs))
            count(len(inputs), loss.item())
            if number >= 2 * epoch:
                say("enough", epoch, number, step)
                break
            if step >= 14:
                break
            scheduler.step()
        COUNTS["epochs"] += 1
        say("epoch", epoch, meter.avg.hex(), seen_samples, last_loss, COUNTS, MILESTONES)
        if step >= 14:
            break
    say("end", step, seen_samples, COUNTS, MILESTONES)


def endless() -> None:
    """Steps are counted over epochs that nothing counts."""
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    watched.extend([model, optimizer])
    loader = DataLoader(dataset, batch_size=12, shuffle=True)
    seeded()
    step, done = 0, False
    mean = torch.zeros(())
    while not done:
        for inputs, targets in loader:
            if step >= 13:
                done = True
                break
            loss = mse(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * loss.detach()
            step += 1
            if step % 4 == 0:
                say("step", step, mean.item().hex())
    say("end", step, mean.item().hex())


class Infinite:
    """Begins its loader again at its end, as DeepSpeed's examples have it. ``ahead``: batches that it fetches early."""

    def __init__(self, loader: DataLoader[Any], ahead: int = 0) -> None:
        self.loader, self.ahead = loader, ahead
        self.batches = iter(loader)
        self.waiting: list[Any] = []

    def __iter__(self) -> Infinite:
        return self

    def __next__(self) -> Any:
        while len(self.waiting) <= self.ahead:
            try:
                self.waiting.append(next(self.batches))
            except StopIteration:
                self.batches = iter(self.loader)
        return self.waiting.pop(0)


class Jittered(TensorDataset):
    """Each of its samples draws from the same stream as the order does."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.rand_like(inputs), targets


def reshuffled(batches: Any) -> None:
    model = wrapped(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched.extend([model, optimizer])
    seeded()
    for step, (inputs, targets) in enumerate(batches):
        if step == 18:
            break
        loss = mse(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say("step", step, loss.item().hex())


def infinite() -> None:
    reshuffled(Infinite(DataLoader(dataset, batch_size=12, shuffle=True, num_workers=1)))


def ahead() -> None:
    reshuffled(Infinite(DataLoader(Jittered(x, y), batch_size=12, shuffle=True), ahead=2))


def shuffles() -> None:
    def batches(loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    reshuffled(zip_of(batches(DataLoader(dataset, batch_size=12, shuffle=True)), orders()))


def orders() -> Iterator[int]:
    while True:
        yield from torch.randperm(4).tolist()


def zip_of(batches: Iterator[Any], numbers: Iterator[int]) -> Iterator[Any]:
    for (inputs, targets), number in zip(batches, numbers, strict=True):
        yield inputs * (1 + 0.1 * number), targets


# -- refused ----------------------------------------------------------------------------------------


def lbfgs() -> None:
    model = wrapped(Net())
    optimizer = torch.optim.LBFGS(model.parameters())
    for _ in range(3):

        def closure() -> float:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def comprehension() -> None:
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        loss = mse(model(x[:4]), y[:4])
        loss.backward()
        optimizer.step()
        return loss.item()

    print([step(number) for number in range(5)])


def remade() -> None:
    for _ in range(2):
        model = wrapped(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            mse(model(x[:4]), y[:4]).backward()
            optimizer.step()


def generator() -> None:
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training() -> Iterator[float]:
        for _ in range(4):
            loss = mse(model(x[:4]), y[:4])
            loss.backward()
            optimizer.step()
            yield loss.item()

    for value in training():
        print(value)


def digest() -> str:
    found = hashlib.sha256()
    for thing in watched:
        if isinstance(thing, nn.Module):
            tensors = [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.optim.Optimizer):
            parameters = [p for group in thing.param_groups for p in group["params"]]
            tensors = [v for p in parameters for _, v in sorted(thing.state[p].items()) if isinstance(v, Tensor)]
            found.update(repr([{k: v for k, v in g.items() if k != "params"} for g in thing.param_groups]).encode())
        elif isinstance(thing, Shadow):
            tensors = [*thing.shadow.values()]
        else:
            tensors = []
            found.update(repr(thing.state_dict()).encode())
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            found.update(local.detach().contiguous().numpy().tobytes())
    found.update(repr([torch.rand(2).tolist(), random.random(), np.random.random()]).encode())
    return found.hexdigest()


globals()[args.shape]()
print(f"digest rank={rank} {digest()}", flush=True)
dist.destroy_process_group()

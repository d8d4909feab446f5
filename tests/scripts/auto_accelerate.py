"""accelerate's loops without a Trainer and without a line of ours, by ``--auto``: ``auto_accelerate.py SHAPE``.

The shapes follow accelerate's own examples. Each rank prints what its script keeps, and at the end the digest of all
that it has.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("shape")
parser.add_argument("--output", type=Path, required=True)
args = parser.parse_args()
WIDTH, EPOCHS, BATCH = 16, 3, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.first(x))))
        return out


def made(**more: Any) -> Accelerator:
    numbered = args.shape != "resumed"
    files = ProjectConfiguration(project_dir=str(args.output), automatic_checkpoint_naming=numbered, total_limit=2)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_config=files, **more)
    if args.shape.startswith("fsdp2") and not torch.cuda.is_available():  # accelerate shards on accelerators only
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            cpu_ram_efficient_loading=False,
        )
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def data(samples: int = 70) -> TensorDataset:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def say(*words: object) -> None:
    print(f"rank={os.environ['RANK']}", *words, flush=True)


def loss_of(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(accelerator: Any, model: Any, loader: Any) -> float:
    """accelerate's: what the last batch has twice is left out."""
    model.eval()
    right = total = 0
    for inputs, wanted in loader:
        with torch.no_grad():
            found = model(inputs).argmax(-1)
        found, wanted = accelerator.gather_for_metrics((found, wanted))
        right += int((found == wanted).sum())
        total += len(wanted)
    model.train()
    return right / total


def nlp(accelerator: Any) -> None:
    """Its examples: accumulation, clipping, metrics, a checkpoint each epoch."""
    set_seed(42)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train = DataLoader(data(), batch_size=BATCH, shuffle=True)
    workers = {"num_workers": 1, "persistent_workers": True} if args.shape == "persistent" else {}
    test = DataLoader(data(30), batch_size=8, **workers)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, train, test, scheduler = accelerator.prepare(net, optimizer, train, test, scheduler)
    best = 0.0
    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for number, batch in enumerate(train):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if number % 3 == 0:
                say(epoch, number, loss.item().hex(), scheduler.get_last_lr())
        accuracy = evaluate(accelerator, model, test)
        best = max(best, accuracy)
        if not args.shape.startswith("fsdp2"):  # without a GPU accelerate writes what it cannot read
            accelerator.save_state()
        say("epoch", epoch, float(total).hex(), accuracy.hex(), best.hex())
    finish(accelerator, model, optimizer, scheduler)


def amid(accelerator: Any) -> None:
    """Evaluation and checkpoint amid an epoch, every few optimizer steps, and a count of them; early stopping."""
    set_seed(42)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train = DataLoader(data(), batch_size=BATCH, shuffle=True)
    test = DataLoader(data(30), batch_size=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, train, test, scheduler = accelerator.prepare(net, optimizer, train, test, scheduler)
    accelerator.register_for_checkpointing(scheduler)
    completed, history, stop = 0, [], False
    for epoch in range(EPOCHS):
        for batch in train:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                history.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                if completed % 4 == 0:
                    say(epoch, completed, evaluate(accelerator, model, test).hex(), history[-1].hex())
                    accelerator.save_state(str(args.output / f"step_{completed}"))
                if history[-1] < 0.2:
                    accelerator.set_trigger()
                if accelerator.check_trigger() or completed >= 11:
                    stop = True
                    break
        if stop:
            break
    say("end", completed, [one.hex() for one in history])
    finish(accelerator, model, optimizer, scheduler)


class Trainer:
    """An object that holds it all."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        set_seed(7, device_specific=True)
        torch.manual_seed(7)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-1, momentum=0.9)
        loader = DataLoader(data(64), batch_size=BATCH, shuffle=True, drop_last=True)
        self.model, self.optimizer, self.loader = accelerator.prepare(net, optimizer, loader)
        self.scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100))
        self.step, self.losses = 0, []

    def fit(self) -> None:
        for epoch in range(EPOCHS):
            self.model.train()
            for batch in self.loader:
                self.train_step(batch)
            say("epoch", epoch, self.step, sum(self.losses).hex())

    def train_step(self, batch: Any) -> None:
        with self.accelerator.autocast():
            loss = loss_of(self.model, batch)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        if self.step % 3 == 0:
            say(self.step, self.losses[-1].hex())


def trainer(accelerator: Any) -> None:
    own = Trainer(accelerator)
    own.fit()
    finish(accelerator, own.model, own.optimizer, own.scheduler)


def by_hand(accelerator: Any) -> None:
    """no_sync by hand, by the number of the batch."""
    set_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(data(64), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            if (number + 1) % 2:
                with accelerator.no_sync(model):
                    accelerator.backward(loss_of(model, batch) / 2)
            else:
                loss = loss_of(model, batch) / 2
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                say(epoch, number, loss.item().hex())
    finish(accelerator, model, optimizer)


def resumed(accelerator: Any) -> None:
    """From a checkpoint amid an epoch, which another launch of the script has made."""
    set_seed(5)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train = DataLoader(data(64), batch_size=BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, train, scheduler = accelerator.prepare(net, optimizer, train, scheduler)
    begun, folder = 0, args.output / "begun"
    if folder.exists():
        accelerator.load_state(str(folder))
        begun = 5
    first, amid = begun // len(train), begun % len(train)
    step = begun
    for epoch in range(first, EPOCHS):
        model.train()
        batches = skip_first_batches(train, amid) if epoch == first and amid else train
        for batch in batches:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            say(epoch, step, loss.item().hex())
            if step == 5 and not begun:
                accelerator.save_state(str(folder))
                return
    finish(accelerator, model, optimizer, scheduler)


def finish(accelerator: Any, model: Any, optimizer: Any, scheduler: Any = None) -> None:
    found = hashlib.sha256()
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for _, v in sorted(s.items()))]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            found.update(getattr(tensor, "_local_tensor", tensor).detach().float().contiguous().numpy().tobytes())
    found.update(repr([scheduler and scheduler.state_dict(), torch.rand(2).tolist()]).encode())
    found.update(repr([accelerator.step, accelerator.sync_gradients]).encode())
    print(f"digest rank={accelerator.process_index} {found.hexdigest()}", flush=True)
    accelerator.end_training()


SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nlp": (nlp, {"gradient_accumulation_steps": 2}),
    "fsdp2_nlp": (nlp, {"gradient_accumulation_steps": 2}),
    "amid": (amid, {"gradient_accumulation_steps": 2}),
    "trainer": (trainer, {}),
    "bf16": (trainer, {"mixed_precision": "bf16"}),
    "by_hand": (by_hand, {}),
    "fsdp2_by_hand": (by_hand, {}),
    "seedable": (nlp, {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}),
    "dispatched": (nlp, {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}),
    "resumed": (resumed, {}),
    "persistent": (nlp, {"gradient_accumulation_steps": 2}),
}
"""What trains, and the Accelerator's arguments."""
training, arguments = SHAPES[args.shape]
training(made(**arguments))

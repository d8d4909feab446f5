"""A hundred small loops as people write them, as texts of scripts without a line of ours: :data:`LOOPS` by name, and
:func:`script` of one; beside it lies :data:`HELPERS`. Each rank prints what the script keeps, and at the end the digest
of all that it has.

Texts, for each is its own script: in one file they would see each other's functions and names.
"""

from __future__ import annotations

import re

HEAD = """
import argparse, collections, contextlib, copy, dataclasses, enum, functools, hashlib, itertools, logging, math, os
import pathlib, random, signal, sys, time, types

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

WIDTH, EPOCHS = 8, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
y = x.sin().sum(1, keepdim=True)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = [model, optimizer]
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(100 + rank)


def say(*words):
    print(f"rank={rank}", *(w.hex() if isinstance(w, float) else w for w in words), flush=True)

"""

HELPERS = """
import collections

import torch

numbers = iter(range(100))
count, best, history, by_name = 0, None, [], collections.defaultdict(list)
running = torch.zeros(4)


class Meter:
    every = 0

    def __init__(self):
        self.n, self.sum = 0, 0.0

    def update(self, value):
        self.n, self.sum = self.n + 1, self.sum + value
        Meter.every += 1


meter = Meter()


def log(value):
    global count, best
    count += 1
    best = value if best is None else min(best, value)
    history.append(value)
    by_name[count % 3].append(value)
    running.mul_(0.9).add_(value)


def drawn():
    return next(numbers)


def made():
    n = 0

    def inner():
        nonlocal n
        n += 1
        return n

    return inner


counted = made()
"""

END = """

def digest():
    found = hashlib.sha256()
    for thing in kept:
        if isinstance(thing, torch.optim.Optimizer):
            found.update(repr([{k: v for k, v in g.items() if k != "params"} for g in thing.param_groups]).encode())
            tensors = [v for g in thing.param_groups for p in g["params"] for _, v in sorted(thing.state[p].items())]
        elif isinstance(thing, nn.Module):
            tensors = [*thing.parameters(), *thing.buffers()]
        elif hasattr(thing, "state_dict"):
            tensors = []
            found.update(repr(thing.state_dict()).encode())
        else:
            tensors = [*thing] if isinstance(thing, (list, tuple)) else [thing]
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            found.update(tensor.detach().contiguous().numpy().tobytes() if torch.is_tensor(tensor) else b"")
    found.update(repr([torch.rand(2).tolist(), random.random(), np.random.random()]).encode())
    return found.hexdigest()


print(f"digest rank={rank} {digest()}", flush=True)
dist.destroy_process_group()
"""

_TEXTS = """
=== while_count
step = 0
while step < 14:
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    say(step, loss.item())
=== while_true_break_top
step = 0
while True:
    if step == 14:
        break
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
say(step, loss.item())
=== while_walrus
batches = iter(list(loader) * 2)
while (batch := next(batches, None)) is not None:
    loss = F.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(loss.item())
=== while_not_done
done, losses = False, []
while not done:
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) >= 14:
            done = True
            break
say(len(losses), sum(losses))
=== while_else
step = 0
while step < 14:
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
else:
    say("else", step, loss.item())
=== for_else
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < 0:
        break
else:
    say("else", step, loss.item())
=== epochs_else
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        say("epoch", epoch, loss.item())
else:
    say("end", epoch)
=== continue_first
seen = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for n, (a, b) in enumerate(loader):
        if n % 3 == 2:
            continue
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(a)
    say(epoch, seen, loss.item())
=== continue_after
total = 0.0
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    if step % 3:
        continue
    say(step, total)
=== continue_nan
skipped = 0
for step in range(18):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    bad = torch.tensor(float(step % 5 == 3))
    dist.all_reduce(bad)
    if bad.item():
        skipped += 1
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say(step, skipped, loss.item())
=== return_early
def train():
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for n, (a, b) in enumerate(loader):
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch == 1 and n == 6:
                return loss.item()
say(train())
=== main_function
def main():
    total = 0.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        say(epoch, total)
if __name__ == "__main__":
    main()
=== step_function
def train_step(a, b):
    optimizer.zero_grad()
    loss = F.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    return loss.item()
history = {"loss": [], "step": 0}
for epoch in range(EPOCHS):
    for a, b in loader:
        history["loss"].append(train_step(a, b))
        history["step"] += 1
    say(epoch, history["step"], sum(history["loss"]))
=== epoch_function
def train_one_epoch(epoch, meters):
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meters["loss"] += loss.item()
        meters["n"] += 1
    return meters["loss"] / meters["n"]
best = math.inf
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    mean = train_one_epoch(epoch, collections.defaultdict(float))
    best = min(best, mean)
    say(epoch, mean, best)
=== closures
def make(model, optimizer):
    count = 0
    def step(a, b):
        nonlocal count
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += 1
        return count, loss.item()
    return step
step = make(model, optimizer)
for epoch in range(EPOCHS):
    for a, b in loader:
        say(*step(a, b))
=== global_counter
steps, best = 0, math.inf
def note(value):
    global steps, best
    steps += 1
    best = min(best, value)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note(loss.item())
    say(epoch, steps, best)
=== nonlocal_best
def main():
    best, bad = math.inf, 0
    def better(value):
        nonlocal best, bad
        if value < best:
            best, bad = value, 0
        else:
            bad += 1
        return bad
    for step in range(14):
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, better(loss.item()), best)
main()
=== accumulate_two
for epoch in range(3):
    sampler.set_epoch(epoch)
    for n, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b) / 2
        loss.backward()
        if (n + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            say(epoch, n, loss.item())
=== accumulate_nested
batches = itertools.cycle(loader)
for step in range(14):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(2):
        a, b = next(batches)
        with model.no_sync() if micro == 0 else contextlib.nullcontext():
            loss = F.mse_loss(model(a), b) / 2
            loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    say(step, total)
=== accumulate_last
for epoch in range(4):
    sampler.set_epoch(epoch)
    for n, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b) / 3
        loss.backward()
        if (n + 1) % 3 == 0 or n + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    say(epoch, loss.item())
=== accumulate_islice
stream = iter(itertools.cycle(loader))
for step in range(14):
    optimizer.zero_grad()
    for a, b in itertools.islice(stream, 2):
        (F.mse_loss(model(a), b) / 2).backward()
    optimizer.step()
say(step, sum(p.sum().item() for p in model.parameters()))
=== micro_chunks
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad()
        for part, target in zip(a.chunk(2), b.chunk(2)):
            loss = F.mse_loss(model(part), target) / 2
            loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== try_finally
logged = []
for epoch in range(EPOCHS):
    for a, b in loader:
        try:
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        finally:
            logged.append(loss.item())
    say(epoch, len(logged), sum(logged))
=== try_except_value
bad = 0
for step in range(16):
    i = torch.randint(0, 64, (4,))
    try:
        if step % 5 == 4:
            raise ValueError("bad batch")
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except ValueError:
        bad += 1
        continue
    say(step, bad, loss.item())
=== try_keyboard
try:
    for step in range(14):
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except KeyboardInterrupt:
    say("interrupted")
finally:
    say("end", step, loss.item())
=== try_catch_all
caught = 0
for step in range(14):
    try:
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except RuntimeError as e:
        caught += 1
    say(step, caught, loss.item())
=== with_around
with torch.autograd.set_detect_anomaly(False), contextlib.ExitStack() as stack:
    stack.callback(say, "closed")
    for step in range(14):
        i = torch.randint(0, 64, (4,))
        with torch.enable_grad():
            loss = F.mse_loss(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
say(step, loss.item())
=== autocast_scaler
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
kept.append(scaler)
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(a).float(), b)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    say(epoch, loss.item(), norm.item(), scaler.get_scale())
=== scheduler_step
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
kept.append(scheduler)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    say(epoch, loss.item(), scheduler.get_last_lr()[0])
=== scheduler_epoch
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.1)
kept.append(scheduler)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    say(epoch, loss.item(), scheduler.get_last_lr()[0])
=== scheduler_plateau
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
kept.append(scheduler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = F.mse_loss(model(x), y)
    scheduler.step(val)
    say(epoch, val.item(), scheduler.get_last_lr()[0])
=== scheduler_lambda
warm = lambda step: min(1.0, (step + 1) / 5)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm)
kept.append(scheduler)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    say(step, loss.item(), optimizer.param_groups[0]["lr"])
=== scheduler_chained
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ],
    milestones=[4],
)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    say(step, scheduler.get_last_lr()[0])
=== lr_by_hand
def set_lr(step):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**step
step = 0
for epoch in range(EPOCHS):
    for a, b in loader:
        set_lr(step)
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    say(epoch, loss.item(), optimizer.param_groups[0]["lr"])
=== enumerate_zip
other = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, seed=5))
for epoch in range(EPOCHS):
    for n, ((a, b), (c, d)) in enumerate(zip(loader, other)):
        loss = F.mse_loss(model(a), b) + F.mse_loss(model(c), d)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, n, loss.item())
=== islice_loader
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in itertools.islice(loader, 5):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== chain_loaders
for n, (a, b) in enumerate(itertools.chain(loader, loader), start=1):
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say(n, loss.item())
=== tqdm_bar
from tqdm import tqdm
for epoch in range(EPOCHS):
    bar = tqdm(loader, disable=rank != 0, file=open(os.devnull, "w"))
    for a, b in bar:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())
    say(epoch, loss.item())
=== tqdm_manual
from tqdm import tqdm
bar = tqdm(total=16, file=open(os.devnull, "w"))
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update(1)
    say(epoch, bar.n, loss.item())
=== comprehension_data
batches = [(x[k : k + 4] + 0.01 * rank, y[k : k + 4]) for k in range(0, 56, 4)]
for a, b in [(a * 1.0, b) for a, b in batches]:
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(loss.item())
=== shuffled_list
order = list(range(64))
for epoch in range(EPOCHS):
    random.shuffle(order)
    for k in range(0, 32, 4):
        i = order[k : k + 4]
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, order[:4], loss.item())
=== permutation
for epoch in range(EPOCHS):
    order = torch.randperm(64)
    for i in order.split(8):
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, order[0].item(), loss.item())
=== numpy_permutation
rng = np.random.default_rng(3 + rank)
for epoch in range(EPOCHS):
    order = rng.permutation(64)
    for k in range(0, 64, 8):
        i = order[k : k + 8]
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, int(order[0]), loss.item())
=== generator_function
def batches():
    while True:
        i = torch.randperm(64)[:4]
        yield x[i], y[i]
for step, (a, b) in zip(range(14), batches()):
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item())
=== generator_next
def batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
stream = batches()
for step in range(14):
    a, b = next(stream)
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item())
=== next_iter_refill
stream = iter(loader)
for step in range(14):
    try:
        a, b = next(stream)
    except StopIteration:
        stream = iter(loader)
        a, b = next(stream)
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item())
=== appended_log
path = pathlib.Path(os.environ["SMALL_LOOPS"]) / f"log{rank}.txt"
with open(path, "w"):
    pass
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with open(path, "a") as f:
            f.write(f"{epoch} {loss.item():.6f}\\n")
for line in path.read_text().splitlines():
    say(line)
=== next_in_function
stream = iter(loader)
def get_batch():
    global stream
    try:
        return next(stream)
    except StopIteration:
        stream = iter(loader)
        return next(stream)
for step in range(14):
    a, b = get_batch()
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item())
=== made_generators
class Noise:
    def __init__(self):
        self.source, self.more = None, {}
    def of(self, a):
        if self.source is None:
            self.source = torch.Generator().manual_seed(7 + rank)
        source = self.more.setdefault("uniform", np.random.default_rng(8 + rank))
        return torch.randn(a.shape, generator=self.source) * source.random()
noise, jitter = Noise(), None
for epoch in range(EPOCHS):
    for a, b in loader:
        if jitter is None:
            jitter = random.Random(9 + rank)
        loss = F.mse_loss(model(a + noise.of(a) * jitter.random()), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(epoch, loss.item(), jitter.getstate()[1][-1])
=== flat_views
flat = torch.zeros(sum(p.numel() for p in model.parameters()))
views = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in model.parameters()]), model.parameters())]
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            flat.mul_(0.9)
            for view, p in zip(views, model.parameters()):
                view.add_(p, alpha=0.1)
        say(epoch, loss.item(), flat.sum().item(), sum(view.double().sum() for view in views).item())
kept.append([flat, *views])
=== table_rows
table = torch.zeros(4, 3)
rows, first, state = list(table), table[0], {"last": table[3], "recent": [table[1]]}
step = 0
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows[step % 4].add_(loss.detach())
        first.mul_(0.5)
        state["last"] += 0.25
        state["recent"][0].sub_(1)
        state["recent"] = [rows[step % 3]]
        step += 1
        say(epoch, loss.item(), table.sum().item(), first.sum().item(), sum(row.sum() for row in rows).item())
kept.append([table, *rows, first, state["last"]])
=== rows_alone
table, recent = torch.zeros(4, 3), []
rows = list(table)
for epoch in range(EPOCHS):
    for step, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows[step % 4].add_(loss.detach())
        recent = [*recent[-2:], x[step]]
        say(epoch, loss.item(), table.sum().item(), sum(row.sum() for row in recent).item(), x.sum().item())
kept.append([table, *rows, x])
=== array_rows
table, samples = np.zeros((4, 3)), np.random.default_rng(5).random((8, 3))
rows, seen = list(table), []
for epoch in range(EPOCHS):
    for step, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sample = samples[step]
        rows[step % 4] += sample * loss.item()
        seen = [*seen[-2:], sample]
        say(epoch, loss.item(), float(table.sum()), float(sum(one.sum() for one in seen)), float(samples.sum()))
kept.append(torch.from_numpy(samples))
=== prefetched
stream = itertools.cycle(loader)
a, b = next(stream)
for step in range(14):
    loss = F.mse_loss(model(a), b)
    a, b = next(stream)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say(step, loss.item(), a.sum().item())
=== random_crops
class Crops(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, k):
        start = random.randint(0, 3)
        part = x[k].roll(start) + torch.from_numpy(np.random.normal(size=WIDTH)).float() * 0.01
        return part * torch.rand(()), y[k]
crops = Crops()
loader = DataLoader(crops, batch_size=4, sampler=DistributedSampler(crops))
for epoch in range(EPOCHS):
    loader.sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== random_crops_workers
class Crops(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, k):
        return x[k].roll(random.randint(0, 3)) * torch.rand(()), y[k]
crops = Crops()
loader = DataLoader(crops, batch_size=4, sampler=DistributedSampler(crops), num_workers=1)
for epoch in range(EPOCHS):
    loader.sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== iterable_dataset
class Stream(IterableDataset):
    def __iter__(self):
        for k in range(rank, 64, world):
            yield x[k], y[k]
loader = DataLoader(Stream(), batch_size=4)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== batch_sampler
class Buckets(BatchSampler):
    def __init__(self):
        self.epoch = 0
    def __len__(self):
        return 8
    def __iter__(self):
        numbers = random.Random(self.epoch * 7 + rank)
        self.epoch += 1
        for _ in range(8):
            yield [numbers.randrange(64) for _ in range(4)]
loader = DataLoader(dataset, batch_sampler=Buckets())
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== loader_again
for epoch in range(EPOCHS):
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, seed=epoch))
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== loader_growing
for size in (2, 4, 8):
    for a, b in DataLoader(dataset, batch_size=size, sampler=DistributedSampler(dataset, seed=size)):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(size, loss.item())
=== shuffle_global_rng
loader = DataLoader(dataset, batch_size=8, shuffle=True)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item(), torch.rand(()).item())
=== gan
gen = DDP(nn.Linear(WIDTH, WIDTH))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
kept += [gen, opt_g]
for epoch in range(EPOCHS):
    for a, _ in loader:
        noise = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        critic = model(gen(noise).detach()).mean() - model(a).mean()
        critic.backward()
        optimizer.step()
        opt_g.zero_grad()
        made = -model(gen(noise)).mean()
        made.backward()
        opt_g.step()
    say(epoch, critic.item(), made.item())
=== gan_inner_loop
gen = DDP(nn.Linear(WIDTH, WIDTH))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
kept += [gen, opt_g]
for step in range(12):
    for _ in range(2):
        optimizer.zero_grad()
        critic = model(gen(torch.randn(4, WIDTH)).detach()).mean() - model(x[:4]).mean()
        critic.backward()
        optimizer.step()
    opt_g.zero_grad()
    made = -model(gen(torch.randn(4, WIDTH))).mean()
    made.backward()
    opt_g.step()
    say(step, critic.item(), made.item())
=== gan_inner_function
gen = DDP(nn.Linear(WIDTH, WIDTH))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
kept += [gen, opt_g]
def train_critic(times):
    for _ in range(times):
        optimizer.zero_grad()
        critic = model(gen(torch.randn(4, WIDTH)).detach()).mean() - model(x[:4]).mean()
        critic.backward()
        optimizer.step()
    return critic.item()
for step in range(12):
    critic = train_critic(2)
    opt_g.zero_grad()
    made = -model(gen(torch.randn(4, WIDTH))).mean()
    made.backward()
    opt_g.step()
    say(step, critic, made.item())
=== gan_two_functions
gen = DDP(nn.Linear(WIDTH, WIDTH))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
kept += [gen, opt_g]
def train_critic():
    for _ in range(2):
        optimizer.zero_grad()
        critic = model(gen(torch.randn(4, WIDTH)).detach()).mean() - model(x[:4]).mean()
        critic.backward()
        optimizer.step()
    return critic.item()
def train_generator():
    opt_g.zero_grad()
    made = -model(gen(torch.randn(4, WIDTH))).mean()
    made.backward()
    opt_g.step()
    return made.item()
for step in range(12):
    say(step, train_critic(), train_generator())
=== two_functions
gen = DDP(nn.Linear(WIDTH, WIDTH))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3)
kept += [gen, opt_g]
def train_critic():
    optimizer.zero_grad()
    critic = model(gen(torch.randn(4, WIDTH)).detach()).mean() - model(x[:4]).mean()
    critic.backward()
    optimizer.step()
    return critic.item()
def train_generator():
    opt_g.zero_grad()
    made = -model(gen(torch.randn(4, WIDTH))).mean()
    made.backward()
    opt_g.step()
    return made.item()
for step in range(14):
    say(step, train_critic(), train_generator())
=== several_optimizers
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() == 1]
optimizers = [torch.optim.SGD(decay, lr=1e-2, momentum=0.9), torch.optim.Adam(rest, lr=1e-3)]
kept += optimizers
for epoch in range(EPOCHS):
    for a, b in loader:
        for o in optimizers:
            o.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        for o in optimizers:
            o.step()
    say(epoch, loss.item())
=== optimizer_dict
rest = {"net": optimizer, "bias": torch.optim.SGD([model.module.last.bias], lr=1e-3)}
kept.append(rest["bias"])
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        for opt in rest.values():
            opt.zero_grad()
        loss.backward()
        for opt in rest.values():
            opt.step()
    say(epoch, loss.item())
=== ema_closure
def make_ema(net, decay):
    shadow = [p.detach().clone() for p in net.parameters()]
    def update():
        with torch.no_grad():
            for s, p in zip(shadow, net.parameters()):
                s.mul_(decay).add_(p, alpha=1 - decay)
    return update, shadow
update, shadow = make_ema(model, 0.9)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update()
    say(epoch, loss.item(), sum(s.sum().item() for s in shadow))
=== ema_closure_new
def make_ema(net, decay):
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}
    def update():
        for n, p in net.named_parameters():
            shadow[n] = decay * shadow[n] + (1 - decay) * p.detach()
    def total():
        return sum(s.sum().item() for s in shadow.values())
    return update, total
update, total = make_ema(model, 0.9)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update()
    say(epoch, loss.item(), total())
=== ema_dict
ema = {n: p.detach().clone() for n, p in model.named_parameters()}
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                ema[n].lerp_(p, 0.1)
    say(epoch, sum(s.sum().item() for s in ema.values()))
=== ema_large
ema = {n: torch.cat([p.detach().flatten()] * 60) for n, p in model.named_parameters()}
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for n, p in model.named_parameters():
            ema[n] = 0.9 * ema[n] + 0.1 * torch.cat([p.detach().flatten()] * 60)
    say(epoch, sum(s.sum().item() for s in ema.values()))
=== ema_module
ema = copy.deepcopy(model.module)
kept.append(ema)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.module.parameters()):
                slow.lerp_(fast, 0.1)
    say(epoch, loss.item())
=== deque_window
window = collections.deque(maxlen=4)
counts = collections.Counter()
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window.append(loss.item())
        counts["low" if loss.item() < 3 else "high"] += 1
    say(epoch, sum(window), sorted(counts.items()))
=== metrics_dict
metrics = collections.defaultdict(list)
for epoch in range(EPOCHS):
    for n, (a, b) in enumerate(loader):
        out = model(a)
        loss = F.mse_loss(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics["loss"].append(loss.item())
        metrics[f"epoch{epoch}"].append(out.mean().item())
    say(epoch, {k: len(v) for k, v in metrics.items()}, sum(metrics["loss"]))
=== dataclass_state
@dataclasses.dataclass
class State:
    step: int = 0
    best: float = math.inf
    history: list = dataclasses.field(default_factory=list)
state = State()
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
        state.best = min(state.best, loss.item())
        state.history.append(loss.item())
    say(epoch, state.step, state.best, sum(state.history))
=== dataclass_frozen
@dataclasses.dataclass(frozen=True)
class State:
    step: int = 0
    total: float = 0.0
state = State()
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = dataclasses.replace(state, step=state.step + 1, total=state.total + loss.item())
    say(epoch, state.step, state.total)
=== slots_state
class Meter:
    __slots__ = ("n", "total")
    def __init__(self):
        self.n, self.total = 0, 0.0
    def add(self, value):
        self.n += 1
        self.total += value
meter = Meter()
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.add(loss.item())
    say(epoch, meter.n, meter.total)
=== class_attribute
class Counter:
    steps = 0
    @classmethod
    def tick(cls):
        cls.steps += 1
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        Counter.tick()
    say(epoch, Counter.steps, loss.item())
=== function_attribute
def train_step(a, b):
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    train_step.calls += 1
    return loss.item()
train_step.calls = 0
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = train_step(a, b)
    say(epoch, train_step.calls, loss)
=== default_argument
def note(value, seen=[]):
    seen.append(value)
    return len(seen)
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count = note(loss.item())
    say(epoch, count, loss.item())
=== itertools_count
numbers = itertools.count()
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = next(numbers)
    say(epoch, step, loss.item())
=== numpy_array
losses = np.zeros(16)
step = 0
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        step += 1
    say(epoch, float(losses.sum()))
=== tensor_total
total = torch.zeros(2)
for epoch in range(EPOCHS):
    total.zero_()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total[0] += loss.detach() * len(a)
        total[1] += len(a)
    dist.all_reduce(total)
    say(epoch, (total[0] / total[1]).item())
=== namespace_args
args = argparse.Namespace(lr=1e-2, step=0)
for epoch in range(EPOCHS):
    for a, b in loader:
        args.step += 1
        args.lr *= 0.95
        for group in optimizer.param_groups:
            group["lr"] = args.lr
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, args.step, args.lr)
=== enum_phase
class Phase(enum.Enum):
    WARM = 1
    TRAIN = 2
phase = Phase.WARM
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i]) * (0.1 if phase is Phase.WARM else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 5:
        phase = Phase.TRAIN
    say(step, phase.name, loss.item())
=== match_phase
kind = "warm"
for step in range(14):
    i = torch.randint(0, 64, (4,))
    match kind:
        case "warm":
            loss = F.l1_loss(model(x[i]), y[i])
        case _:
            loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 5:
        kind = "train"
    say(step, kind, loss.item())
=== trainer_class
class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.step, self.epoch, self.best = 0, 0, math.inf
    def batch(self, a, b):
        loss = F.mse_loss(self.model(a), b)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()
    def fit(self, epochs):
        while self.epoch < epochs:
            self.loader.sampler.set_epoch(self.epoch)
            for a, b in self.loader:
                value = self.batch(a, b)
            self.best = min(self.best, value)
            say(self.epoch, self.step, self.best)
            self.epoch += 1
Trainer(model, optimizer, loader).fit(EPOCHS)
=== trainer_callbacks
class Callback:
    def on_step(self, trainer): ...
    def on_epoch(self, trainer): ...
class Early(Callback):
    def __init__(self):
        self.best, self.bad = math.inf, 0
    def on_epoch(self, trainer):
        mean = torch.tensor(trainer.total / trainer.n)
        dist.all_reduce(mean)
        self.bad = 0 if mean.item() < self.best else self.bad + 1
        self.best = min(self.best, mean.item())
        trainer.stop = self.bad > 1
class Log(Callback):
    def __init__(self):
        self.lines = []
    def on_step(self, trainer):
        self.lines.append(trainer.loss.item())
        if len(self.lines) % 4 == 0:
            say("log", len(self.lines), sum(self.lines))
class Trainer:
    def __init__(self, callbacks):
        self.callbacks, self.stop = callbacks, False
    def fire(self, event):
        for c in self.callbacks:
            getattr(c, event)(self)
    def fit(self, epochs):
        for epoch in range(epochs):
            self.total, self.n = 0.0, 0
            for a, b in loader:
                optimizer.zero_grad()
                self.loss = F.mse_loss(model(a), b)
                self.loss.backward()
                optimizer.step()
                self.total += self.loss.item()
                self.n += 1
                self.fire("on_step")
            self.fire("on_epoch")
            say(epoch, self.total, self.stop)
            if self.stop:
                break
Trainer([Early(), Log()]).fit(EPOCHS)
=== trainer_inherited
class Base:
    def fit(self):
        for epoch in range(EPOCHS):
            for batch in loader:
                self.training_step(batch)
            self.epoch_end(epoch)
class Own(Base):
    def __init__(self):
        self.losses = []
    def training_step(self, batch):
        a, b = batch
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())
    def epoch_end(self, epoch):
        say(epoch, len(self.losses), sum(self.losses))
Own().fit()
=== compiled
compiled = torch.compile(model, backend="eager")
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(compiled(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== compiled_inside
net = Net()
net.compile(backend="aot_eager")
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
kept += [model, optimizer]
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== saving
folder = pathlib.Path(os.environ["SMALL_LOOPS"])
for epoch in range(EPOCHS):
    for n, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and n % 3 == 0:
            torch.save({"model": model.module.state_dict(), "n": n}, folder / "last.pt")
        dist.barrier()
    say(epoch, loss.item(), torch.load(folder / "last.pt")["n"])
=== saving_best
folder = pathlib.Path(os.environ["SMALL_LOOPS"])
best = math.inf
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and loss.item() < best:
            best = loss.item()
            torch.save({"model": model.module.state_dict(), "best": best}, folder / "best.pt")
    dist.barrier()
    say(epoch, torch.load(folder / "best.pt")["best"])
=== resumed_by_hand
path = pathlib.Path(os.environ["SMALL_LOOPS"]) / "resume.pt"
start = 0
if path.exists():
    found = torch.load(path)
    model.module.load_state_dict(found["model"])
    start = found["epoch"]
for epoch in range(start, 3):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)
    say(epoch, loss.item())
=== validation
for epoch in range(EPOCHS):
    model.train()
    for n, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n % 4 == 3:
            model.eval()
            with torch.no_grad():
                val = sum(F.mse_loss(model.module(c), d) for c, d in loader)
            model.train()
            dist.all_reduce(val)
            say(epoch, n, val.item())
=== validation_function
@torch.no_grad()
def evaluate():
    model.eval()
    total, n = 0.0, 0
    for a, b in DataLoader(dataset, batch_size=16, shuffle=True):
        total += F.mse_loss(model.module(a), b).item()
        n += 1
    model.train()
    return total / n
best = math.inf
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        best = min(best, evaluate())
        say(step, best)
=== eval_first
val_iter = iter(itertools.cycle(loader))
for step in range(14):
    if step % 4 == 0:
        model.eval()
        with torch.no_grad():
            a, b = next(val_iter)
            say("val", step, F.mse_loss(model.module(a), b).item())
        model.train()
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
=== signal_stop
stop = False
def on_signal(number, frame):
    global stop
    stop = True
signal.signal(signal.SIGUSR2, on_signal)
for step in range(30):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 12:
        os.kill(os.getpid(), signal.SIGUSR2)
    flag = torch.tensor(float(stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item():
        break
say(step, loss.item())
=== time_stop
began = time.monotonic()
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    late = torch.tensor(float(time.monotonic() - began > 600))
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    if late.item():
        break
say(step, loss.item())
=== early_stopping
best, patience = math.inf, 3
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean.item() < best:
            best, patience = mean.item(), 3
        else:
            patience -= 1
        if patience == -6:
            break
    else:
        say(epoch, best, patience)
        continue
    say("stopped", epoch, best)
    break
=== warm_up_then_train
for step in range(5):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say("warm", loss.item())
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
say("end", loss.item())
=== phases_loop
for name, lr, rounds in [("warm", 1e-3, 4), ("main", 1e-2, 6), ("cool", 1e-4, 4)]:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(rounds):
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(name, loss.item())
=== three_levels
for cycle in range(2):
    for epoch in range(2):
        sampler.set_epoch(cycle * 2 + epoch)
        for n, (a, b) in enumerate(loader):
            if n == 4:
                break
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        say(cycle, epoch, loss.item())
=== recurrent_hidden
net = nn.GRU(WIDTH, 16, batch_first=True)
model = DDP(net)
head = DDP(nn.Linear(16, 1))
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
kept += [model, head, optimizer]
hidden = torch.zeros(1, 4, 16)
for epoch in range(EPOCHS):
    for a, b in loader:
        hidden = hidden.detach()
        out, hidden = model(a.unsqueeze(1), hidden)
        loss = F.mse_loss(head(out[:, 0]), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item(), hidden.sum().item())
=== replay_buffer
buffer, capacity = [], 24
state = torch.zeros(WIDTH)
for step in range(14):
    for _ in range(4):
        action = model.module(state).item() if random.random() > 0.3 else random.uniform(-1, 1)
        after = (state + 0.1 * action + 0.01 * torch.randn(WIDTH)).detach()
        buffer.append((state, action, -after.abs().mean().item()))
        if len(buffer) > capacity:
            buffer.pop(0)
        state = after
    batch = random.sample(buffer, 4)
    a = torch.stack([s for s, _, _ in batch])
    b = torch.tensor([[r] for _, _, r in batch])
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, len(buffer), loss.item())
=== policy_episodes
class Env:
    def __init__(self):
        self.state, self.steps = np.zeros(WIDTH), 0
        self.rng = np.random.default_rng(rank)
    def reset(self):
        self.state, self.steps = self.rng.normal(size=WIDTH), 0
        return self.state
    def step(self, action):
        self.state = self.state * 0.9 + action * 0.1 + self.rng.normal(size=WIDTH) * 0.01
        self.steps += 1
        return self.state, -float(np.abs(self.state).mean()), self.steps >= 5
env = Env()
returns = []
for episode in range(14):
    state, done, losses, total = env.reset(), False, [], 0.0
    optimizer.zero_grad()
    while not done:
        out = model(torch.from_numpy(state).float()[None])
        state, reward, done = env.step(out.item())
        total += reward
        losses.append(-out.mean() * reward)
    torch.stack(losses).sum().backward()
    optimizer.step()
    returns.append(total)
    say(episode, total, sum(returns))
=== grad_norm_history
norms = []
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    limit = sum(norms[-5:]) / len(norms[-5:]) * 1.1 if norms else 10.0
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
    optimizer.step()
    say(step, limit, norms[-1])
=== loss_weights
weights = torch.ones(3)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    out = model(x[i])
    losses = torch.stack([F.mse_loss(out, y[i]), F.l1_loss(out, y[i]), out.abs().mean()])
    optimizer.zero_grad()
    (weights * losses).sum().backward()
    optimizer.step()
    weights = torch.softmax(weights + 0.1 * losses.detach(), 0) * 3
    say(step, *weights.tolist())
=== curriculum
level = 1
for step in range(14):
    i = torch.randint(0, 4 * level, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if mean.item() / world < 6.0:
        level = min(level + 1, 16)
    say(step, level, loss.item())
=== mixup
def mixed(a, b, alpha=0.4):
    lam = float(np.random.beta(alpha, alpha))
    order = torch.randperm(len(a))
    return lam * a + (1 - lam) * a[order], b, b[order], lam
for epoch in range(EPOCHS):
    for a, b in loader:
        a, b, c, lam = mixed(a, b)
        out = model(a)
        loss = lam * F.mse_loss(out, b) + (1 - lam) * F.mse_loss(out, c)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, lam, loss.item())
=== batchnorm
model = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
kept += [model, optimizer]
for epoch in range(EPOCHS):
    model.train()
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    say(epoch, F.mse_loss(model(x), y).item())
=== freeze_later
for p in model.module.first.parameters():
    p.requires_grad_(False)
model = DDP(model.module, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
kept += [model, optimizer]
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    say(epoch, loss.item())
=== logger
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
log = logging.getLogger("train")
for epoch in range(EPOCHS):
    for n, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n % 3 == 0:
            log.info("rank=%d %d %d %s", rank, epoch, n, loss.item().hex())
=== fsdp
from torch.distributed.fsdp import fully_shard
model = Net()
fully_shard(model.first)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept[:] = [model, optimizer]
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    say(epoch, loss.item())
=== fsdp_switches
from torch.distributed.fsdp import fully_shard
model = Net()
fully_shard(model.first)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept[:] = [model, optimizer]
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for a, b in loader:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        F.mse_loss(model(a[:2]), b[:2]).backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        loss = F.mse_loss(model(a[2:]), b[2:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_reshard_after_forward(True)
    say(epoch, loss.item())
=== foreach_apply
class Sam:
    def __init__(self, model, rho):
        self.model, self.rho, self.saved = model, rho, []
    def up(self):
        self.saved = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(p.grad, alpha=self.rho)
    def down(self):
        with torch.no_grad():
            for p, s in zip(self.model.parameters(), self.saved):
                p.copy_(s)
sam = Sam(model, 0.01)
for epoch in range(EPOCHS):
    for a, b in loader:
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        sam.up()
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        sam.down()
        optimizer.step()
    say(epoch, loss.item())
=== lookahead
slow = [p.detach().clone() for p in model.parameters()]
for step in range(1, 15):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        with torch.no_grad():
            for s, p in zip(slow, model.parameters()):
                s.lerp_(p, 0.5)
                p.copy_(s)
    say(step, loss.item())
=== contrastive_queue
queue, pointer = torch.randn(16, WIDTH), 0
for epoch in range(EPOCHS):
    for a, b in loader:
        out = model(a + 0.1 * queue[:4])
        loss = F.mse_loss(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            queue[pointer : pointer + 4] = a
        pointer = (pointer + 4) % 16
    say(epoch, pointer, queue.sum().item())
=== contrastive_queue_large
queue, pointer = torch.randn(800, WIDTH), 0
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = F.mse_loss(model(a + 0.1 * queue[:4]), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[pointer : pointer + 4] = a
        pointer = (pointer + 4) % 16
    say(epoch, pointer, queue.sum().item())
=== lambda_step
step_of = lambda a, b: (optimizer.zero_grad(), F.mse_loss(model(a), b).backward(), optimizer.step())
for epoch in range(EPOCHS):
    for a, b in loader:
        step_of(a, b)
    say(epoch, sum(p.sum().item() for p in model.parameters()))
=== dispatch_dict
def train_step(a, b):
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
actions = {"train": train_step}
for epoch in range(EPOCHS):
    for a, b in loader:
        value = actions["train"](a, b)
    say(epoch, value)
=== map_steps
def train_step(batch):
    a, b = batch
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
for epoch in range(EPOCHS):
    say(epoch, sum(map(train_step, loader)))
=== recursion
def train(left):
    if left == 0:
        return
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(left, loss.item())
    train(left - 1)
train(14)
=== unrolled
def train_step():
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(loss.item())
train_step()
train_step()
for _ in range(12):
    train_step()
=== generator_steps
def training():
    for step in range(14):
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.item()
for step, value in training():
    say(step, value)
=== lbfgs
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
kept[:] = [model]
for step in range(5):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
    say(step, optimizer.step(closure).item())
=== closure_sgd
for step in range(14):
    i = torch.randint(0, 64, (4,))
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[i]), y[i])
        loss.backward()
        return loss
    say(step, optimizer.step(closure).item())
=== hyper_search
results = {}
for lr in (1e-2, 1e-3):
    torch.manual_seed(0)
    net = DDP(Net())
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(7):
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    results[lr] = loss.item()
say(sorted(results.items()))
=== reset_optimizer
for step in range(14):
    if step == 6:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item())
=== threads
import queue, threading
todo = queue.Queue(2)
def produce():
    for k in range(14):
        todo.put((x[k : k + 4], y[k : k + 4]))
    todo.put(None)
threading.Thread(target=produce, daemon=True).start()
while True:
    batch = todo.get()
    if batch is None:
        break
    loss = F.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(loss.item())
=== file_lines
path = pathlib.Path(os.environ["SMALL_LOOPS"]) / f"data{rank}.txt"
path.write_text("".join(f"{k}\\n" for k in range(14)))
with open(path) as lines:
    for line in lines:
        k = int(line)
        loss = F.mse_loss(model(x[k : k + 4]), y[k : k + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(k, loss.item())
=== file_readline
path = pathlib.Path(os.environ["SMALL_LOOPS"]) / f"data{rank}.txt"
path.write_text("".join(f"{k}\\n" for k in range(14)))
lines = open(path)
while line := lines.readline():
    k = int(line)
    loss = F.mse_loss(model(x[k : k + 4]), y[k : k + 4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(k, loss.item())
=== reversed_pairs
pairs = list(zip(range(0, 56, 4), range(4, 60, 4)))
for lo, hi in reversed(pairs):
    loss = F.mse_loss(model(x[lo:hi]), y[lo:hi])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(lo, loss.item())
=== other_module
import helpers
from helpers import log

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss.item())
        helpers.meter.update(loss.item())
        helpers.rounds = getattr(helpers, "rounds", 0) + 1
        say(helpers.counted(), helpers.count, helpers.best, helpers.rounds, helpers.meter.n, helpers.Meter.every)
say(helpers.history, dict(helpers.by_name), helpers.running.tolist(), helpers.meter.sum)
=== other_module_iterator
import helpers

for step in range(14):
    k = helpers.drawn()
    loss = F.mse_loss(model(x[k : k + 4]), y[k : k + 4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, k, loss.item())
=== records_and_meters
class Meter:
    def __init__(self, window=3):
        self.recent, self.total, self.count = collections.deque(maxlen=window), 0.0, 0

    def update(self, value):
        self.recent.append(value)
        self.total, self.count = self.total + value, self.count + 1


class Logger:
    def __init__(self):
        self.meters = collections.defaultdict(Meter)

    def update(self, **values):
        for key, value in values.items():
            self.meters[key].update(value)


@dataclasses.dataclass
class Record:
    step: int
    loss: float


class AttrDict(dict):
    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


logger, records, best, losses, note = Logger(), [], {}, [], functools.partial(lambda seen, v: seen.append(v), [])
metrics = {"loss": losses, "model": model, "n": 0}
config = AttrDict(n=0)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss.item(), twice=2 * loss.item())
        records.append(Record(len(records), loss.item()))
        if len(records) % 4 == 0:
            best[epoch] = min(records, key=lambda one: one.loss)
        losses.append(loss.item())
        metrics["n"] += 1
        config.n += 1
        note(loss.item())
        say(len(records), len(metrics["loss"]), metrics["n"], config["n"], len(note.args[0]), loss.item())
say({key: (m.total, m.count, list(m.recent)) for key, m in logger.meters.items()}, records, best)
say([any(one is record for record in records) for one in best.values()], note.args)
=== pop_list
left = list(range(14))
random.shuffle(left)
while left:
    k = left.pop()
    loss = F.mse_loss(model(x[k : k + 4]), y[k : k + 4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(k, len(left), loss.item())
=== hard_examples
losses = torch.ones(64)
for step in range(14):
    i = torch.multinomial(losses, 4)
    each = F.mse_loss(model(x[i]), y[i], reduction="none").squeeze(1)
    optimizer.zero_grad()
    each.mean().backward()
    optimizer.step()
    losses[i] = each.detach()
    say(step, i.tolist(), losses.sum().item())
=== unseeded_order
torch.seed()
order = torch.randperm(56).tolist()
torch.manual_seed(100 + rank)
seen = []
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen += order[4 * step : 4 * step + 4]
    say(step, loss.item())
say(len({*seen}), sum(seen))
=== pseudo_labels
labels = y.clone()
for epoch in range(EPOCHS):
    for k in range(0, 32, 4):
        loss = F.mse_loss(model(x[k : k + 4]), labels[k : k + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        labels = 0.5 * labels + 0.5 * model(x)
    say(epoch, labels.sum().item())
=== criterion_switched
criterion = nn.MSELoss()
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = criterion(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        criterion = nn.L1Loss()
    if step == 8:
        criterion = nn.SmoothL1Loss(beta=0.5)
    say(step, loss.item())
=== optimizers_in_turns
opts = {"adam": optimizer, "sgd": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)}
current = opts["adam"]
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    current.zero_grad()
    loss.backward()
    current.step()
    if step % 3 == 1:
        current = opts["sgd"] if current is opts["adam"] else opts["adam"]
    say(step, loss.item())
kept.append(opts["sgd"])
=== method_as_state
class Task:
    def __init__(self):
        self.n = 0
        self.act = self.first
    def first(self, p, t):
        self.n += 1
        if self.n > 2:
            self.act = self.second
        return F.mse_loss(p, t)
    def second(self, p, t):
        self.n += 1
        return F.l1_loss(p, t)
task = Task()
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = task.act(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, task.n, loss.item())
=== partial_exchanged
criterion = functools.partial(F.smooth_l1_loss, beta=1.0)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = criterion(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < 50:
        criterion = functools.partial(F.smooth_l1_loss, beta=criterion.keywords["beta"] * 0.8)
    say(step, loss.item())
=== forward_hook
seen = []
calls = [0]
def hook(module, inputs, output):
    calls[0] += 1
    seen.append(output.mean().item())
    return output * (1 + 0.01 * calls[0])
model.module.first.register_forward_hook(hook)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item(), calls[0], sum(seen))
=== optimizer_hook
history = collections.deque(maxlen=3)
def after(opt, args, kwargs):
    history.append(sum(p.norm().item() for g in opt.param_groups for p in g["params"]))
    for g in opt.param_groups:
        g["lr"] *= 0.97
        g["taken"] = g.get("taken", 0) + 1
optimizer.register_step_post_hook(after)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss.item(), sum(history), optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["taken"])
=== optimizer_attribute
optimizer.skipped, optimizer.norms = 0, []
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.skipped += optimizer.norms[-1] > 1
    say(step, loss.item(), optimizer.skipped, sum(optimizer.norms))
=== criterion_lambda
criterion = F.mse_loss
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = criterion(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        criterion = F.l1_loss
    if step == 8:
        criterion = lambda p, t: (p - t).abs().pow(1.5).mean()
    say(step, loss.item())
=== linked_objects
class Node:
    def __init__(self, value, before):
        self.value, self.before = value, before
last = None
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    last = Node(loss.item(), last)
    length, total, at = 0, 0.0, last
    while at is not None:
        length, total, at = length + 1, total + at.value, at.before
    say(step, length, total)
=== rolled_back
best, bad = math.inf, 0
best_state, best_opt = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
for step in range(16):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if mean.item() < best:
        best, bad = mean.item(), 0
        best_state, best_opt = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    else:
        bad += 1
    if bad == 2:
        model.load_state_dict(best_state)
        optimizer.load_state_dict(best_opt)
        bad = 0
    say(step, loss.item(), best, bad)
=== user_containers
stats = collections.ChainMap({}, {"n": 0})
user = collections.UserDict(total=0.0)
class Bag(dict):
    def __getattr__(self, name):
        return self[name]
bag = Bag(n=0, best=math.inf)
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    stats["n"] = stats["n"] + 1
    user["total"] += loss.item()
    bag["n"] += 1
    bag["best"] = min(bag.best, loss.item())
    if step % 4 == 3:
        stats = stats.new_child()
    say(step, stats["n"], len(stats.maps), user["total"], bag.n, bag.best)
=== cached_property
class Task:
    def __init__(self):
        self.n = 0
    @functools.cached_property
    def noise(self):
        return torch.randn(4, 1)
    @property
    def weight(self):
        self.n += 1
        return 1 / self.n
    def refresh(self):
        self.__dict__.pop("noise", None)
task = Task()
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = task.weight * F.mse_loss(model(x[i]) + 0.1 * task.noise, y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 2:
        task.refresh()
    say(step, loss.item(), task.n)
=== heap_and_buffers
import array, bisect, heapq
top, ranked, raw, buffer = [], [], array.array("d"), bytearray()
for step in range(14):
    i = torch.randint(0, 64, (4,))
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    heapq.heappush(top, (-loss.item(), step))
    if len(top) > 3:
        heapq.heappop(top)
    bisect.insort(ranked, loss.item())
    raw.append(loss.item())
    buffer.extend(b"x")
    say(step, top, ranked[0], sum(raw), len(buffer))
=== while_else_break
epoch, found = 0, 0
while epoch < 5:
    n = 0
    while n < 6:
        i = torch.randint(0, 64, (4,))
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        n += 1
        found += 1
        if epoch == 1 and n == 3:
            break
    else:
        say("whole", epoch, loss.item())
        if epoch == 2:
            break
        epoch += 1
        continue
    say("left", epoch, n)
    epoch += 1
say(epoch, found, loss.item())
=== iterators_left
for epoch in range(5):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for n in range(3):
        a, b = next(batches)
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(epoch, n, loss.item())
=== text_buffers
import io

report, raw = io.StringIO(), io.BytesIO()


class Recorder:
    def __init__(self):
        self.buffer = io.StringIO()

    def note(self, value):
        print(f"{value:.5f}", file=self.buffer)
        if self.buffer.tell() > 60:
            text = self.buffer.getvalue()
            self.buffer.seek(0)
            self.buffer.truncate()
            return len(text.splitlines())
        return 0


recorder = Recorder()
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        report.write(f"{i}:{loss.item():.3f} ")
        raw.write(bytes([i]))
        say(loss.item(), recorder.note(loss.item()), len(raw.getvalue()))
    say(report.getvalue())
    report.truncate(0)
    report.seek(0)
=== dictionary_keys
class Phase(enum.Enum):
    A = "a"
    B = "b"


@dataclasses.dataclass(frozen=True)
class Key:
    layer: int
    name: str


by_phase, by_class, by_key, by_function = {}, collections.defaultdict(int), {}, {}
by_path, by_module = collections.Counter(), {}
averages = {p: p.detach().clone() for p in model.parameters()}
momentum = {}
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        phase = Phase.A if loss.item() > 3 else Phase.B
        by_phase[phase] = by_phase.get(phase, 0) + 1
        by_class[Net] += 2
        by_path[pathlib.Path(str(i % 3))] += 1
        by_key[Key(i % 2, "x")] = by_key.get(Key(i % 2, "x"), 0.0) + loss.item()
        by_function[say] = by_function.get(say, 0) + 1
        with torch.no_grad():
            for p in model.parameters():
                momentum.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            for p, average in averages.items():
                average.lerp_(p, 0.1)
        for part in model.module.children():
            by_module[part] = by_module.get(part, 0.0) + loss.item()
        say(loss.item(), by_phase[phase], by_class[Net], sorted(by_path.values()), by_key[Key(i % 2, "x")])
        say(by_function[say], sum(m.sum().item() for m in momentum.values()), sum(by_module.values()))
        say(sum(average.sum().item() for average in averages.values()))
=== singleton_by_class
class Singleton(type):
    _instances = {}

    def __call__(cls, *args, **kwargs):
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


class Storage(metaclass=Singleton):
    def __init__(self):
        self.values, self.iter = collections.defaultdict(list), 0


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        Storage().values["loss"].append(loss.item())
        Storage().iter += 1
        if Storage().iter % 3 == 2:
            optimizer.param_groups[0]["lr"] *= 0.9
        say(loss.item(), Storage().iter, sum(Storage().values["loss"]))
=== partial_step
def train_step(kind, batch, *, weight=1.0):
    a, b = batch
    optimizer.zero_grad()
    loss = weight * (F.mse_loss(model(a), b) if kind == "mse" else F.l1_loss(model(a), b))
    loss.backward()
    optimizer.step()
    return loss.item()


step_fn = functools.partial(train_step, "mse")
n = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    it = iter(loader)
    while (batch := next(it, None)) is not None:
        match step_fn(batch), n % 4:
            case value, 3:
                step_fn = functools.partial(train_step, "l1", weight=step_fn.keywords.get("weight", 1.0) * 0.9)
            case value, 1:
                step_fn = functools.partial(train_step, "mse", weight=0.5)
            case value, _:
                pass
        n += 1
        say(epoch, n, value, step_fn.args, step_fn.keywords)
=== method_next
it, step = loader.__iter__(), 0
while step < 14:
    try:
        a, b = it.__next__()
    except StopIteration:
        it = loader.__iter__()
        continue
    optimizer.zero_grad()
    loss = F.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    step += 1
    say(step, loss.item())
=== globals_by_name
alpha, beta = 0.5, 0.25
own = sys.modules[__name__]


def decay(name, factor):
    globals()[name] *= factor


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b) * alpha
        loss.backward()
        optimizer.step()
        decay("alpha", 0.95)
        setattr(own, "beta", beta * 0.9)
        globals().update(gamma=alpha + beta)
        say(loss.item(), alpha, beta, gamma)
=== sobol_and_shared
import multiprocessing

sobol = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=rank)
count, table = multiprocessing.Value("i", 0), multiprocessing.Array("d", 4)


def smooth(value, state=types.SimpleNamespace(v=None)):
    state.v = value if state.v is None else 0.9 * state.v + 0.1 * value
    return state.v


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        a = a + 0.1 * sobol.draw(len(a))
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        count.value += 1
        table[i % 4] += loss.item()
        say(loss.item(), sobol.num_generated, count.value, sum(table), smooth(loss.item()))
=== module_by_hand
tools = types.ModuleType("tools")
tools.heads = [nn.Linear(WIDTH, 1, bias=False).requires_grad_(False)]
nn.init.zeros_(tools.heads[0].weight)
tools.stats = {"n": 0}
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        tools.stats["n"] += 1
        with torch.no_grad():
            tools.heads[0].weight.lerp_(model.module.first.weight[:1], 0.1)
        say(loss.item(), tools.stats["n"], tools.heads[0].weight.sum().item())
=== generator_send
def schedule(base):
    lr = base
    while True:
        loss = yield lr
        lr = base / (1 + loss)


rates = schedule(1e-2)
next(rates)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        rate = rates.send(loss.item())
        say(loss.item(), rate)
=== list_islice
def endless():
    while True:
        yield from loader


it = endless()
for step in range(8):
    batches = list(itertools.islice(it, 2))
    optimizer.zero_grad()
    for a, b in batches:
        loss = F.mse_loss(model(a), b)
        loss.backward()
    optimizer.step()
    say(step, loss.item())
=== seeds_spawned
seeds = np.random.SeedSequence(5 + rank)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        (child,) = seeds.spawn(1)
        a = a + 0.1 * torch.from_numpy(np.random.default_rng(child).normal(size=WIDTH).astype(np.float32))
        optimizer.zero_grad()
        loss = F.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        say(loss.item())
"""

_PARTS = re.split(r"^=== (\w+)\n", _TEXTS, flags=re.MULTILINE)
LOOPS = dict(zip(_PARTS[1::2], _PARTS[2::2], strict=True))


def script(name: str) -> str:
    return HEAD + LOOPS[name] + END

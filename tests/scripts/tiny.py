"""A training script of a few lines for tests of the launcher; `--mode` makes it misbehave in one way."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
from flashrecovery.worker.recovery_commands import RecoveryExecutor


class SlowToBegin:
    """Rank 1 says late that it is ready. Rank 0 is busy for a second while it waits for the word to begin: the word,
    and whatever comes within that second, reach its training thread together."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.busy = False
        if rank == 0:
            signal.signal(signal.SIGALRM, self._on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

    def _on_alarm(self, _signum: int, frame: types.FrameType | None) -> None:
        waits = RecoveryExecutor._next_command.__code__  # by its code: a new name ends this script at once
        if any(f.f_code is waits for f, _ in traceback.walk_stack(frame)) and not self.busy:
            self.busy = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(1)
            print("was busy", flush=True)

    def state_dict(self) -> dict[str, int]:
        if self.rank == 1:
            time.sleep(0.3)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Unstable:
    """A data source that gives other samples each time the process starts."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield torch.full((4, 8), float(os.getpid() % 1000))


def own_loop(
    steps: int,
    recovery: flashrecovery.Recovery,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[torch.Tensor],
) -> None:
    """The script's own loop, with an evaluation now and then, in which each step is one protected call."""

    def train() -> float:
        optimizer.zero_grad()
        loss = model(next(data)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    def evaluate() -> float:
        with torch.no_grad():
            total = model(torch.rand(4, 8)).square().mean()
        dist.all_reduce(total)
        return float(total)

    for step in range(steps):
        loss = recovery.call("train", train, skipped=lambda: float("nan"))
        torch.rand(step % 3)  # a replacement draws this again
        if step % 3 == 2:
            recovery.call("evaluate", evaluate, skipped=lambda: float("nan"))
        print(f"call {step}: {loss.hex()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="plain")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.02)
    args = parser.parse_args()
    mode = args.mode
    if mode == "raise-before":
        raise ValueError("no such data set")
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    if mode == "slow-to-start":
        time.sleep(12)  # a large model is built
    rank = dist.get_rank()
    torch.manual_seed(rank if mode == "unequal" else 0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    model = inner if mode == "unequal" else DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if mode != "unregistered":
        recovery.register(model=model, optimizer=optimizer)
    if mode == "slow-to-begin":
        recovery.register(waits=SlowToBegin(rank))
    if mode == "twice":
        recovery.register(model=model)
    dataset = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(64)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    if mode == "not-iterable":
        recovery.data(7)  # type: ignore[arg-type]
    data = recovery.data(Unstable() if mode == "unstable-data" else loader)
    torch.manual_seed(100 + rank)
    pair = [dist.new_group([0, 1]) for _ in range(2)] if mode == "crossed" else []
    settings = torch.zeros(1)
    if mode == "no-world":
        dist.destroy_process_group()
        next(recovery.steps(1))
    if rank == 0:
        settings += os.getpid()  # differs from launch to launch: a replacement must get the first launch's value
    dist.broadcast(settings, 0)
    if mode == "calls":
        own_loop(args.steps, recovery, model, optimizer, data)
    more = int(mode == "uneven-steps" and rank == 1)
    for step in recovery.steps(args.steps + more) if mode != "calls" else ():
        if mode == "late-data" and step.index == 2:
            recovery.data(loader)
        if mode == "not-entered":
            continue
        if mode == "raise-between" and rank == 1 and step.index == 3 and recovery.generation == 0:
            raise ValueError("between two steps")
        with step:
            # Before the gradients are summed up: after that, others may complete the step.
            if mode == "always-raise" and rank == 1 and step.index == 3:
                raise ValueError("bad sample")
            optimizer.zero_grad()
            if mode == "slow-to-start" and step.index == 0:
                time.sleep(16)  # and compiled
            x = next(data)
            if mode == "idle-steps" and step.index % 2:
                torch.rand(1)
                continue
            if mode == "swallow":
                try:
                    model(x).square().mean().backward()
                except Exception as error:  # noqa: BLE001 - the misbehaviour under test
                    print(f"swallowed {type(error).__name__}", flush=True)
            else:
                loss = model(x).square().mean()
                loss.backward()
            if mode == "deadlock" and rank == 1 and step.index == 3 and recovery.generation == 0:
                while True:
                    time.sleep(0.1)
            if mode == "crossed" and step.index == 3 and recovery.generation == 0:
                for group in pair if rank == 0 else reversed(pair):
                    dist.all_reduce(torch.ones(1), group=group)
            if mode == "slow" and rank == 1:
                time.sleep(4 * args.sleep)
            time.sleep(args.sleep)
            optimizer.step()
            if mode == "reduce-after":
                dist.all_reduce(torch.ones(1))
            if mode == "swallow-after":
                sum_of_ones = torch.ones(1)
                try:
                    dist.all_reduce(sum_of_ones)
                except Exception as error:  # noqa: BLE001 - the misbehaviour under test
                    print(f"swallowed {type(error).__name__}", flush=True)
                with torch.no_grad():
                    inner[0].weight.mul_(1 - 0.01 * float(sum_of_ones))  # type: ignore[operator]
            if mode in ("poll-after", "future-after"):
                sum_of_ones = torch.ones(1)
                work = dist.all_reduce(sum_of_ones, async_op=True)
                if mode == "future-after":
                    with contextlib.suppress(Exception):
                        work.get_future().wait()  # type: ignore[union-attr]
                while mode == "poll-after" and not work.is_completed():  # type: ignore[union-attr]
                    time.sleep(0.001)
                with torch.no_grad():
                    inner[0].weight.mul_(1 - 0.01 * float(sum_of_ones))  # type: ignore[operator]
            if mode == "evaluate-after":
                model.eval()
                with torch.no_grad():
                    dist.all_reduce(model(torch.ones(4, 8)).mean())
                model.train()
            if mode == "random-after":
                torch.rand(1)
        if mode == "break" and step.index == 3:
            break
    if mode == "second-loop":
        next(recovery.steps(1))
    digest = sum(float(p.double().sum()) for p in model.parameters())
    end = f"version-sum={digest.hex()} settings={settings.item()} rng={torch.rand(1).item():.9f}"
    print(f"end rank={rank} {end}", flush=True)
    dist.destroy_process_group()
    if mode == "exit-3":
        sys.exit(3)


if __name__ == "__main__":
    main()

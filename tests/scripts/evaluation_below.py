"""An evaluation that communicates below the block (``--above``: above it), as people write it.

The validation loss is averaged over all ranks; a scheduler and the best loss so far depend on it.
``--kill STEP:RANK:PLACE`` kills the rank there once: ``before`` its evaluation, ``before-reduce`` its collective,
``after`` it, or ``in-optimizer``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrecovery


class Best:
    """The best validation loss so far."""

    def __init__(self) -> None:
        self.loss, self.step, self.seen = float("inf"), -1, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Script:
    def __init__(self) -> None:
        self.args = _arguments()
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.recovery = flashrecovery.init()
        torch.manual_seed(0)
        between = torch.nn.BatchNorm1d(64) if self.args.buffers else torch.nn.Tanh()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), between, torch.nn.Linear(64, 1))
        fsdp2 = self.args.framework == "fsdp2"
        self.model: Any = fully_shard(self.net) if fsdp2 else DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.best = Best()
        self.recovery.register(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, best=self.best)
        torch.manual_seed(100 + self.rank)
        self.x, self.y = torch.randn(32, 16), torch.randn(32, 1) * (0.5 + self.rank)

    def run(self) -> None:
        for step in self.recovery.steps(self.args.steps):
            evaluates = step.index % self.args.every == self.args.every - 1
            if evaluates and self.args.above:
                self.evaluate(step.index)
            with step:
                loss = (self.model(torch.randn(8, 16)) - torch.randn(8, 1)).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.die_in_optimizer(step.index)
                self.optimizer.step()
            if step.committed:
                print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
            if evaluates and not self.args.above:
                self.evaluate(step.index)
        content = b"".join(_local(t).detach().numpy().tobytes() for t in self.net.state_dict().values())
        told = f"{self.best.loss.hex()} {self.best.step} {self.best.seen} {self.scheduler.state_dict()}"
        print(f"digest rank={self.rank} {hashlib.sha256(content + told.encode()).hexdigest()}", flush=True)

    def evaluate(self, index: int) -> None:
        self.die("before", index)
        self.model.eval()
        with torch.no_grad():
            mean = self.mean((self.model(self.x) - self.y).pow(2).mean(), index)
        self.model.train()
        self.die("after", index)
        self.best.seen += 1
        self.scheduler.step(mean)
        if mean < self.best.loss:
            self.best.loss, self.best.step = mean, index

    def mean(self, loss: Tensor, index: int) -> float:
        self.die("before-reduce", index)
        if self.args.by == "objects":
            losses: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(losses, loss.item())
            return float(sum(losses) / len(losses))
        if self.args.by == "reduce":  # rank 0 alone learns it, and tells
            dist.reduce(loss, dst=0)
            dist.broadcast(loss, src=0)
        elif self.args.by == "async":
            dist.all_reduce(loss, async_op=True).wait()
        elif self.args.by == "gather":
            parts = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, loss)
            loss = torch.stack(parts).sum()
        else:
            dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def die(self, place: str, index: int) -> None:
        killed = Path(self.args.dir) / "killed"
        if f"{index}:{self.rank}:{place}" == self.args.kill and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def die_in_optimizer(self, index: int) -> None:
        """When the first tensors have been changed."""
        if self.args.kill == f"{index}:{self.rank}:in-optimizer":
            self.optimizer.register_step_post_hook(lambda *_: self.die("in-optimizer", index))


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--framework", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--by", choices=("all_reduce", "objects", "reduce", "async", "gather"), default="all_reduce")
    parser.add_argument("--buffers", action="store_true")
    parser.add_argument("--above", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill", metavar="STEP:RANK:PLACE", default="")
    return parser.parse_args()


if __name__ == "__main__":
    Script().run()

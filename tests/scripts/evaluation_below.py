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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
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
        other = _OTHER_SUMS.get(self.args.by)
        if other is None:
            dist.all_reduce(loss)
        return (loss if other is None else other(loss)).item() / dist.get_world_size()

    def die(self, place: str, index: int) -> None:
        killed = Path(self.args.dir) / "killed"
        if f"{index}:{self.rank}:{place}" == self.args.kill and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def die_in_optimizer(self, index: int) -> None:
        """When the first tensors have been changed."""
        if self.args.kill == f"{index}:{self.rank}:in-optimizer":
            self.optimizer.register_step_post_hook(lambda *_: self.die("in-optimizer", index))


def _reduced(loss: Tensor) -> Tensor:
    """Rank 0 alone learns it, and tells."""
    dist.reduce(loss, dst=0)
    dist.broadcast(loss, src=0)
    return loss


def _waited_for(loss: Tensor) -> Tensor:
    _begun(loss).wait()
    return loss


def _synchronised(loss: Tensor) -> Tensor:
    _begun(loss).synchronize()
    return loss


def _polled(loss: Tensor) -> Tensor:
    work = _begun(loss)
    while not work.is_completed():
        time.sleep(0.001)
    return loss


def _of_a_future(loss: Tensor) -> Tensor:
    (total,) = _begun(loss).get_future().wait()
    return cast(Tensor, total)


def _after_a_future(loss: Tensor) -> Tensor:
    return cast(Tensor, _begun(loss).get_future().then(lambda future: future.value()[0].clone()).wait())


def _begun(loss: Tensor) -> dist.Work:
    work = dist.all_reduce(loss, async_op=True)
    assert work is not None
    return work


def _gathered(loss: Tensor) -> Tensor:
    parts = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, loss)
    return torch.stack(parts).sum()


def _coalesced(loss: Tensor) -> Tensor:
    """Two in one launch, which gloo cannot."""
    ones = torch.ones(1)
    with distributed_c10d._coalescing_manager(device=loss.device, async_ops=True) as together:
        dist.all_reduce(loss)
        dist.all_reduce(ones)
    together.wait()
    return loss * (ones.sum() / dist.get_world_size())


def _sent(loss: Tensor) -> Tensor:
    """Round a ring."""
    size, rank = dist.get_world_size(), dist.get_rank()
    total, passed = loss.clone(), loss.clone()
    for _ in range(size - 1):
        came = torch.zeros_like(passed)
        both = [
            dist.P2POp(dist.isend, passed, (rank + 1) % size),
            dist.P2POp(dist.irecv, came, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        total, passed = total + came, came
    return total


_OTHER_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "reduce": _reduced,
    "async": _waited_for,
    "synchronize": _synchronised,
    "polled": _polled,
    "future": _of_a_future,
    "then": _after_a_future,
    "gather": _gathered,
    "coalesced": _coalesced,
    "sends": _sent,
}


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--framework", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--by", choices=("all_reduce", "objects", *_OTHER_SUMS), default="all_reduce")
    parser.add_argument("--buffers", action="store_true")
    parser.add_argument("--above", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill", metavar="STEP:RANK:PLACE", default="")
    return parser.parse_args()


if __name__ == "__main__":
    Script().run()

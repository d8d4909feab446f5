"""Files, logs and checkpoints that a script writes below its block, as people write them.

``below.py DIR [FLAGS]`` writes in DIR ``best.pt`` (torch.save to another name, then os.replace; asks nothing),
``log.jsonl`` (asks ``step.committed``), ``seen.rankN`` (what ``step.committed`` said), and a checkpoint every second
step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
from flashrecovery.worker.step.step import Step


class Best:
    """The best loss so far, and how many saves there were."""

    def __init__(self) -> None:
        self.loss, self.step, self.saves = float("inf"), -1, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Script:
    def __init__(self) -> None:
        self.args = _arguments()
        dist.init_process_group("gloo")
        self.rank, self.dir = dist.get_rank(), Path(self.args.dir)
        self.saver = dist.new_group(backend="gloo")
        self.recovery = flashrecovery.init()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.best, self.pending = Best(), None
        self.attempts, self.attempted = 0, -1
        self.engine: Any = None
        self.model, self.optimizer = self._wrapped()
        torch.manual_seed(100 + self.rank)
        self.x, self.y = torch.randn(32, 16), torch.randn(32, 1) * (0.5 + self.rank)

    def _wrapped(self) -> tuple[Any, Any]:
        if self.args.framework == "deepspeed":
            import deepspeed

            config = {
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "zero_optimization": {"stage": 2},
                "flash_recovery": {"enabled": True},
            }
            self.engine, *_ = deepspeed.initialize(model=self.net, config=config)
            self.recovery.register(best=self.best)
            return self.engine, self.engine.optimizer
        model: Any = self.net if self.args.framework == "fsdp2" else DistributedDataParallel(self.net)
        if self.args.framework == "fsdp2":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.recovery.register(model=model, optimizer=optimizer, best=self.best)
        return model, optimizer

    def run(self) -> None:
        for step in self.recovery.steps(self.args.steps):
            assert not step.committed
            with step:
                self.begins(step)
                dist.barrier()  # a rank that dies from here on makes this attempt void in all ranks
                self.die_again(step)
                loss = self.train()
                assert not step.committed
            self.below(step, loss)
        if self.pending is not None:
            self.pending.result()
        content = b"".join(_local(p).detach().numpy().tobytes() for p in self.net.parameters())
        print(f"digest rank={self.rank} {hashlib.sha256(content).hexdigest()}", flush=True)

    def train(self) -> Tensor:
        loss: Tensor = (self.model(torch.randn(8, 16)) - torch.randn(8, 1)).pow(2).mean()
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
            return loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def below(self, step: Step, loss: Tensor) -> None:
        with (self.dir / f"seen.rank{self.rank}").open("a") as file:
            file.write(f"{step.index} {step.committed}\n")
        if step.committed:
            print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
        if self.args.framework != "deepspeed":
            self.keep_best(step)
        decision = [{"stop": step.index + 1 == self.args.steps}] if self.rank == 0 else [None]
        dist.broadcast_object_list(decision, src=0)  # what rank 0 has decided
        assert decision[0] is not None and isinstance(decision[0]["stop"], bool)
        if step.index % 2:
            self.best.saves += 1
            self.save(step)
        if step.committed and self.rank == 0:
            self.log(step.index, loss.item())

    def keep_best(self, step: Step) -> None:
        with torch.no_grad():
            mean = (self.net(self.x) - self.y).pow(2).mean()
            dist.all_reduce(mean)
        state = {name: _local(value) for name, value in self.net.state_dict().items()}
        if mean.item() < self.best.loss:
            self.best.loss, self.best.step = mean.item(), step.index
            if self.rank == 0:
                torch.save({"model": state, "best": vars(self.best)}, self.dir / "best.tmp")
                os.replace(self.dir / "best.tmp", self.dir / "best.pt")

    def log(self, index: int, loss: float) -> None:
        path = self.dir / "log.jsonl"
        newest = json.loads(path.read_text().splitlines()[-1]) if path.exists() else {"step": -1}
        last = newest["step"]
        if newest == {"step": index, "loss": loss.hex()}:
            return  # it counted, and was done again with the same bits: a rank had died before it had completed it
        assert index > last, f"step {index} is logged after step {last}"
        with path.open("a") as file:
            file.write(json.dumps({"step": index, "loss": loss.hex()}) + "\n")

    def save(self, step: Step) -> None:
        latest = str(self.dir / "latest")
        if self.args.save == "barrier":
            if self.rank == 0:
                torch.save(self.net.state_dict(), f"{latest}.pt")
                self.die_here(step)
            dist.barrier()
            return
        if self.args.save == "library":
            self.engine.save_checkpoint(latest)
            return
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "mark": Mark(self, step)}
        if self.args.save == "dcp":
            dcp.save(state, checkpoint_id=latest)
            return
        if self.pending is not None:
            self.pending.result()
        self.pending = dcp.async_save(state, checkpoint_id=str(self.dir / str(step.index)), process_group=self.saver)

    def die_here(self, step: Step) -> None:
        where, killed = f"{step.index}:{self.rank}", self.dir / "killed"
        if where == self.args.kill_in_save and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def begins(self, step: Step) -> None:
        """Before the barrier: one that a peer's death cuts short on this rank is an attempt, too."""
        self.attempts = self.attempts + 1 if step.index == self.attempted else 1
        self.attempted = step.index

    def die_again(self, step: Step) -> None:
        """Where a survivor does a step again with a replacement, whose first attempt is cut short by that."""
        if self.args.kill_again == f"{step.index}:{self.rank}" and self.attempts == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Mark:
    """Is asked for its state when a save has begun."""

    def __init__(self, script: Script, step: Step) -> None:
        self._script, self._step = script, step

    def state_dict(self) -> dict[str, int]:
        self._script.die_here(self._step)
        return {"step": self._step.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--framework", choices=("ddp", "fsdp2", "deepspeed"), default="ddp")
    parser.add_argument("--save", choices=("dcp", "async", "library", "barrier"), default="dcp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-in-save", metavar="STEP:RANK", default="")
    parser.add_argument("--kill-again", metavar="STEP:RANK", default="")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Script().run()

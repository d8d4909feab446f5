"""A script that tries its step again whatever is raised in it. ``retries.py KIND``: what it catches, and where.

``base``: anything, around its forward and backward pass. ``collective``: any Exception, around an all_reduce.
``suppressed``: anything, with contextlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

KIND = sys.argv[1]


class Script:
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.recovery = flashrecovery.init()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.recovery.register(model=self.model, optimizer=self.optimizer)
        torch.manual_seed(100 + dist.get_rank())

    def run(self) -> None:
        attempt = {"base": base, "suppressed": suppressed, "collective": lambda one: one()}[KIND]
        for step in self.recovery.steps(8):
            with step:
                loss = attempt(self.train)
                print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
        content = b"".join(p.detach().numpy().tobytes() for p in self.net.parameters())
        print(f"digest rank={dist.get_rank()} {hashlib.sha256(content).hexdigest()}", flush=True)

    def train(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if KIND == "collective":
            reduced()
        self.optimizer.step()
        return loss


def base(train: Callable[[], Tensor]) -> Tensor:
    while True:
        try:
            return train()
        except BaseException:  # noqa: BLE001 - as people write it
            continue


def suppressed(train: Callable[[], Tensor]) -> Tensor:
    while True:
        with contextlib.suppress(BaseException):
            return train()


def reduced() -> Tensor:
    while True:
        try:
            value = torch.ones(1)
            dist.all_reduce(value)
            return value
        except Exception:  # noqa: BLE001 - as people write it
            continue


if __name__ == "__main__":
    Script().run()

"""A sampler whose order follows from a difficulty that the script sets, and from how much it has given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import flashrecovery


class ByDifficulty(Sampler[int]):
    def __init__(self) -> None:
        self.difficulty, self.given = 1, 0

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(12, generator=torch.Generator().manual_seed(self.difficulty)).tolist():
            self.given += 1
            yield (index + self.given) % 12

    def __len__(self) -> int:
        return 12


def main() -> None:
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery.register(model=model, optimizer=optimizer)
    sampler, samples = ByDifficulty(), torch.randn(12, 4)
    data = recovery.data(DataLoader(samples, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    for step in recovery.steps(14):
        with step:
            loss = model(next(data)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.index % 3 == 2:
            sampler.difficulty += 1
        if step.committed:
            print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"digest rank={dist.get_rank()} {hashlib.sha256(content).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

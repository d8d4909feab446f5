"""The data of rank 1 ends before that of the others: ``break`` leaves the loop in its block, ``stop`` asks for more,
``agree`` has all ranks leave together, ``join`` trains within DistributedDataParallel's ``join()``, and with ``enough``
it does not end."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

MODE = sys.argv[1]


def finite(batches: int) -> Iterator[torch.Tensor]:
    for number in range(batches):
        yield torch.full((4, 8), float(number))


def main() -> None:
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery.register(model=model, optimizer=optimizer)
    data = recovery.data(finite(3 if dist.get_rank() == 1 and MODE != "enough" else 9))
    with model.join() if MODE == "join" else contextlib.nullcontext():  # type: ignore[no-untyped-call]
        for step in recovery.steps(9):
            with step:
                batch = next(data) if MODE == "stop" else next(data, None)
                more = torch.tensor(float(batch is not None))
                if MODE == "agree":
                    dist.all_reduce(more, dist.ReduceOp.MIN)
                if not more:
                    break
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"rank {dist.get_rank()} has left in step {step.index}", flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"digest rank={dist.get_rank()} {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

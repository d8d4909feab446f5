"""A small loop with an evaluation and a save behind each second step, of which rank 1 takes one kind for long.

``--long KIND:SECONDS`` (repeatable): first, compile, fetch, step, evaluation, batches (of an evaluation) or save, once,
in its first process.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

LONG_STEP = 3
BATCHES = 4


class Samples(torch.utils.data.IterableDataset[torch.Tensor]):
    """Equal batches in each process; ``wait`` is called before each."""

    def __init__(self, wait: Callable[[int], None]) -> None:
        self._wait = wait

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(1000):
            self._wait(number)
            yield torch.full((8,), number / 100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="append", default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoint", required=True)
    args = parser.parse_args()
    seconds = {kind: float(took) for kind, _, took in (text.partition(":") for text in args.long)}
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    rank = dist.get_rank()

    def take_long(kind: str, parts: int = 1) -> None:
        """In ``parts`` calls, all that is left."""
        if rank == 1 and os.environ.get("FLASHRECOVERY_GENERATION") == "0":
            now = seconds.get(kind, 0.0) / parts
            seconds[kind] = seconds.get(kind, 0.0) - now
            time.sleep(now)

    def compiles(graph: Any, _: Any) -> Any:
        take_long("compile")
        return graph.forward

    class Slow:
        """Something to be saved."""

        def __reduce__(self) -> tuple[Any, tuple[()]]:
            take_long("save")
            return (dict, ())

    torch.manual_seed(0)
    inner = torch.nn.Linear(8, 8)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recovery.register(model=model, optimizer=optimizer)
    twice = torch.compile(lambda x: x * 2, backend=compiles) if "compile" in seconds else lambda x: x * 2
    data = recovery.data(
        torch.utils.data.DataLoader(
            Samples(lambda number: take_long("fetch") if number == 4 * LONG_STEP else None), batch_size=4
        )
    )
    for step in recovery.steps(args.steps):
        with step:
            batch = next(data)
            if step.index == 0:
                take_long("first")
            if step.index == LONG_STEP:
                take_long("step")
                batch = twice(batch) / 2
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if step.index % 2:
            take_long("evaluation")
            for left in range(BATCHES, 0, -1):
                take_long("batches", left)
                with torch.no_grad():
                    model(torch.ones(1, 8))
            dist.barrier()
            torch.save({"model": model.state_dict(), "slow": Slow()}, f"{args.checkpoint}/{rank}.{os.getpid()}.pt")
            dist.barrier()
    print(f"end rank={rank} {sum(float(p.detach().double().sum()) for p in inner.parameters()).hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

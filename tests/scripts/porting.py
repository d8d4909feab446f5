"""Scripts as they are when someone has just put recovery into them: accelerate, compiled models, prefetchers.

``--loop NAME`` chooses the function of :data:`LOOPS` that makes the model, the optimizer and the source of batches.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import flashrecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts import proof

WIDTH = 8


class Noisy(Dataset[Tensor]):
    """Each sample is augmented with random numbers of the process that loads it."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / 10) + torch.rand(WIDTH) / 10


@dataclass
class Setup:
    """What a loop trains."""

    recovery: flashrecovery.Recovery
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    more: dict[str, object] = field(default_factory=dict)
    micro_batches: int = 1
    backward: Callable[[Tensor], None] = torch.Tensor.backward
    accumulate: Callable[[nn.Module], Any] = lambda _model: contextlib.nullcontext()
    scheduler: Any = None


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.Linear(16, 4))


def loader(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size=2, shuffle=True, **options)


def prefetch(source: Iterable[Tensor]) -> Iterator[Tensor]:
    """Always one batch ahead, epoch after epoch."""
    following: Tensor | None = None
    while True:
        for batch in source:
            if following is not None:
                yield following * 2
            following = batch


def plain(wrap: Callable[[flashrecovery.Recovery], Iterator[Tensor]], compiled: bool = False) -> Setup:
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    inner: Any = torch.compile(net()) if compiled else net()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery.register(model=model, optimizer=optimizer)
    torch.manual_seed(100 + dist.get_rank())
    return Setup(recovery, model, optimizer, wrap(recovery))


def accelerated(
    *, seedable: bool = False, dispatch: bool = False, with_accelerator: bool = True, accumulate: int = 2
) -> Setup:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=seedable, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=config)
    recovery = flashrecovery.init()
    torch.manual_seed(5 + accelerator.process_index)  # the order of samples is rank 0's
    prepared = accelerator.prepare_data_loader(loader())
    inner = net()
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.9))
    also = {"accelerator": accelerator} if with_accelerator else {}
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler, **also)
    torch.manual_seed(100 + accelerator.process_index)
    counted: dict[str, object] = {"counters": Counted(accelerator, scheduler)}
    data = recovery.data(prepared)
    calls = accelerator.backward, accelerator.accumulate
    return Setup(recovery, model, optimizer, data, counted, 2, *calls, scheduler)


class Counted:
    """Accelerate's counters, as they are when this is printed."""

    def __init__(self, accelerator: Any, scheduler: Any) -> None:
        self.accelerator, self.scheduler = accelerator, scheduler

    def __repr__(self) -> str:
        state = self.accelerator.gradient_state
        numbers = (self.accelerator.step, state.sync_gradients, state.end_of_dataloader, state.remainder)
        return repr((numbers, len(state.dataloader_references), self.scheduler.state_dict()))


LOOPS: dict[str, Callable[[], Setup]] = {
    "prefetcher-behind": lambda: plain(lambda recovery: recovery.data(prefetch(loader()))),
    "prefetcher-around": lambda: plain(lambda recovery: prefetch(recovery.data(loader()))),
    "persistent-workers": lambda: plain(lambda recovery: recovery.data(loader(num_workers=1, persistent_workers=True))),
    "compiled": lambda: plain(lambda recovery: recovery.data(loader(drop_last=True)), compiled=True),
    "accelerate": accelerated,
    "accelerate-seedable": lambda: accelerated(seedable=True),
    "accelerate-dispatch": lambda: accelerated(dispatch=True),
    "accelerate-astray": lambda: accelerated(accumulate=3),
    "accelerate-alone": lambda: accelerated(with_accelerator=False),
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--loop", choices=LOOPS, required=True)
    args = parser.parse_args()
    random.seed(1)
    np.random.seed(2)
    it = LOOPS[args.loop]()
    kills = proof.Kills(args.kill, it.recovery)
    kills.in_backward_of(it.model)
    for step in it.recovery.steps(args.steps):
        kills.step = step.index
        with step:
            kills.at("data")
            for _ in range(it.micro_batches):
                batch = next(it.batches)
                with it.accumulate(it.model):
                    loss = it.model(batch).square().mean()
                    it.backward(loss)
                    it.optimizer.step()
                    if it.scheduler is not None:
                        it.scheduler.step()
                    it.optimizer.zero_grad()
            proof.say_step(step.index, batch, loss, it.optimizer.param_groups[0]["lr"])
            kills.at("optimizer")
        kills.at("below")
    optimizer = getattr(it.optimizer, "optimizer", it.optimizer)
    proof.say_end(it.model, optimizer, it.more)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Do the worker processes of torchdata's loader draw random numbers?

Its ``state_dict()`` has no random numbers of its workers. Where they draw some, new workers that begin with that state
give other samples; and not from the first batch on, so that it need not be seen by comparing one. So the loader's
workers say, through memory that they share with the process of the rank, that they have drawn.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from flashrecovery.worker.local_state.generators import generators_of

_at_start: list[Any] = []
"""In a worker: its random states after its start."""


def _states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    return [
        bytes(torch.get_rng_state().numpy()),
        random.getstate(),
        None if drawn is None else (bytes(drawn[1]), drawn[2]),
    ]


@dataclasses.dataclass
class _Starting:
    """In the place of ``worker_init_fn``."""

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        if self.then is not None:
            self.then(number)
        _at_start[:] = _states()


@dataclasses.dataclass
class _Collating:
    """In the place of ``collate_fn``, which is called in the worker for each batch."""

    then: Callable[[Any], Any]
    drawn: torch.Tensor

    def __call__(self, samples: Any) -> Any:
        batch = self.then(samples)
        if _at_start and not self.drawn[0] and _at_start != _states():
            self.drawn[0] = 1
        return batch


class TorchdataWorkers:
    """The workers of one loader with workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset = loader.dataset
        self._drawn = torch.zeros(1, dtype=torch.uint8).share_memory_()
        loader.worker_init_fn = _Starting(loader.worker_init_fn)
        loader.collate_fn = _Collating(loader.collate_fn, self._drawn)

    @property
    def any(self) -> bool:
        """Whether any worker has drawn so far, or draws from a generator that only it has."""
        return bool(self._drawn[0]) or bool(generators_of([self._dataset]))

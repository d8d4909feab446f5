"""Megatron-LM's data loaders in a job that changes its number of replicas.

Megatron's sequential sampler goes through one global order of samples: the first micro-batches of all replicas, then
the second ones, and so on. So a step has the same samples in any size, if each begins where the one before has ended. A
loader is Megatron's own, with its workers; it starts again where its sampler would have to go on elsewhere: in another
size, and when a step is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashrecovery.errors import UnsupportedError

_SAMPLER = "MegatronPretrainingSampler"


class FollowingLoader:
    """Takes the place of a loader; its own iterator.

    Attributes:
        position: samples taken before the call that is under way, of all replicas together.

    Raises UnsupportedError: its sampler is another one.
    """

    def __init__(
        self, loader: Any, seed: int, place: Callable[[], tuple[int, int]], before_fetch: Callable[[], None]
    ) -> None:
        kind = type(getattr(loader, "batch_sampler", None)).__name__
        if kind != _SAMPLER:
            raise UnsupportedError(
                f"an elastic job with a loader ({type(loader).__name__}) whose batch sampler is a {kind}: in which "
                f"order it reads in another size is not known; allowed: {_SAMPLER} (--dataloader-type single)"
            )
        self._loader = loader
        self._seed = seed
        self._place = place
        self._before_fetch = before_fetch
        self._first: int = loader.batch_sampler.consumed_samples
        self.position = 0
        self._taken = 0
        self._source: Iterator[Any] | None = None
        self._next: tuple[int, int, int] | None = None  # position, replica and replicas of what ``_source`` gives next

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        replica, replicas = self._place()
        at = self.position + self._taken
        if self._source is None or self._next != (at, replica, replicas):
            self._source = self._begin(at, replica, replicas)
        self._before_fetch()
        self._next = None  # if the fetch fails, the source's position is unknown
        batch = next(self._source)
        self._taken += self._at_once(replicas)
        self._next = self.position + self._taken, replica, replicas
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def go_to(self, position: int) -> None:
        """What comes next is at ``position``."""
        self.position, self._taken = position, 0

    def keep(self) -> None:
        """The call is over: what was taken is taken."""
        self.go_to(self.position + self._taken)

    def _at_once(self, replicas: int) -> int:
        return int(self._loader.batch_sampler.micro_batch_size) * replicas

    def _begin(self, at: int, replica: int, replicas: int) -> Iterator[Any]:
        sampler = self._loader.batch_sampler
        sampler.consumed_samples = self._first + at
        sampler.data_parallel_rank = replica
        sampler.micro_batch_times_data_parallel_size = self._at_once(replicas)
        # Torch draws the workers' seed from it; from the global stream it would be drawn within a micro-batch.
        self._loader.generator = torch.Generator().manual_seed(self._seed)
        return iter(self._loader)

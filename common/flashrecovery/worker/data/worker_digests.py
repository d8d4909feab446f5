"""The content of a loader's batches, digested in its worker processes.

To read a batch of 40 MB takes as long as to copy it. A worker has just written it, and the training thread waits for
neither. Beside the training thread but in its process it would be too late: what a script writes into its batch by way
of numpy or ``.data`` advances no counter, and would be there before the digest has come so far.

Only for torch's own ``DataLoader``: another one may change the batch on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flashrecovery.worker.data.batch_digest import LeafDigest, digests_of_leaves


class _Digested(NamedTuple):
    """What a worker sends. Of a named tuple, pinning makes another one."""

    batch: Any
    leaves: Sequence[LeafDigest]


@dataclass
class _Collate:
    """In the place of ``collate_fn``, in the workers."""

    then: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        batch = self.then(samples)
        return _Digested(batch, digests_of_leaves(batch))


class _Digesting(_MultiProcessingDataLoaderIter):
    """Gives the batches without what the workers have said of them, which is in ``leaves``."""

    leaves: Sequence[LeafDigest] = ()

    def _next_data(self) -> Any:
        data = super()._next_data()  # type: ignore[no-untyped-call]
        if type(data) is _Digested:
            self.leaves = data.leaves
            return data.batch
        self.leaves = ()  # persistent workers of before
        return data


def begin(loader: Any) -> Iterator[Any]:
    """``iter(loader)``; of torch's own loader with workers, one of which :func:`leaves_of` knows."""
    if type(loader) is not DataLoader or not loader.num_workers:
        return iter(loader)
    collate = loader.collate_fn
    loader.collate_fn = _Collate(collate)
    try:
        iterator = iter(loader)
    finally:
        loader.collate_fn = collate
    if type(iterator) is _MultiProcessingDataLoaderIter:
        iterator.__class__ = _Digesting
    return iterator


def leaves_of(iterator: object) -> Sequence[LeafDigest]:
    """What the workers have said of the batch that ``iterator`` has just given."""
    return iterator.leaves if type(iterator) is _Digesting else ()

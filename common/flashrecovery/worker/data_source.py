"""What a data stream needs to know about its source: how an epoch begins, its state, how to go forward in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from flashrecovery.errors import DataSourceError
from flashrecovery.worker.rng import RngState, restore_rng

_HEAD = 64 << 10
"""Bytes at the beginning and at the end of a large tensor that go into a digest."""


class Source:
    """A loader, a list, a generator: anything iterable.

    Raises:
        DataSourceError: ``loader`` is not iterable.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise DataSourceError(f"recovery.data() needs something iterable, not a {type(loader).__name__}")
        self.loader = loader
        self.one_shot = isinstance(loader, Iterator)
        self._stateful = callable(getattr(loader, "state_dict", None)) and callable(
            getattr(loader, "load_state_dict", None)
        )

    @property
    def name(self) -> str:
        return type(self.loader).__name__

    # -- epochs -------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` on the sampler, the batch sampler or its sampler, whichever have it."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        seen: list[Any] = []
        for thing in (
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ):
            set_epoch = getattr(thing, "set_epoch", None)
            if callable(set_epoch) and not any(thing is s for s in seen):
                seen.append(thing)
                set_epoch(epoch)

    def begin(self, epoch: int, start: Mapping[str, Any] | None = None) -> tuple[Iterator[Any], EpochStart]:
        """The iterator of an epoch; with ``start``, of one that began in that random state."""
        self.set_epoch(epoch)
        if start is not None:
            self.restore_generators(start)
        begun = EpochStart(RngState.now(), self.generator_states())
        return iter(self.loader), begun

    def _generators(self) -> list[torch.Generator]:
        """Generators that belong to the loader and its samplers: they go on from epoch to epoch."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        found: list[torch.Generator] = []
        for thing in (
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ):
            generator = getattr(thing, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
                found.append(generator)
        return found

    def generator_states(self) -> list[torch.Tensor]:
        """The states of the generators that belong to the loader and its samplers."""
        return [g.get_state() for g in self._generators()]

    def restore_generators(self, start: Mapping[str, Any]) -> None:
        """Bring the random streams to the state of an epoch's beginning. Raises DataSourceError if they do not fit."""
        if "rng" in start:
            restore_rng(start["rng"])
        generators, states = self._generators(), start.get("generators", [])
        if len(generators) != len(states):
            raise DataSourceError(
                f"the {self.name} has {len(generators)} random generators, {len(states)} were captured"
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """``state_dict()`` of a stateful source, None for others. Only while it is being iterated."""
        return self.loader.state_dict() if self._stateful else None  # type: ignore[attr-defined]

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` gave. Raises DataSourceError if the source is not stateful here."""
        if not self._stateful:
            raise DataSourceError(f"the data source was stateful, the {self.name} of this process is not")
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def skip_indices(self, iterator: Iterator[Any], count: int) -> int:
        """Skip up to ``count`` batches without loading them; returns how many.

        Only where the order of samples is all that a batch leaves behind: a plain DataLoader over a map-style dataset
        in this process.
        """
        loader = self.loader
        if type(loader) is not DataLoader or loader.num_workers or isinstance(loader.dataset, IterableDataset):
            return 0
        sampler_iterator = getattr(iterator, "_sampler_iter", None)
        if sampler_iterator is None:
            return 0
        for done in range(count):
            if next(sampler_iterator, _END) is _END:
                return done
        return count


_END = object()


@dataclasses.dataclass
class EpochStart:
    """The random state in which an epoch began, kept only if beginning it has drawn from it."""

    rng: RngState
    generators: list[torch.Tensor]

    def plain(self) -> dict[str, Any]:
        """Call it after the first fetch: samplers draw their seed then."""
        state: dict[str, Any] = {"generators": self.generators}
        if RngState.now() != self.rng:
            state["rng"] = self.rng.plain()
        return state


def content_digest(batch: Any) -> str:
    """xxh3 over what a batch contains; large tensors by shape, beginning and end; device tensors by shape alone
    (reading them would wait for the device)."""
    digest = xxhash.xxh3_64()
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            if leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel():
                plain = leaf.detach() if leaf.requires_grad else leaf
                _update(digest, plain.reshape(-1).view(torch.uint8).numpy())
        elif hasattr(leaf, "__array_interface__"):
            _update(digest, memoryview(leaf.tobytes()))
        elif isinstance(leaf, (bytes, bytearray)):
            digest.update(leaf)
        elif isinstance(leaf, (bool, int, float, complex, str, type(None))):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.hexdigest()


def content_versions(batch: Any) -> tuple[int, ...]:
    """The version counters of a batch's tensors: they grow when one is written in place."""
    return tuple(leaf._version for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference())


def _update(digest: Any, data: Any) -> None:
    if len(data) <= 2 * _HEAD:
        digest.update(data)
    else:
        digest.update(data[:_HEAD])
        digest.update(data[-_HEAD:])


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name))
    else:
        yield batch

"""Megatron-LM's data loaders as sources of the core's streams: a replacement goes to its place without reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashrecovery import Recovery


class PlacedLoader:
    """A loader over Megatron's sequential sampler. Its state is the number of batches taken; set, it begins there the
    next time, and otherwise at its beginning: a survivor that goes back far starts it again."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._first: int = loader.batch_sampler.consumed_samples
        self._taken = self._begins_at = 0

    @staticmethod
    def fits(loader: Any) -> bool:
        """Whether ``loader`` has a sampler that begins at a given place."""
        return type(getattr(loader, "batch_sampler", None)).__name__ == "MegatronPretrainingSampler"

    def __iter__(self) -> Iterator[Any]:
        self._taken, self._begins_at = self._begins_at, 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        sampler = self._loader.batch_sampler
        sampler.consumed_samples = self._first + self._taken * sampler.micro_batch_times_data_parallel_size
        for batch in self._loader:
            self._taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begins_at = state["taken"]


class Streamed:
    """Takes the place of a loader: iterating over it gives the stream that rolls back with the step."""

    def __init__(self, loader: Any, recovery: Recovery) -> None:
        self._loader = loader
        self._stream = recovery.data(PlacedLoader(loader) if PlacedLoader.fits(loader) else loader)

    def __iter__(self) -> Iterator[Any]:
        return self._stream

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def streamed(loaders: Any, recovery: Recovery) -> Any:
    """The same structure of loaders (None where this rank reads nothing) with streams in their places."""
    if loaders is None:
        return None
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(streamed(loader, recovery) for loader in loaders)
    return Streamed(loaders, recovery)

"""What data must be able to do that rolls back with the step, wherever the script takes it from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flashrecovery.worker.data.sampler_settings import SamplerValues


class DataPosition(NamedTuple):
    """The position of a data source: the epoch, the batches fetched in it, the batches fetched in all."""

    epoch: int
    batch: int
    total: int


class StepData(ABC):
    """Data whose position is part of each version.

    Attributes:
        loader: the data loader.
        void: what is fetched belongs to no step (:mod:`flashrecovery.worker.step.discarded_run`).
        ended: the script has reached the end of the data, and the job can do no further step.
        reading: the source is being read. A stop waits until that ends: an interrupted data set (its transforms, say)
            would have advanced by a batch that was never delivered.
    """

    loader: Iterable[Any]
    void: bool
    ended: bool
    reading: bool = False
    _fetch_pre_hook: Callable[[], None] | None = None
    _fetch_post_hook: Callable[[], None] | None = None

    def register_fetch_pre_hook(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called at the beginning of every fetch. It may raise: then nothing is fetched."""
        self._fetch_pre_hook = hook

    def register_fetch_post_hook(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called at the end of every fetch that was begun, also of one that raises."""
        self._fetch_post_hook = hook

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Around each fetch."""
        if self._fetch_pre_hook is not None:
            self._fetch_pre_hook()
        try:
            yield
        finally:
            if self._fetch_post_hook is not None:
                self._fetch_post_hook()

    def set_void(self, void: bool) -> None:
        """Whether what is fetched from now on belongs to no step."""
        self.void = void

    @contextmanager
    def _while_reading(self) -> Iterator[None]:
        self.reading = True
        try:
            yield
        finally:
            self.reading = False

    @property
    @abstractmethod
    def position(self) -> DataPosition:
        """A value, cheap to compare."""

    @property
    @abstractmethod
    def mark(self) -> tuple[DataPosition, SamplerValues]:
        """Changes whenever something is fetched, or a sampler of the script's is set."""

    @property
    @abstractmethod
    def can_be_read_again(self) -> bool:
        """Whether the source can be begun again."""

    @abstractmethod
    def exit_codes(self) -> list[int | None]:
        """The exit codes of the processes that read for it; None: it runs."""

    @abstractmethod
    def leave_samplers(self) -> None:
        """What samplers are set to is not to be brought back here: a replacement runs the script's loop again."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """What has been fetched so far belongs to the steps before ``version``. The last call for a version counts."""

    @abstractmethod
    def rollback(self, version: int) -> None:
        """Give again what was fetched after ``version``, random numbers included. Raises DataSourceError."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """What a replacement needs to bring a fresh source to this position (plain values)."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Bring a source to a captured position. Leaves the random streams anywhere. Raises DataSourceError."""


def exit_codes_of(iterator: object) -> list[int | None]:
    """The exit codes of the processes that read for a loader's iterator; None: it runs."""
    return [worker.exitcode for worker in getattr(iterator, "_workers", ())]

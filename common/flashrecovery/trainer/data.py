"""The Trainer's batches, as a stream of the core that rolls back with the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flashrecovery.errors import DataSourceError
from flashrecovery.trainer.state import refused
from flashrecovery.worker.data.stream import DataStream


class Epochs:
    """The Trainer's loader as a source for the core. Its state is the epoch, and how many batches have been taken.
    ``loop_state`` gives ``trainer.state``, at which samplers may look."""

    def __init__(self, watched: WatchedLoader, loop_state: Callable[[], Any]) -> None:
        self._watched, self.loop_state = watched, loop_state
        self.sampler = watched.loader
        """What ``set_epoch`` is called on."""
        self._first_epoch = watched.first_epoch

    def __iter__(self) -> Iterator[Any]:
        watched = self._watched
        if watched.rest is None or watched.loader.iteration != self._first_epoch:
            return iter(watched.loader)
        watched.rest.set_epoch(self._first_epoch)
        return iter(watched.rest)

    def __len__(self) -> int:
        return len(self._watched.loader)


class WatchedLoader:
    """What the Trainer goes over, epoch after epoch: the stream that rolls back with the step.

    Attributes:
        first_epoch: the one with which the training begins.
        rest: the loader of what is left of it, where the training begins amid it.
        skipped: batches of it that are passed over.

    Raises:
        UnsupportedError: a loader in which ranks communicate.
    """

    def __init__(self, loader: Any) -> None:
        from accelerate.data_loader import DataLoaderShard

        if not isinstance(loader, DataLoaderShard) or loader.rng_types:
            raise refused(
                f"a {type(loader).__name__} in which ranks communicate; leave dispatch_batches = False and "
                "use_seedable_sampler = True in accelerator_config"
            )
        self.loader = loader
        self._stream: DataStream | None = None
        self.first_epoch: int = 0
        self.rest: Any = None
        self.skipped = 0
        self._told = False

    def __iter__(self) -> _Epoch:
        return _Epoch(self, 0)

    def begin_behind(self, rest: Any, skipped: int) -> _Rest:
        """The training begins behind ``skipped`` batches of an epoch. Returns what the Trainer goes over first."""
        self.rest, self.skipped = rest, skipped
        return _Rest(self)

    def reads(self, stream: DataStream) -> None:
        """The loop is about to make its first step, with batches of ``stream``."""
        self._stream = stream

    @property
    def stream(self) -> DataStream:
        """Where the batches come from, once the loop has been opened."""
        if self._stream is None:
            raise DataSourceError("the Trainer has asked for a batch before its loop began")
        return self._stream

    def place(self) -> int:
        """How many batches of its epoch are behind the stream, with those that were passed over."""
        position = self.stream.position
        return position.batch + (self.skipped if position.epoch == self.first_epoch else 0)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """The stream does it."""
        if not self._told:
            self._told, self.first_epoch = True, epoch


class _Rest:
    """The first epoch of a training that begins amid it."""

    def __init__(self, source: WatchedLoader) -> None:
        self._source = source

    def __iter__(self) -> _Epoch:
        return _Epoch(self._source, self._source.skipped)

    def __len__(self) -> int:
        return len(self._source.rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source.rest, name)

    def set_epoch(self, epoch: int) -> None:
        """The stream does it."""
        self._source.set_epoch(epoch)


class _Epoch:
    """An iterator over one epoch, which ends when the Trainer has what it wants. ``fetched``: batches so far."""

    def __init__(self, source: WatchedLoader, fetched: int) -> None:
        self._source = source
        self.fetched = fetched

    def check(self, fetched: int) -> None:
        """Raises DataSourceError if the Trainer has left the last epoch before its end."""
        if self._source.place() % len(self._source) != fetched:
            position = self._source.stream.position
            raise DataSourceError(
                f"the Trainer is at batch {fetched} of an epoch, its data at batch {self._source.place()} of epoch "
                f"{position.epoch}; ending an epoch early (control.should_epoch_stop) is not supported"
            )

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        return next(self._source.stream)

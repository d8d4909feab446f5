"""The Trainer's batches, as a stream of the core that rolls back with the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flashrecovery.errors import DataSourceError
from flashrecovery.trainer.state import refused


class Epochs:
    """The Trainer's loader as a source for the core. Its state is the epoch, and how many batches have been taken.
    ``loop_state`` gives ``trainer.state``, at which samplers may look."""

    def __init__(self, loader: Any, loop_state: Callable[[], Any]) -> None:
        self._loader, self.loop_state = loader, loop_state
        self.sampler = loader
        """What ``set_epoch`` is called on."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


class WatchedLoader:
    """What the Trainer goes over, epoch after epoch: the stream that rolls back with the step.

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
        self.stream: Iterable[Any] = ()

    def __iter__(self) -> _Epoch:
        return _Epoch(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """The stream does it."""


class _Epoch:
    """An iterator over one epoch, which ends when the Trainer has what it wants. ``fetched``: batches so far."""

    def __init__(self, source: WatchedLoader) -> None:
        self._source = source
        self.fetched = 0

    def check(self, fetched: int) -> None:
        """Raises DataSourceError if the Trainer has left the last epoch before its end."""
        position = self._source.stream.position  # type: ignore[attr-defined]
        if position.batch % len(self._source) != fetched:
            raise DataSourceError(
                f"the Trainer is at batch {fetched} of an epoch, its data at batch {position.batch} of epoch "
                f"{position.epoch}; ending an epoch early (control.should_epoch_stop) is not supported"
            )

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        return next(self._source.stream)  # type: ignore[call-overload]

"""PipelineEngine without a change in the script: ``train_batch``, ``eval_batch`` and ``save_checkpoint`` are protected.

Each call of them is a step of the core (:mod:`flashrecovery.worker.framework_calls`), unless the script uses
``engine.recovery.steps()``. In a replacement, calls that the dead process had behind it return at once: ``train_batch``
the loss of the newest step (``engine.global_steps`` is ahead of the script's count then), ``eval_batch`` a NaN.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery import Recovery
from flashrecovery.adapter.loop import DataStream, RngState, restore_rng
from flashrecovery.errors import RegistrationError


class ProtectedCalls:
    """Replaces the methods of one engine. ``recovery``: of that engine."""

    def __init__(self, engine: Any, recovery: Recovery) -> None:
        self._engine = engine
        self._recovery = recovery
        self._given: Any = None
        self._stream: DataStream | None = None
        self._called = False
        self._train: Callable[..., Any] = engine.train_batch
        self._eval: Callable[..., Any] = engine.eval_batch
        self._eval_signature = inspect.signature(engine.eval_batch)
        self._save: Callable[..., Any] = engine.save_checkpoint
        if engine.data_iterator is not None:  # made of the training_data that deepspeed.initialize() was given
            self._given, self._stream = engine.data_iterator, recovery.data(engine.data_iterator)
            engine.data_iterator = self._stream
        for method in (self.train_batch, self.eval_batch, self.save_checkpoint):
            _replace(engine, method)

    def train_batch(self, data_iter: Any = None) -> Any:
        """Trains as the engine's own does; ``data_iter`` is the same object in every call, as DeepSpeed's documentation
        has it.

        Raises:
            RegistrationError: no data on a stage that needs it, or another iterator than before.
        """
        data = self._training_data(data_iter)
        return self._call("train_batch", lambda: self._train(data), lambda: self._engine.agg_train_loss)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as the engine's own does. ``data_iter`` may be another one each time.

        Raises:
            RegistrationError: no data on a stage that needs it.
        """
        call = self._eval_signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments.pop("data_iter")
        if given is None and self._reads_data():
            raise self._without_data("eval_batch", "pass data_iter")
        source = self._stream if given is self._given else given
        reader = source if source is None or isinstance(source, DataStream) else _Reader(source)
        train_iterator = self._engine.data_iterator

        def body() -> Any:
            self._engine.set_dataiterator(train_iterator)  # an interrupted call has left its own there
            return self._eval(_again(reader), **call.arguments)

        def skipped() -> Any:
            if isinstance(reader, _Reader) and self._reads_data():
                for _ in range(call.arguments["num_micro_batches"] or self._engine.micro_batches):
                    next(given)
            loss = torch.tensor(float("nan"), device=self._engine.device)
            return (loss, None) if call.arguments["return_logits"] else loss

        return self._call("eval_batch", body, skipped)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Saves as the engine's own does; a failure in it is recovered from, and it is saved again."""
        return self._call("save_checkpoint", lambda: self._save(*args, **kwargs), lambda: True)

    def _call(self, kind: str, body: Callable[[], Any], skipped: Callable[[], Any]) -> Any:
        self._called = True
        return self._recovery.call(kind, body, skipped=skipped)

    def _reads_data(self) -> bool:
        return bool(self._engine.is_first_stage() or self._engine.is_last_stage())

    def _without_data(self, what: str, remedy: str) -> RegistrationError:
        engine = self._engine
        return RegistrationError(
            f"{what}() without a data iterator on rank {engine.global_rank}, stage {engine.stage_id} of "
            f"{engine.num_stages}: the first and the last stage read data; {remedy}"
        )

    def _training_data(self, given: Any) -> DataStream | None:
        """The stream behind what ``train_batch`` was given."""
        if isinstance(given, DataStream):
            return given
        if given is None:
            if self._stream is None and self._reads_data():
                raise self._without_data("train_batch", "pass data_iter, or training_data to deepspeed.initialize()")
            return self._stream
        if self._stream is None:
            if self._called:
                raise RegistrationError(
                    "train_batch() was given its data after another call of the engine had been protected, and a "
                    "replacement could not find its place in it; before the first call, make the iterator with "
                    "data_iter = engine.recovery.data(loader)"
                )
            self._given, self._stream = given, self._recovery.data(given)
        elif given is not self._given:
            raise RegistrationError(
                "train_batch() was given another data iterator than before, and a replacement could not find its place "
                "in it; pass one iterator for the whole training (deepspeed.utils.RepeatingLoader), or use "
                "engine.recovery.data() and engine.recovery.steps()"
            )
        return self._stream


def _replace(engine: Any, method: Callable[..., Any]) -> None:
    """Put ``method`` in the place of the engine's method of that name."""
    name = method.__name__

    @functools.wraps(getattr(engine, name))
    def protected(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    setattr(engine, name, protected)


@dataclass(frozen=True)
class _Taken:
    item: Any
    rng: RngState | None
    """The random state after the item was fetched, if fetching has drawn from it."""


class _Reader:
    """Hands out again what an interrupted call has taken from an iterator, random numbers included."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._taken: list[_Taken] = []

    def read(self) -> Iterator[Any]:
        """The items again from the first one that the call has taken, and then new ones."""
        for taken in self._taken[:]:
            if taken.rng is not None:
                restore_rng(taken.rng.plain())
            yield taken.item
        before = RngState.now()
        for item in self._source:
            after = RngState.now()
            self._taken.append(_Taken(item, None if after == before else after))
            yield item
            before = RngState.now()


def _again(reader: _Reader | DataStream | None) -> Iterator[Any] | None:
    """What a call begins to read: a reader starts again, a stream goes back by itself."""
    return reader.read() if isinstance(reader, _Reader) else reader

"""PipelineEngine without a change in the script: ``train_batch``, ``eval_batch`` and ``save_checkpoint`` are protected.

Each call of them is a step of the core (:mod:`flashrecovery.worker.calls`), unless the script uses
``engine.recovery.steps()``. In a replacement, calls that the dead process had behind it return at once: ``train_batch``
the loss of the newest step, ``eval_batch`` a NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashrecovery import Recovery
from flashrecovery.errors import RegistrationError
from flashrecovery.worker.data import DataStream


class ProtectedCalls:
    """Replaces the methods of one engine. ``recovery``: of that engine."""

    def __init__(self, engine: Any, recovery: Recovery) -> None:
        self._engine = engine
        self._recovery = recovery
        self._given: Any = None
        self._stream: DataStream | None = None
        self._train: Callable[..., Any] = engine.train_batch
        self._eval: Callable[..., Any] = engine.eval_batch
        self._save: Callable[..., Any] = engine.save_checkpoint
        engine.train_batch = functools.wraps(self._train)(self.train_batch)
        engine.eval_batch = functools.wraps(self._eval)(self.eval_batch)
        engine.save_checkpoint = functools.wraps(self._save)(self.save_checkpoint)

    def train_batch(self, data_iter: Any = None) -> Any:
        """As the engine's; ``data_iter`` is the same object in every call, as DeepSpeed's documentation has it.

        Raises:
            RegistrationError: no data on a stage that needs it, or another iterator than before.
        """
        data = self._data(data_iter)
        return self._recovery.call(
            "train_batch", lambda: self._train(data), skipped=lambda: self._engine.agg_train_loss
        )

    def eval_batch(self, data_iter: Any, *args: Any, return_logits: bool = False, **kwargs: Any) -> Any:
        """As the engine's. ``data_iter`` may be another one each time."""
        reader = _Reader(data_iter)

        def body() -> Any:
            return self._eval(reader.begin(), *args, return_logits=return_logits, **kwargs)

        def skipped() -> Any:
            engine = self._engine
            if engine.is_first_stage() or engine.is_last_stage():
                for _ in range(kwargs.get("num_micro_batches") or engine.micro_batches):
                    next(data_iter)
            loss = torch.tensor(float("nan"), device=engine.device)
            return (loss, None) if return_logits else loss

        return self._recovery.call("eval_batch", body, skipped=skipped)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's; a failure in it is recovered from, and it is saved again."""
        return self._recovery.call("save_checkpoint", lambda: self._save(*args, **kwargs), skipped=lambda: True)

    def _data(self, data_iter: Any) -> Any:
        engine = self._engine
        given = engine.data_iterator if data_iter is None else data_iter
        if given is None:
            if engine.is_first_stage() or engine.is_last_stage():
                raise RegistrationError(
                    f"train_batch() on rank {engine.global_rank}, stage {engine.stage_id}: the first and the last "
                    "stage read data; pass data_iter, or training_data to deepspeed.initialize()"
                )
            return None
        if isinstance(given, DataStream):
            return given
        if self._stream is None:
            self._given, self._stream = given, self._recovery.data(given)
        elif given is not self._given:
            raise RegistrationError(
                "train_batch() was given another data iterator than before, and a replacement could not find its place "
                "in it; pass one iterator for the whole training (deepspeed.utils.RepeatingLoader), or use "
                "engine.recovery.data() and engine.recovery.steps()"
            )
        return self._stream


class _Reader:
    """Hands out again what an interrupted call has taken from an iterator."""

    def __init__(self, source: Iterator[Any] | None) -> None:
        self._source = source
        self._taken: list[Any] = []

    def begin(self) -> Iterator[Any] | None:
        return None if self._source is None else self._read(self._source)

    def _read(self, source: Iterator[Any]) -> Iterator[Any]:
        yield from self._taken[:]
        for item in source:
            self._taken.append(item)
            yield item

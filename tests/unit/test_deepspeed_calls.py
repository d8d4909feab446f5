"""The protected calls of a pipeline engine, with stand-ins: none of this needs deepspeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.data.stream import DataStream
from fr_deepspeed.calls import ProtectedCalls


class Engine:
    """Reads two items in each call, on one of three stages."""

    def __init__(self, stage: int = 0, data: Any = None) -> None:
        self.stage_id = self.global_rank = stage
        self.num_stages, self.micro_batches = 3, 2
        self.data_iterator = data
        self.agg_train_loss = torch.tensor(1.5)
        self.device = torch.device("cpu")
        self.interrupted = False

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == 2

    def set_dataiterator(self, data: Any) -> None:
        self.data_iterator = data

    def train_batch(self, data_iter: Any = None) -> list[Any]:
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        return self._take(2)

    def eval_batch(self, data_iter: Any, return_logits: bool = False, num_micro_batches: int | None = None) -> Any:
        train = self.data_iterator
        self.set_dataiterator(data_iter)
        taken = self._take(num_micro_batches or 2)
        if self.interrupted:
            raise RuntimeError("a peer died")
        self.set_dataiterator(train)
        return (taken, "logits") if return_logits else taken

    def save_checkpoint(self, path: str) -> bool:
        return bool(path)

    def _take(self, count: int) -> list[Any]:
        return [] if self.data_iterator is None else [next(self.data_iterator) for _ in range(count)]


class Recovery:
    """Makes each call; ``skip``: as a replacement does; an interrupted one is made again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.skip = False

    def data(self, loader: Any) -> DataStream:
        return DataStream(loader)

    def call(self, kind: str, body: Callable[[], Any], *, skipped: Callable[[], Any]) -> Any:
        if self.skip:
            return skipped()
        try:
            return body()
        except RuntimeError:
            self.engine.interrupted = False
            return body()


def protected(stage: int = 0, data: Any = None) -> tuple[Any, Recovery]:
    engine = Engine(stage, data)
    recovery = Recovery(engine)
    ProtectedCalls(engine, recovery)  # type: ignore[arg-type]
    return engine, recovery


def numbers() -> Iterator[int]:
    return iter(range(100))


def test_one_iterator_for_the_whole_training() -> None:
    engine, _ = protected()
    data = numbers()
    assert [engine.train_batch(data), engine.train_batch(data)] == [[0, 1], [2, 3]]
    assert isinstance(engine.data_iterator, DataStream)
    with pytest.raises(RegistrationError, match="another data iterator than before"):
        engine.train_batch(numbers())


def test_data_is_needed_on_the_first_and_the_last_stage_only() -> None:
    for stage in (0, 2):
        engine, _ = protected(stage)
        with pytest.raises(RegistrationError, match=rf"without a data iterator on rank {stage}, stage {stage} of 3"):
            engine.train_batch()
        with pytest.raises(RegistrationError, match=r"eval_batch\(\) without a data iterator"):
            engine.eval_batch(None)
    engine, _ = protected(1)
    assert engine.train_batch() == engine.eval_batch(None) == []


def test_training_data_given_to_initialize() -> None:
    engine, _ = protected(data=numbers())
    assert engine.train_batch() == [0, 1]
    engine.interrupted = True
    assert engine.eval_batch(iter("abcd")) == ["a", "b"]
    assert engine.train_batch() == [2, 3]


def test_an_interrupted_evaluation_gets_the_same_items_and_random_numbers() -> None:
    def drawing() -> Iterator[float]:
        while True:
            yield float(torch.rand(()))

    torch.manual_seed(3)
    wanted = [Engine().eval_batch(drawing()), float(torch.rand(()))]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    engine, recovery = protected()
    data = drawing()
    engine.interrupted = True
    original = recovery.call

    def call(kind: str, body: Callable[[], Any], *, skipped: Callable[[], Any]) -> Any:
        def begun() -> Any:
            torch.set_rng_state(state)  # as the core does before a call is made again
            return body()

        return original(kind, begun, skipped=skipped)

    recovery.call = call  # type: ignore[method-assign]
    assert [engine.eval_batch(data), float(torch.rand(()))] == wanted


def test_an_evaluation_on_the_training_data_reads_its_stream() -> None:
    engine, recovery = protected()
    data = numbers()
    engine.train_batch(data)
    assert engine.eval_batch(data, True) == ([2, 3], "logits")
    recovery.skip = True
    assert torch.isnan(engine.eval_batch(data))  # the stream is restored, and not read
    recovery.skip = False
    assert engine.train_batch(data) == [4, 5]


def test_a_skipped_call_takes_what_the_dead_process_took() -> None:
    engine, recovery = protected()
    engine.train_batch(numbers())
    recovery.skip = True
    data = numbers()
    loss, logits = engine.eval_batch(data, return_logits=True, num_micro_batches=3)
    assert torch.isnan(loss) and logits is None and next(data) == 3
    assert engine.train_batch(None) == 1.5
    assert engine.save_checkpoint("x") is True


def test_data_that_comes_after_the_first_call() -> None:
    engine, _ = protected()
    engine.eval_batch(numbers())
    with pytest.raises(RegistrationError, match=r"data_iter = engine.recovery.data\(loader\)"):
        engine.train_batch(numbers())
    assert engine.train_batch(DataStream(numbers())) == [0, 1]

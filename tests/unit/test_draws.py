"""Sources of a script's own that draw from the global random streams: a fresh process reads the same elements."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from flashrecovery.errors import DataSourceError
from flashrecovery.state import codec
from flashrecovery.worker.data import draws
from flashrecovery.worker.data.draws import Draws, DrawsWatch
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.own_loops.loop_data import LoopData
from flashrecovery.worker.startup.import_time_hooks import count_and_renew_workers

STREAMS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(7),
    "python": random.random,
    "numpy": lambda: np.random.rand(3),
}
"""What training draws from a stream."""


def test_a_loader_that_is_begun_within_a_fetch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler may draw its seed in the next one."""
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # put back afterwards
    count_and_renew_workers(torch.utils.data.dataloader)
    watch, loader = DrawsWatch(), DataLoader([1, 2])  # type: ignore[arg-type]

    def follows(*, begins: bool) -> bool:
        found = RngState.now()
        iter(loader)  # between two fetches
        with watch.fetching():
            if begins:
                iter(loader)
        return watch.noted(Draws(), 0, found, "digest").follows

    assert [follows(begins=True), follows(begins=False)] == [True, False]


def orders(shuffled: Callable[[int], list[int]]) -> Callable[[], Iterator[torch.Tensor]]:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from map(torch.tensor, shuffled(12))

    return endless


def by_torch(count: int) -> list[int]:
    order: list[int] = torch.randperm(count).tolist()
    return order


def noisy() -> Iterator[torch.Tensor]:
    """Each element draws, and in the first one of a pass the order begins."""
    for element in orders(by_torch)():
        noise = random.random() if torch.rand(()) < 0.5 else np.random.rand()
        yield element + noise


def ahead() -> Iterator[torch.Tensor]:
    elements = noisy()
    waiting = deque(itertools.islice(elements, 2))
    for element in elements:
        waiting.append(element)
        yield waiting.popleft()


def shuffle_buffer(drawn: Callable[[int], int], size: int = 8) -> Callable[[], Iterator[torch.Tensor]]:
    def elements() -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        for number in itertools.count():
            buffer.append(number)
            if len(buffer) > size:
                yield torch.tensor(buffer.pop(drawn(size)))

    return elements


def shuffled(size: int) -> DataLoader[Any]:
    return DataLoader(range(12), batch_size=size, shuffle=True)  # type: ignore[arg-type]


def again_and_again() -> Iterator[Any]:
    loader = shuffled(2)
    while True:
        yield from loader


class EndlessOrder(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(5).tolist()


class Passes:
    """Can be begun again, each time in another order: torchdata's sampler has a generator of its own."""

    def __init__(self) -> None:
        self.loader = StatefulDataLoader(range(12), batch_size=2, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


SOURCES: dict[str, Callable[[], Iterable[Any]]] = {
    "orders of torch": orders(by_torch),
    "orders of Python": orders(lambda count: random.sample(range(count), count)),
    "orders of numpy": orders(lambda count: np.random.permutation(count).tolist()),
    "noise": noisy,
    "looks ahead": ahead,
    "a loader again and again": again_and_again,
    "cycle": lambda: itertools.cycle(shuffled(2)),
    "zip": lambda: zip(itertools.cycle(shuffled(4)), again_and_again()),
    "own sampler": lambda: DataLoader(range(12), batch_size=2, sampler=EndlessOrder()),  # type: ignore[arg-type]
}


def seeded(seed: int) -> None:
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed)


class Reader:
    """A process that reads ``source`` from where a process before it has been."""

    def __init__(
        self, kind: type, source: Callable[[], Iterable[Any]], before: tuple[bytes, Any] | None = None
    ) -> None:
        seeded(3)
        made = source()
        state = None if before is None else codec.loads(before[0])
        self.data: Any
        if kind is DataStream:
            self.data = DataStream(made)
        else:
            self.data = LoopData()
        seeded(100 if before is None else 77)
        if state is not None:
            self.data.restore(state)
        if kind is LoopData:
            self.data.enter(made)
        if before is not None:
            restore_rng(before[1])

    def captured(self) -> tuple[bytes, Any]:
        return codec.dumps(self.data.capture()), RngState.now().plain()

    def steps(self, count: int, fetches: int, streams: Iterable[str]) -> list[Any]:
        read = []
        for number in range(count):
            self.data.commit(number)
            fetched = [
                next(self.data) if isinstance(self.data, DataStream) else self.data.fetch() for _ in range(fetches)
            ]
            read.append(codec.dumps(fetched))
            for stream in streams:
                STREAMS[stream]()
        return read


KINDS = (DataStream, LoopData)


@pytest.mark.parametrize("streams", [("torch",), ("torch", "python", "numpy")], ids=["torch", "all"])
@pytest.mark.parametrize(("steps", "fetches"), [(1, 4), (7, 1), (14, 4), (35, 1)])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_elements_are_read(
    kind: type, source: str, steps: int, fetches: int, streams: tuple[str, ...]
) -> None:
    """Also when the order has begun many fetches before."""
    reader = Reader(kind, SOURCES[source])
    reader.steps(steps, fetches, streams)
    before = reader.captured()
    assert len(before[0]) < 250_000
    wanted = reader.steps(8, fetches, streams)
    again = Reader(kind, SOURCES[source], before)
    assert again.steps(8, fetches, streams) == wanted


@pytest.mark.parametrize("steps", [3, 9, 20])
def test_an_object_around_torchdatas_loader_is_begun_again(steps: int) -> None:
    """A loop would be left at the end of a pass; ``recovery.data()`` goes on with the next one."""
    reader = Reader(DataStream, Passes)
    reader.steps(steps, 1, ["torch"])
    before = reader.captured()
    wanted = reader.steps(8, 1, ["torch"])
    assert Reader(DataStream, Passes, before).steps(8, 1, ["torch"]) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_training_leaves_alone_is_kept_once(kind: type) -> None:
    """A shuffle buffer depends on all that it has drawn."""
    source = shuffle_buffer(random.randrange)
    reader = Reader(kind, source)
    reader.steps(60, 1, ["torch"])
    before = reader.captured()
    assert len(before[0]) < 16_000
    wanted = reader.steps(8, 1, ["torch"])
    assert Reader(kind, source, before).steps(8, 1, ["torch"]) == wanted


class Augmented(Dataset[torch.Tensor]):
    """Adds noise to each sample, in the process that reads it."""

    def __init__(self, noise: Callable[[], object]) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.as_tensor(self.noise()).sum() + index


@pytest.mark.parametrize("streams", [(), ("torch",)], ids=["none", "torch"])
@pytest.mark.parametrize("steps", [3, 12])
@pytest.mark.parametrize("noise", STREAMS)
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_skipped_have_drawn_too(
    kind: type, loader: type[DataLoader[Any]], noise: str, steps: int, streams: tuple[str, ...]
) -> None:
    """Training may leave alone the stream from which a loader's data set draws."""
    reader = Reader(kind, lambda: loader(Augmented(STREAMS[noise]), batch_size=2, shuffle=True))
    reader.steps(steps, 1, streams)
    before = reader.captured()
    wanted = reader.steps(8, 1, streams)
    again = Reader(kind, lambda: loader(Augmented(STREAMS[noise]), batch_size=2, shuffle=True), before)
    assert again.steps(8, 1, streams) == wanted


@pytest.mark.parametrize("steps", [30, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_what_depends_on_forgotten_draws_is_refused(kind: type, steps: int) -> None:
    """And not only if the last element happens to be another one."""
    source = shuffle_buffer(lambda count: int(torch.randint(count, ())), size=100)
    reader = Reader(kind, source)
    reader.steps(steps, 1, ["torch"])
    with pytest.raises(DataSourceError, match=r"gives other (samples|elements) than before"):
        Reader(kind, source, reader.captured()).steps(1, 1, [])


def test_which_draws_are_forgotten() -> None:
    """All but those of an order, of recent fetches, and the last ones of their stream."""
    known = Draws().with_states(0, {"torch": b"0"}, 3).with_order(0, ["torch"])
    known = known.with_states(1, {"torch": b"1", "python": b"1"}, 3)
    for number in range(2, 6):
        known = known.with_states(number, {"torch": b"%d" % number}, 3)
    assert known.states == {
        0: {"torch": b"0"},
        1: {"python": b"1"},
        **{number: {"torch": b"%d" % number} for number in (3, 4, 5)},
    }
    assert known.exact_from == 3


def test_an_order_for_which_nothing_had_to_be_kept_keeps_what_it_follows_from() -> None:
    known = Draws().with_states(4, {"torch": b"4"}, 3).with_states(5, {}, 3).with_order(5, ["torch"])
    assert known.orders == (4,)


def test_orders_of_before_are_forgotten_but_for_the_first_one() -> None:
    known = Draws()
    for number in range(40):
        known = known.with_states(number, {"torch": b""}, 1).with_order(number, ["torch"])
    assert known.orders == (0, *range(25, 40)) and known.exact_from == 24
    assert {*known.states} == {24, *known.orders}
    assert draws.RECENT > draws.LOOK_AHEAD

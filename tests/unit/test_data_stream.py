"""The data stream: epochs, replay for survivors, going forward in a fresh source for replacements."""

from __future__ import annotations

import enum
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from flashrecovery.errors import DataSourceError
from flashrecovery.state import codec
from flashrecovery.worker.data.consumers import step_entered
from flashrecovery.worker.data.sampler_settings import SetSamplers
from flashrecovery.worker.data.step_data import DataPosition
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.local_state.rng import RngState, restore_rng


class Items(Dataset[torch.Tensor]):
    def __init__(self, size: int = 11, noise: bool = False) -> None:
        self.size, self.noise = size, noise
        self.loaded = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        item = torch.full((3,), float(index))
        return item + torch.rand(3) if self.noise else item


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(11):
            yield torch.rand(2) + i


def generator(count: int = 40) -> Iterator[tuple[torch.Tensor, float]]:
    for i in range(count):
        yield torch.randn(2) + i, random.random()


class Source:
    """Makes the same loader again and again, as a script run from the top does."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def own_generator() -> DataLoader[torch.Tensor]:
    return DataLoader(Items(), 2, shuffle=True, generator=torch.Generator().manual_seed(9))


def distributed(workers: int = 0) -> DataLoader[torch.Tensor]:
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Items(), num_replicas=2, rank=1, seed=4)
    return DataLoader(Items(), 2, sampler=sampler, num_workers=workers)


class LateGenerator(Sampler[int]):
    """Makes its generator when it is asked first; it goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(5)
        return iter(torch.randperm(11, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 11


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Items(), 2, shuffle=True),
    "noise": lambda: DataLoader(Items(noise=True), 2, shuffle=True),
    "workers": lambda: DataLoader(Items(noise=True), 2, shuffle=True, num_workers=2),
    "own generator": own_generator,
    "distributed": distributed,
    "random sampler": lambda: DataLoader(Items(), 2, sampler=RandomSampler(range(11), replacement=True)),
    "late generator": lambda: DataLoader(Items(), 2, sampler=LateGenerator()),
    "iterable": lambda: DataLoader(Stream(), 2),
    "generator": generator,
    "list": lambda: [torch.ones(2) * i for i in range(5)],
    "stateful": lambda: StatefulDataLoader(Items(noise=True), 2, shuffle=True),
    "stateful workers": lambda: StatefulDataLoader(Items(noise=True), 2, shuffle=True, num_workers=2),
    "stateful iterable": lambda: StatefulDataLoader(Stream(), 2),
}
FAST = [k for k in LOADERS if "workers" not in k]


@dataclass
class Taken:
    """One rank's steps: what it saw, and what it would have written to its page."""

    batches: list[Any]
    local_states: list[bytes]
    after: list[float]


def step(stream: DataStream) -> tuple[Any, float]:
    """Fetch, then use random numbers as dropout does."""
    batch = next(stream)
    return batch, float(torch.rand(1)) + random.random()


def reference(make: Callable[[], Any], steps: int) -> Taken:
    torch.manual_seed(3)
    random.seed(3)
    stream = DataStream(make())
    taken = Taken([], [], [])
    for version in range(steps + 1):
        stream.commit(version)
        taken.local_states.append(codec.dumps({"data": stream.capture(), "rng": RngState.now().plain()}))
        if version < steps:
            batch, number = step(stream)
            taken.batches.append(batch)
            taken.after.append(number)
    return taken


def equal(a: Any, b: Any) -> bool:
    return codec.dumps(a) == codec.dumps(b)


def comparable(local_state: bytes) -> bytes:
    """Without the state that stateful loaders give: it is not the same after it has been loaded."""
    state = codec.loads(local_state)
    state["data"].pop("anchor")
    return codec.dumps(state)


@pytest.mark.parametrize("name", LOADERS)
def test_a_replacement_gets_the_same_batches(name: str) -> None:
    steps = 9
    expected = reference(LOADERS[name], steps)
    positions = (0, 1, 3, 5, 6, 7) if "workers" not in name else (3, 6)
    for version in positions:
        torch.manual_seed(1000)  # the script starts from the top with other numbers drawn
        random.seed(1000)
        stream = DataStream(LOADERS[name]())
        local_state = codec.loads(expected.local_states[version])
        stream.restore(local_state["data"])
        restore_rng(local_state["rng"])
        assert stream.position.total == version
        for i in range(version, steps):
            stream.commit(i)
            assert comparable(codec.dumps({"data": stream.capture(), "rng": RngState.now().plain()})) == comparable(
                expected.local_states[i]
            ), i
            batch, number = step(stream)
            assert equal(batch, expected.batches[i]), (version, i)
            assert number == expected.after[i]


@pytest.mark.parametrize("name", LOADERS)
def test_a_survivor_gets_the_same_batches_again(name: str) -> None:
    expected = reference(LOADERS[name], 9)
    torch.manual_seed(3)
    random.seed(3)
    stream = DataStream(LOADERS[name]())
    states = {}
    version, rolled = 0, 0
    while version < 9:
        stream.commit(version)
        states[version] = RngState.now().plain()
        assert equal(stream.capture()["position"], codec.loads(expected.local_states[version])["data"]["position"])
        batch, number = step(stream)
        assert equal(batch, expected.batches[version]), version
        assert number == expected.after[version]
        version += 1
        if rolled < 6 and version > 2:
            stream.commit(version)  # sealed, then the step is interrupted
            back = rolled % 3
            rolled += 1
            version -= back
            stream.rollback(version)
            restore_rng(states[version] if version in states else RngState.now().plain())


@pytest.mark.parametrize("first", [0, 3])
def test_epochs_call_set_epoch_once(first: int) -> None:
    calls: list[int] = []

    class Sampler(DistributedSampler[int]):
        def set_epoch(self, epoch: int) -> None:
            calls.append(epoch)
            super().set_epoch(epoch)

    sampler = Sampler(Items(8), num_replicas=2, rank=0)
    stream = DataStream(DataLoader(Items(8), 2, sampler=sampler), first_epoch=first)
    assert len(stream) == 2
    batches = []
    for number in range(6):
        stream.commit(number)
        state = stream.capture()
        batches.append(next(stream).tolist())
    assert calls == [first, first + 1, first + 2]
    assert stream.epoch == 2
    assert stream.position == DataPosition(2, 2, 6)
    again = DataStream(DataLoader(Items(8), 2, sampler=sampler), first_epoch=first)
    again.restore(codec.loads(codec.dumps(state)))
    assert next(again).tolist() == batches[5] and calls[3:] == [first + 2]


def test_a_training_that_begins_with_a_later_epoch() -> None:
    """Its first epoch is that one, in a replacement, too; what is numbered from 0 are the batches."""

    def begun() -> DataStream:
        stream = DataStream(DataLoader(Items(), 4, sampler=DistributedSampler(Items(), 1, 0, seed=3)))
        stream.begin_with(2)
        return stream

    def order(epoch: int) -> list[float]:
        sampler = DistributedSampler(Items(), 1, 0, seed=3)
        sampler.set_epoch(epoch)
        return [float(i) for i in sampler]

    stream = begun()
    found = [next(stream) for _ in range(5)]
    assert [x for batch in found[:3] for x in batch[:, 0].tolist()] == order(2)
    assert [x for batch in found[3:] for x in batch[:, 0].tolist()] == order(3)[:8]
    assert stream.position == DataPosition(3, 2, 5)
    for count in (0, 1, 4):
        first, second = begun(), begun()
        for _ in range(count):
            next(first)
        second.restore(codec.loads(codec.dumps(first.capture())))
        assert torch.equal(next(second), found[count])


def test_a_shuffled_plain_loader_is_skipped_without_loading() -> None:
    expected = reference(LOADERS["shuffled"], 5)
    loader = LOADERS["shuffled"]()
    DataStream(loader).restore(codec.loads(expected.local_states[5])["data"])
    assert loader.dataset.loaded == 2  # the last batch alone, to compare it


def test_a_one_shot_iterator_ends() -> None:
    stream = DataStream(iter([1, 2]))
    assert list(stream) == [1, 2]
    with pytest.raises(StopIteration):
        next(stream)


def test_the_fetch_pre_hook_comes_first_and_may_raise() -> None:
    stream = DataStream(iter([1, 2]))

    def stop() -> None:
        raise KeyboardInterrupt

    stream.register_fetch_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.register_fetch_pre_hook(lambda: None)
    assert next(stream) == 1


def test_versions_are_dropped() -> None:
    stream = DataStream(list(range(100)))
    for version in range(50):
        stream.commit(version)
        next(stream)
    assert len(stream._kept) <= 4
    with pytest.raises(DataSourceError, match=r"version 3, only to \[47, 48, 49\]"):
        stream.rollback(3)


# -- refusals ---------------------------------------------------------------------------------------


def test_not_iterable() -> None:
    with pytest.raises(DataSourceError, match="int"):
        DataStream(5)  # type: ignore[arg-type]


def test_empty() -> None:
    with pytest.raises(DataSourceError, match="no batches"):
        next(DataStream([]))


def test_another_order_is_refused() -> None:
    local_state = reference(lambda: DataLoader(Items(), 2, shuffle=True), 4).local_states[4]
    stream = DataStream(DataLoader(Items(), 2))
    with pytest.raises(DataSourceError, match=r"other samples.*batch 3 of epoch 0"):
        stream.restore(codec.loads(local_state)["data"])


def test_an_early_end_is_refused() -> None:
    local_state = reference(generator, 30).local_states[30]
    with pytest.raises(DataSourceError, match=r"ended after 20 batches.*had fetched 30"):
        DataStream(generator(20)).restore(codec.loads(local_state)["data"])


def test_a_stateful_source_must_be_one_again() -> None:
    local_state = reference(LOADERS["stateful"], 4).local_states[4]
    with pytest.raises(DataSourceError, match="was stateful"):
        DataStream(DataLoader(Items(noise=True), 2, shuffle=True)).restore(codec.loads(local_state)["data"])


@pytest.mark.parametrize("name", [n for n in FAST if n not in ("generator", "list")])
def test_a_batch_that_was_written_into_is_read_again(name: str) -> None:
    expected = reference(LOADERS[name], 7)
    torch.manual_seed(3)
    random.seed(3)
    stream = DataStream(LOADERS[name]())
    for version in range(6):
        stream.commit(version)
        state = RngState.now().plain()
        batch, _ = step(stream)
        batch.mul_(0.5)
    stream.rollback(5)
    restore_rng(state)
    for version in (5, 6):
        batch, number = step(stream)
        assert equal(batch, expected.batches[version])
        assert number == expected.after[version]


def test_a_list_whose_items_were_written_into_is_refused() -> None:
    stream = DataStream(LOADERS["list"]())
    next(stream)
    stream.commit(1)
    next(stream).mul_(0.5)
    with pytest.raises(DataSourceError, match="other samples"):
        stream.rollback(1)
        next(stream)


def test_a_generator_whose_batch_was_written_into_is_refused() -> None:
    stream = DataStream(torch.ones(2) * i for i in range(5))
    stream.commit(0)
    next(stream).zero_().add_(7)
    with pytest.raises(DataSourceError, match="modified a batch in place"):
        stream.rollback(0)


# -- sources that go on where they stand --------------------------------------------------------------


class GoesOn:
    """``iter()`` goes on where it stands, as loaders of streams do: six batches of an epoch, in its own order."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch))
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.epoch, int(order[self.at - 1])])
        self.epoch, self.at = self.epoch + 1, 0


class StatefulGoesOn(GoesOn):
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class StatefulIterator(StatefulGoesOn):
    """Its own iterator, of one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._order = torch.randperm(40, generator=torch.Generator().manual_seed(1))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        return self._order[self.at - 1].clone()


class CountsEpochs(StatefulGoesOn):
    """Begins an epoch with each ``iter()``, or goes on with what was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self._loaded = -1, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._loaded:
            self.epoch, self.at = self.epoch + 1, 0
        self._loaded = False
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch))
        for number in range(self.at, 6):
            self.at = number + 1
            yield torch.tensor([self.epoch, int(order[number])])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = self.epoch >= 0


class KnowsNothingYet(StatefulGoesOn):
    """Its ``iter()`` starts again, and it has nothing to load before it was read."""

    _next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self._next = self._next, 0
        for number in range(self.at, 40):
            self.at = number + 1
            yield torch.tensor([number])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at} if self.at else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["at"]


STATEFUL = {
    "knows nothing yet": KnowsNothingYet,
    "goes on": StatefulGoesOn,
    "iterator": StatefulIterator,
    "counts epochs": CountsEpochs,
    "torchdata": LOADERS["stateful"],
}


@pytest.mark.parametrize("came_at", [None, 0, 5, 7, 8])
@pytest.mark.parametrize("back", [0, 1, 3, 7])
@pytest.mark.parametrize("name", STATEFUL)
def test_back_to_the_beginning(name: str, back: int, came_at: int | None) -> None:
    """After a fallback to a time before the first batch, or soon after it; in a survivor, and in one that was itself a
    replacement."""
    expected = reference(STATEFUL[name], 9)
    torch.manual_seed(3)
    random.seed(3)
    stream = DataStream(STATEFUL[name]())
    for version in [*([] if came_at is None else [came_at]), back, 9, back]:
        local_state = codec.loads(expected.local_states[version])
        if version != 9:
            stream.restore(local_state["data"])
            restore_rng(local_state["rng"])
        for i in range(stream.position.total, 9):
            stream.commit(i)
            batch, number = step(stream)
            assert equal(batch, expected.batches[i]) and number == expected.after[i], i


@pytest.mark.parametrize("back", [0, 1, 3])
@pytest.mark.parametrize("came_at", [None, 5])
def test_a_source_that_cannot_go_back_says_so(back: int, came_at: int | None) -> None:
    """In place of going on with other samples."""
    expected = reference(GoesOn, 9)
    stream = DataStream(GoesOn())
    if came_at is not None:
        stream.restore(codec.loads(expected.local_states[came_at])["data"])
    for _ in range(2):
        next(stream)
    with pytest.raises(DataSourceError, match=r"other samples than before: batch \d of epoch 0"):
        stream.restore(codec.loads(expected.local_states[back])["data"])
        next(stream)


# -- orders -----------------------------------------------------------------------------------------


class OwnRandom(Sampler[int]):
    """As curriculum and bucketing samplers are: its own generator that goes on from epoch to epoch."""

    def __init__(self, generator: Any, shuffle: Callable[[Any, list[int]], None]) -> None:
        self.generator_of_mine, self.shuffle = generator, shuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(11))
        self.shuffle(self.generator_of_mine, order)
        return iter(order)

    def __len__(self) -> int:
        return 11


class InPlace(Sampler[int]):
    """Shuffles the list of the last epoch."""

    def __init__(self) -> None:
        self.order = list(range(11))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class Unseeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(11), key=lambda _: os.urandom(4)))


class NoisyRandom(Items):
    """Augments with its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(5)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.random.random()


OWN: dict[str, Callable[[], Any]] = {
    "python": lambda: OwnRandom(random.Random(3), lambda g, order: g.shuffle(order)),
    "numpy": lambda: OwnRandom(np.random.default_rng(3), lambda g, order: g.shuffle(order)),
    "numpy mt": lambda: OwnRandom(np.random.RandomState(3), lambda g, order: g.shuffle(order)),
    "torch": lambda: OwnRandom(
        torch.Generator().manual_seed(3),
        lambda g, order: order.sort(key=torch.rand(11, generator=g).tolist().__getitem__),
    ),
}
LOADERS.update(
    {f"own {name}": partial(lambda make: DataLoader(Items(), 2, sampler=make()), m) for name, m in OWN.items()}
)
LOADERS["looks ahead"] = lambda: ahead(generator())
LOADERS["looks far ahead"] = lambda: ahead(ahead(generator()))
LOADERS["own noise"] = lambda: DataLoader(NoisyRandom(), 2, shuffle=True)
LOADERS["persistent workers"] = lambda: DataLoader(
    Items(noise=True), 3, shuffle=True, num_workers=2, persistent_workers=True
)
LOADERS["stateful drawing workers"] = lambda: StatefulDataLoader(Items(noise=True), 2, shuffle=True, num_workers=2)
LOADERS["stateful persistent workers"] = lambda: StatefulDataLoader(
    Items(noise=True), 3, shuffle=True, num_workers=2, persistent_workers=True
)
MORE = [*(f"own {name}" for name in OWN), "own noise", "looks ahead", "looks far ahead"]
MORE += ["persistent workers", "stateful persistent workers"]


@pytest.mark.parametrize("version", [1, 2, 4])
@pytest.mark.parametrize("name", ["stateful persistent workers", "stateful drawing workers"])
def test_workers_that_draw_are_not_trusted_after_one_equal_batch(name: str, version: int) -> None:
    """The first batch of each worker of an epoch is the same in one that starts again there; the second is not."""
    steps = 7
    expected = reference(LOADERS[name], steps)
    torch.manual_seed(1000)
    stream = DataStream(LOADERS[name]())
    local_state = codec.loads(expected.local_states[version])
    stream.restore(local_state["data"])
    restore_rng(local_state["rng"])
    for i in range(version, steps):
        assert equal(step(stream)[0], expected.batches[i]), i


def test_workers_that_draw_nothing_go_on_from_the_loaders_state(caplog: pytest.LogCaptureFixture) -> None:
    stream = DataStream(StatefulDataLoader(Items(), 2, num_workers=2))
    for version in range(4):
        stream.commit(version)
        next(stream)
    stream.commit(4)
    assert stream.capture()["anchor"] is not None
    drawing = DataStream(LOADERS["stateful drawing workers"]())
    for version in range(4):
        drawing.commit(version)
        next(drawing)
    drawing.commit(4)
    assert drawing.capture()["anchor"] is None


@pytest.mark.parametrize("name", MORE)
def test_random_numbers_of_the_sources_own(name: str) -> None:
    test_a_replacement_gets_the_same_batches(name)


@pytest.mark.parametrize("name", [n for n in MORE if n.startswith("own")])
def test_random_numbers_of_the_sources_own_when_it_is_read_again(name: str) -> None:
    test_a_batch_that_was_written_into_is_read_again(name)


@pytest.mark.parametrize("sampler", [InPlace, Unseeded])
def test_an_order_that_cannot_be_repeated_is_found_before_the_first_step(sampler: type[Sampler[int]]) -> None:
    state = RngState.now()
    with pytest.raises(
        DataSourceError, match=f"{sampler.__name__}, the sampler of the DataLoader, gives another order"
    ):
        DataStream(DataLoader(Items(), 2, sampler=sampler()))
    assert RngState.now() == state


def test_looking_at_an_order_leaves_no_trace() -> None:
    sampler = OWN["python"]()
    expected = list(OWN["python"]())
    state = RngState.now()
    stream = DataStream(DataLoader(Items(), 11, sampler=sampler))
    assert RngState.now() == state
    assert next(stream)[:, 0].tolist() == expected


def test_workers_that_overtake_each_other_are_refused() -> None:
    with pytest.raises(DataSourceError, match="in_order"):
        DataStream(DataLoader(Items(), 2, num_workers=2, in_order=False))


class BeginsAnew:
    """As DeepSpeed's loader: an iterator that ``iter()`` begins again."""

    def __init__(self) -> None:
        self.inner: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        self.inner = iter(DataLoader(Items(6), 2, shuffle=True))
        return self

    def __next__(self) -> Any:
        return next(self.inner)


LOADERS["starts again"] = BeginsAnew


def test_an_iterator_that_begins_again_is_no_one_shot() -> None:
    test_a_replacement_gets_the_same_batches("starts again")
    test_a_survivor_gets_the_same_batches_again("starts again")
    test_a_batch_that_was_written_into_is_read_again("starts again")
    for one_shot in (iter(DataLoader(Items(), 2)), iter([1]), DataStream([1]), (i for i in range(2))):
        assert DataStream(one_shot)._source.one_shot
    assert not DataStream(BeginsAnew())._source.one_shot


def test_an_iterator_that_seems_to_begin_again_ends() -> None:
    class Counting(BeginsAnew):
        def __iter__(self) -> Iterator[Any]:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 1:
                self.inner = iter([1, 2])
            return self

    assert list(DataStream(Counting())) == [1, 2]


# -- what takes the batches -------------------------------------------------------------------------


def ahead(stream: Any) -> Iterator[Any]:
    current = next(stream)
    while True:
        following = next(stream)
        yield current
        current = following


def enter() -> None:
    step_entered(sys._getframe(1))


def test_a_generator_from_step_to_step_is_named() -> None:
    batches = ahead(DataStream(range(100)))
    enter()
    assert next(batches) == 0
    enter()
    with pytest.raises(DataSourceError, match=r"generator 'ahead' \(.*test_data_stream.py:\d+\).*data\(ahead\(loader"):
        next(batches)


def test_a_generator_of_one_step_and_one_that_contains_the_step_are_harmless() -> None:
    stream = DataStream(range(100))

    def train() -> Iterator[int]:
        for _ in range(5):
            enter()
            yield sum(next(stream) for _ in range(2))
            next(stream)

    assert list(train()) == [1, 7, 13, 19, 25]


def test_a_generator_behind_the_stream_is_harmless() -> None:
    stream = DataStream(ahead(iter(range(100))))
    for i in range(5):
        enter()
        assert next(stream) == i


def test_batches_that_are_fetched_for_the_next_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for before, expected in ((0, 0), (1, 1)):
        caplog.clear()
        stream = DataStream(range(100))
        stream.commit(0)
        for version in range(1, 5):
            for _ in range(1 + (before if version == 1 else 0)):
                next(stream)
            stream.commit(version)
        assert caplog.text.count("a prefetcher around recovery.data()") == expected


def prefetching(make: Callable[[], Any], void: dict[int, int], *, sometimes: bool = False) -> list[Any]:
    """Steps that draw in their body and fetch below it. ``void``: by version, how many batches an attempt that does not
    count fetches there first, without the body's draws. ``sometimes``: a fetch in every fifth step only."""
    torch.manual_seed(3)
    random.seed(3)
    stream = DataStream(make())
    seen = [] if sometimes else [next(stream)]
    for version in range(14):
        stream.commit(version)
        rng = RngState.now().plain()
        if version in void:
            stream.void = True
            for _ in range(void[version]):
                next(stream)
            stream.void = False
            stream.rollback(version)
            restore_rng(rng)
        seen.append(float(torch.rand(1)) + random.random())
        if not sometimes or version % 5 == 4:
            seen.append(next(stream))
    return seen


@pytest.mark.parametrize("sometimes", [False, True], ids=["each step", "every fifth step"])
@pytest.mark.parametrize("name", [*FAST, "own noise"])
def test_what_a_void_attempt_fetches_below_its_block_changes_nothing(name: str, sometimes: bool) -> None:
    """Least of all where it begins an epoch: that draws a seed, which is another one without the body's draws."""
    make = LOADERS[name]
    right = prefetching(make, {}, sometimes=sometimes)
    if name == "generator" and sometimes:
        with pytest.raises(DataSourceError, match="a one-shot iterator which draws random numbers"):
            prefetching(make, {4: 1}, sometimes=True)
        return
    for version in range(1, 13):
        for count in (1, 2, 7):
            found = prefetching(make, {version: count}, sometimes=sometimes)
            assert len(found) == len(right) and all(equal(a, b) for a, b in zip(found, right, strict=True)), version


def test_what_is_handed_out_below_a_void_attempt_is_a_copy() -> None:
    """The script may write into it; the step that is done again needs the batch as it was."""
    stream = DataStream([torch.full((2,), float(i)) for i in range(10)])
    stream.commit(0)
    first = next(stream)
    stream.rollback(0)
    stream.void = True
    again = next(stream)
    below = next(stream)
    assert torch.equal(again, first) and torch.equal(below, first) and stream.position.total == 1
    below += 5
    stream.void = False
    stream.rollback(0)
    assert torch.equal(next(stream), torch.zeros(2)) and torch.equal(next(stream), torch.ones(2))


# -- samplers whose order follows from what is set ----------------------------------------------------


class ByDifficulty(Sampler[int]):
    """As a curriculum: a callback sets its difficulty."""

    def __init__(self) -> None:
        self.difficulty = 1

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.difficulty)).tolist())

    def __len__(self) -> int:
        return 12

    def after(self, step: int) -> None:
        if step % 2:
            self.difficulty += 1


class GoingOn(ByDifficulty):
    """It counts what it has given, and goes on there."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            self.given += 1
            yield (self.given * self.given + self.difficulty) % 11

    def after(self, step: int) -> None:
        if step % 6 == 5:  # it reads its difficulty as it goes
            self.difficulty += 1


def trained(stream: DataStream, sampler: ByDifficulty, step: int) -> Any:
    batch = next(stream).tolist()
    sampler.after(step)
    return batch


@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize("kind", [ByDifficulty, GoingOn])
def test_what_a_sampler_is_set_to_comes_back(kind: type[ByDifficulty], back: int) -> None:
    """In a replacement, and (``back`` more than 0) in a survivor whose attempt did not count."""
    steps, captured, taken, marks = 15, list[dict[str, Any]](), list[Any](), list[Any]()

    def make() -> tuple[DataStream, ByDifficulty]:
        sampler = kind()
        return DataStream(DataLoader(list(range(12)), 2, sampler=sampler)), sampler

    stream, sampler = make()
    for step in range(steps):
        stream.commit(step)
        captured.append(codec.loads(codec.dumps(stream.capture())))
        taken.append(trained(stream, sampler, step))
        marks.append(stream.mark)
    assert len({repr(mark) for mark in marks}) == steps
    for version in range(steps - back):
        stream, sampler = make()
        stream.restore(captured[version])
        stream.commit(version)
        if back:
            for step in range(version, version + back):
                trained(stream, sampler, step)
            stream.rollback(version)
        found = []
        for step in range(version, steps):
            stream.commit(step)
            found.append(trained(stream, sampler, step))
        assert found == taken[version:], version


TWELVE: Any = list(range(12))


class Phase(enum.Enum):
    EASY = 1
    HARD = 2


class Curriculum:
    def __init__(self) -> None:
        self.level = 1


class Everything(ByDifficulty):
    """What it is set to is of many kinds, and set in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.scores, self.counts = torch.ones(12), np.ones(3), {"a": [1]}
        self.phase, self.curriculum, self.generator = Phase.EASY, Curriculum(), torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            parts = self.weights[index], self.scores.sum(), len(self.counts["a"]), self.phase.value
            offset = int(torch.randint(5, (), generator=self.generator)) + self.curriculum.level
            yield (int(sum(parts)) + offset + index + getattr(self, "late", 0)) % 12

    def after(self, step: int) -> None:
        self.weights[step % 12] += step
        self.scores[step % 3] += 2
        self.counts["a"].append(step)
        if step % 3 == 0:
            self.phase = Phase.HARD if self.phase is Phase.EASY else Phase.EASY
        self.curriculum.level += step % 2
        if step % 5 == 0:
            self.generator.manual_seed(step)
        if step == 7:
            self.late = 3


class Prefetching:
    """Reads one batch ahead, as accelerate's loader does; ``loop_state``: the loop's, at which its sampler looks."""

    def __init__(self, sampler: ByDifficulty, state: Any) -> None:
        self.sampler, self._loader = sampler, DataLoader(TWELVE, 2, sampler=sampler)
        self.loop_state = lambda: state

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        ahead = next(batches)
        for batch in batches:
            yield ahead
            ahead = batch
        yield ahead


class ByStep(ByDifficulty):
    """It looks at the loop's step for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(global_step=0, epoch=0.0)

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            yield (index * index + self.state.global_step // 2) % 12

    def after(self, step: int) -> None:
        self.state.global_step = step + 1


@pytest.mark.parametrize("kind", [ByDifficulty, GoingOn, Everything, ByStep])
def test_a_loop_that_puts_back_what_its_samplers_are_set_to(kind: type[ByDifficulty]) -> None:
    """As the Trainer's: a replacement's skipped loop sets samplers, too, and they are put back when it ends."""
    steps, captured, taken, ends = 20, list[dict[str, Any]](), list[Any](), list[Any]()

    def make() -> tuple[DataStream, ByDifficulty]:
        sampler = kind()
        stream = DataStream(Prefetching(sampler, getattr(sampler, "state", SimpleNamespace(global_step=0, epoch=0.0))))
        stream.leave_samplers()
        return stream, sampler

    stream, sampler = make()
    for step in range(steps):
        stream.commit(step)
        captured.append(codec.loads(codec.dumps(stream.capture())))
        ends.append(codec.loads(codec.dumps(stream.samplers())))
        taken.append(trained(stream, sampler, step))
    for version in range(steps):
        stream, sampler = make()
        stream.restore(captured[version])
        stream.commit(version)
        assert getattr(sampler, "state", SimpleNamespace(global_step=0)).global_step == 0
        for step in range(version):
            sampler.after(step)  # the skipped loop's callbacks
        stream.put_samplers(ends[version])
        assert [trained(stream, sampler, step) for step in range(version, steps)] == taken[version:], version


class Large(ByDifficulty):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0] * 5000

    def after(self, step: int) -> None:
        self.weights[27] += 1  # one of those that are looked at


def test_what_is_too_large_to_come_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Large()
    stream = DataStream(DataLoader(TWELVE, 2, sampler=sampler))
    next(stream)
    stream.commit(1)
    assert not caplog.messages
    sampler.after(1)
    stream.commit(2)
    state = codec.loads(codec.dumps(stream.capture()))
    assert "Large.weights of the script's sampler has been set while it trains" in caplog.text
    with pytest.raises(DataSourceError, match=r"Large\.weights of the script's sampler .* cannot be brought back"):
        DataStream(DataLoader(TWELVE, 2, sampler=Large())).restore(state)


def test_what_is_set_too_often_within_an_epoch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.worker.data.stream._SETTINGS", 2)
    for kind, named in ((ByDifficulty, False), (GoingOn, True)):
        sampler = kind()
        stream = DataStream(DataLoader(TWELVE, 2, sampler=sampler))
        for _ in range(5):
            next(stream)
            sampler.difficulty += 1
        state = codec.loads(codec.dumps(stream.capture()))
        again = DataStream(DataLoader(TWELVE, 2, sampler=kind()))
        if named:
            with pytest.raises(DataSourceError, match="difficulty, at which the script's sampler may look"):
                again.restore(state)
        else:
            again.restore(state)
            assert next(again).tolist() == next(stream).tolist()
        for _ in range(2):
            next(stream)  # the next epoch
        DataStream(DataLoader(TWELVE, 2, sampler=kind())).restore(stream.capture())


def test_frameworks_samplers_have_no_values() -> None:
    """Also where samplers of any other package have some."""
    transformers = pytest.importorskip("transformers.trainer_pt_utils")
    accelerate = pytest.importorskip("accelerate.data_loader")
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

    samples = list(range(12))
    shuffled: Any = RandomSampler(samples)
    known = [
        shuffled,
        DistributedSampler(samples, num_replicas=2, rank=0),  # type: ignore[arg-type]
        transformers.LengthGroupedSampler(2, lengths=samples),
        accelerate.SeedableRandomSampler(samples),
        accelerate.BatchSamplerShard(BatchSampler(shuffled, 2, drop_last=False), 2, 0),
    ]
    found = SetSamplers(known, lambda: SimpleNamespace(global_step=0, epoch=0.0))
    assert not found.at_start() and not found.others({}) and not found.within_epoch()


class Interrupted(Items):
    """A rank is stopped while it makes its next batch."""

    stops = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stops:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_a_batch_whose_fetch_was_cut_short_comes_again() -> None:
    dataset = Interrupted()
    stream = DataStream(DataLoader(dataset, 2))
    taken = []
    for version in range(3):
        stream.commit(version)
        if version == 2:
            dataset.stops = True
            with pytest.raises(KeyboardInterrupt):
                next(stream)
            dataset.stops = False
            stream.rollback(version)
        taken.append(next(stream)[:, 0].tolist())
    assert taken == [[0, 1], [2, 3], [4, 5]] and next(stream)[:, 0].tolist() == [6, 7]


def test_a_stop_waits_for_the_end_of_a_read() -> None:
    """Modules that a data set calls, as torchvision's transforms are, are not interrupted meanwhile."""
    seen: list[bool] = []

    class Seen(Items):
        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(stream.reading)
            return super().__getitem__(index)

    stream = DataStream(DataLoader(Seen(), 2))
    stream.commit(0)
    next(stream)
    next(stream)
    state = stream.capture()
    assert not stream.reading
    stream = DataStream(DataLoader(Seen(), 2))
    stream.restore(state)
    assert seen and all(seen) and not stream.reading


# -- epochs that are left ---------------------------------------------------------------------------

LEFT_AFTER = 3
BEGIN_ANYWHERE = ["shuffled", "noise", "workers", "own generator", "distributed", "random sampler", "late generator"]
BEGIN_ANYWHERE += ["iterable", "list", "stateful", "stateful iterable"]


def steps_of(stream: DataStream, steps: int, states: dict[int, bytes], first: int = 0) -> list[tuple[Any, float]]:
    """Each epoch is left after a few batches, from the step number ``first`` on."""
    found = []
    for version in range(first, steps):
        stream.commit(version)
        states[version] = codec.dumps({"data": stream.capture(), "rng": RngState.now().plain()})
        found.append(step(stream))
        if stream.position.batch == LEFT_AFTER:
            stream.next_epoch()
            stream.next_epoch()  # of which nothing has been read
    return found


def left_by_break(loader: Any, steps: int) -> list[tuple[Any, float]]:
    found: list[tuple[Any, float]] = []
    epoch = 0
    while len(found) < steps:
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            found.append((batch, float(torch.rand(1)) + random.random()))
            if number == LEFT_AFTER:
                break
        epoch += 1
    return found[:steps]


@pytest.mark.parametrize("name", BEGIN_ANYWHERE)
def test_an_epoch_that_is_left_is_that_of_break(name: str) -> None:
    steps, seeds = 8, (torch.manual_seed, random.seed)
    for seed in seeds:
        seed(3)
    expected = left_by_break(LOADERS[name](), steps)
    for seed in seeds:
        seed(3)
    stream, states = DataStream(LOADERS[name]()), dict[int, bytes]()
    assert equal(steps_of(stream, steps, states), expected)
    for back in (6, 7):  # a survivor, within an epoch and at the beginning of one
        stream.rollback(back)
        restore_rng(codec.loads(states[back])["rng"])
        assert equal(steps_of(stream, steps, {}, back), expected[back:])
    for version in (2, 3, 4, 6) if "workers" not in name else (3, 4):  # a replacement
        for seed in seeds:
            seed(1000)
        stream = DataStream(LOADERS[name]())
        state = codec.loads(states[version])
        stream.restore(state["data"])
        restore_rng(state["rng"])
        assert equal(steps_of(stream, steps, {}, version), expected[version:]), version


def test_an_attempt_that_leaves_an_epoch_by_mistake_leaves_no_trace() -> None:
    torch.manual_seed(3)
    expected = [batch for batch, _ in left_by_break(LOADERS["shuffled"](), 3)]
    torch.manual_seed(3)
    stream = DataStream(LOADERS["shuffled"]())
    stream.commit(0)
    found = [next(stream)]
    stream.commit(1)
    stream.next_epoch()
    stream.rollback(1)
    assert equal([*found, next(stream), next(stream)], expected)


def test_a_source_without_a_next_epoch_says_so() -> None:
    with pytest.raises(DataSourceError, match="generator has no next epoch in the midst of one"):
        DataStream(generator()).next_epoch()

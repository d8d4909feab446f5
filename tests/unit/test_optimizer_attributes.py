"""Which kinds of values in an optimizer's attributes are brought back, and which are named because they cannot be."""

from __future__ import annotations

import array
import collections
import enum
import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrecovery.adapter.beside import OptimizerAttributes
from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec

Point = collections.namedtuple("Point", "x y")


class Mode(enum.Enum):
    A = 1
    B = 2


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Own(torch.optim.SGD):
    kind: Any

    def __init__(self, kind: Any) -> None:
        super().__init__([nn.Parameter(torch.zeros(2))], lr=0.1)
        self.kind = kind


def closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def closure_of_list() -> Callable[[], int]:
    held = [0]

    def count() -> int:
        held[0] += 1
        return held[0]

    return count


def default() -> Callable[[], int]:
    def count(held: list[int] = [0]) -> int:  # noqa: B006 - what is tested
        held[0] += 1
        return held[0]

    return count


def keyword() -> Callable[[], int]:
    def count(*, held: list[int] = [0]) -> int:  # noqa: B006 - what is tested
        held[0] += 1
        return held[0]

    return count


def of_attribute() -> Callable[[], int]:
    def count() -> int:
        count.n += 1  # type: ignore[attr-defined]
        return count.n  # type: ignore[attr-defined, no-any-return]

    count.n = 0  # type: ignore[attr-defined]
    return count


def counted(held: list[int]) -> int:
    held[0] += 1
    return held[0]


def numbers() -> Iterator[int]:
    yield from range(100)


def call(kind: Any) -> Any:
    return kind()


def grown(kind: Any) -> Any:
    (kind.add if isinstance(kind, set) else kind.append)(len(kind))
    return [*kind]


def written(kind: Any) -> Any:
    kind.write("2")
    return kind.getvalue()


def first_grown(kind: Any) -> Any:
    kind[0] += 1
    return kind[0]


def turned(kind: Any) -> Any:
    kind[0] = Mode.B if kind[0] is Mode.A else Mode.A
    return kind[0], Mode(1) is Mode.A, Mode.A.value, Mode.B.value


def moved(kind: Any) -> Any:
    kind[0] = Point(kind[0].x + 1, 0)
    return kind[0]


def slot(kind: Any) -> Any:
    kind.n += 1
    return kind.n


def at_pair(kind: Any) -> Any:
    kind[1, 2] = kind.get((1, 2), 0) + 1
    return kind[1, 2]


def unite(kind: Any) -> Any:
    kind[0] |= {len(kind[0])}
    return sorted(kind[0])


TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "itertools.count": (itertools.count, next),
    "itertools.count with a step": (lambda: itertools.count(0.5, -0.25), next),
    "closure": (closure, call),
    "closure of a list": (closure_of_list, call),
    "default": (default, call),
    "keyword default": (keyword, call),
    "attribute of a function": (of_attribute, call),
    "partial": (lambda: functools.partial(counted, [0]), call),
    "callable object": (Counter, call),
    "method": (lambda: Counter().__call__, call),
    "method of a count": (lambda: itertools.count(3).__next__, call),
    "method of a list": (lambda: list(range(9)).pop, call),
    "method of a generator of random numbers": (lambda: random.Random(3).random, call),
    "set": (lambda: {0}, grown),
    "frozen set": (lambda: [frozenset({0})], unite),
    "list of another class": (lambda: collections.UserList([0]), grown),
    "array of numpy": (lambda: np.zeros(3), first_grown),
    "array": (lambda: array.array("d", [0]), first_grown),
    "bytearray": (lambda: bytearray(2), first_grown),
    "decimal": (lambda: [Decimal(0)], first_grown),
    "enumeration": (lambda: [Mode.A], turned),
    "named tuple": (lambda: [Point(0, 0)], moved),
    "slots": (Slots, slot),
    "keys of two": (dict, at_pair),
    "text in memory": (lambda: io.StringIO("1"), written),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_is_brought_back(kind: str) -> None:
    """On a survivor that has gone on, and in a process that has taken no step."""
    make, use = TAKEN[kind]
    here, there = Own(make()), Own(make())
    for _ in range(2):
        use(here.kind)
    beside = OptimizerAttributes(here, [here])
    kept = codec.dumps(beside.capture())
    expected = [use(here.kind) for _ in range(3)]
    beside.restore(codec.loads(kept))
    assert [use(here.kind) for _ in range(3)] == expected
    OptimizerAttributes(there, [there]).restore(codec.loads(kept))
    assert [use(there.kind) for _ in range(3)] == expected
    assert not beside.not_read(()), "nothing is named that comes back"


NAMED: dict[str, Callable[[], Any]] = {
    "generator": numbers,
    "cycle": lambda: itertools.cycle([1, 2]),
    "map": lambda: map(float, range(9)),
    "list_iterator": lambda: iter([1, 2]),
    "memoryview": lambda: memoryview(bytearray(2)),
    "SeedSequence": lambda: np.random.SeedSequence(3),
    "count": lambda: itertools.count(Decimal(1)),
    "BatchNorm1d": lambda: nn.BatchNorm1d(2),
    "dict": lambda: {Counter(): 1},
    "ndarray": lambda: np.zeros(100_000),
}


@pytest.mark.parametrize("kind", NAMED)
def test_is_named(kind: str) -> None:
    optimizer = Own([NAMED[kind]()])
    assert OptimizerAttributes(optimizer, [optimizer]).not_read(()) == {"Own.kind/0": kind}


STATIC: dict[str, Any] = {
    "builtin": len,
    "dtype": torch.float32,
    "dtype of numpy": np.dtype("float32"),
    "loss": nn.MSELoss(),
    "function": numbers,
    "class": Counter,
    "module": collections,
    "enum": Mode.A,
    "operation of torch": torch.sum,
    "object": object(),
}


@pytest.mark.parametrize("kind", STATIC)
def test_what_does_not_change_is_not_named(kind: str) -> None:
    optimizer = Own(STATIC[kind])
    beside = OptimizerAttributes(optimizer, [optimizer])
    kept = beside.capture()
    beside.restore(codec.loads(codec.dumps(kept)))
    assert not beside.not_read(()) and optimizer.kind is STATIC[kind]


def test_an_iterator_that_has_been_read_through_and_a_registered_model_are_not_named() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = Own(None)
    over = [filter(lambda p: p.requires_grad, model.parameters()), map(id, model.parameters()), numbers(), iter([1])]
    for one in over:
        assert [*one]  # type: ignore[call-overload]
    optimizer.kind = [*over, model]
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert not OptimizerAttributes(optimizer, [optimizer]).not_read(known)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    optimizer = Own(torch.zeros(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"Own\.kind is a tensor of layout torch\.sparse_coo"):
        OptimizerAttributes(optimizer, [optimizer]).read()


class Trainer:
    """What a script's own class has: everything."""

    def __init__(self) -> None:
        self.model, self.step, self.data = nn.Linear(2, 2), 0, torch.zeros(9000)
        self.optimizer = Own(None)
        self.iterator = iter([1])

    def log(self) -> None:
        self.step += 1


CALLS: dict[str, Callable[[Trainer], Any]] = {
    "closure": lambda trainer: lambda: trainer.log(),
    "method": lambda trainer: trainer.log,
    "partial": lambda trainer: functools.partial(Trainer.log, trainer),
    "method of its model": lambda trainer: trainer.model.forward,
    "data": lambda trainer: (lambda data: lambda: data[0])(trainer.data),
    "sparse data": lambda trainer: (lambda data: lambda: data)(trainer.data.to_sparse()),
    "its optimizer": lambda trainer: (lambda optimizer: lambda: optimizer.step())(Own(None)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_what_a_function_only_calls_is_not_of_the_optimizer(kind: str) -> None:
    trainer = Trainer()
    optimizer = trainer.optimizer
    optimizer.kind = CALLS[kind](trainer)
    beside = OptimizerAttributes(optimizer, [optimizer])
    _, tensors = beside.read()
    assert not tensors and not beside.nested and not beside.not_read(()) and not beside.needs_a_shard()
    kept = codec.dumps(beside.capture())
    trainer.log()
    beside.restore(codec.loads(kept))
    assert trainer.step == 1

"""What torch.compile has learned of sizes and numbers goes from one process to another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import pgo

from flashrecovery.state import codec
from flashrecovery.worker.local_state.dynamic_shapes import DynamicShapes

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def for_any(*sizes: int, weights: Sequence[float] = (1.0, 1.0, 1.0)) -> list[bool]:
    """Of each kernel that is compiled for these sizes of one input, whether it is for any size or weight."""
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(any(isinstance(one, torch.SymInt) or getattr(one, "ndim", 1) == 0 for one in inputs))
        return graph.forward

    compiled = torch.compile(_function_with_a_closure(0), backend=backend)
    for size, weight in zip(sizes, weights, strict=False):
        compiled(torch.ones(size, 3), weight)
    return found


def _function_with_a_closure(dim: int) -> Callable[[Tensor, float], Tensor]:
    def total(x: Tensor, weight: float) -> Tensor:
        return (x * weight).sum(dim)

    return total


def learned_from(*sizes: int, weights: Sequence[float] = (1.0, 1.0, 1.0)) -> Any:
    """As it comes to another process, which has learned nothing yet."""
    for_any(*sizes, weights=weights)
    data = codec.dumps(DynamicShapes().capture())
    torch._dynamo.reset()
    return codec.loads(data)


@pytest.mark.parametrize(
    ("sizes", "weights", "size"),
    [((2, 3), (1.0, 1.0), 5), ((2,), (1.0,), 5), ((2, 2), (1.0, 0.9), 2), ((2,), (0.9,), 2)],
    ids=["two sizes", "one size, then another", "two weights", "one weight, then another"],
)
def test_the_first_kernel_is_for_what_varies(sizes: tuple[int, ...], weights: tuple[float, ...], size: int) -> None:
    assert for_any(size) == [False], "without it"
    learned = learned_from(*sizes, weights=weights)
    DynamicShapes().adopt(learned)
    assert for_any(size) == [True]


def test_what_has_not_varied_stays_fixed() -> None:
    DynamicShapes().adopt(learned_from(5, 5))
    assert for_any(5) == [False]


def test_it_is_handed_on_before_anything_has_been_compiled() -> None:
    learned = learned_from(2, 3)
    mine = DynamicShapes()
    mine.adopt(learned)
    assert mine.capture() == learned
    for_any(7)
    assert mine.capture() == learned, "nothing new"
    pgo.put_code_state()
    assert type(pickle.loads(pickle.dumps(pgo._CODE_STATE))) is not type(pgo._CODE_STATE), "of torch's own types"


def test_it_is_joined_with_what_set_up_has_learned_here() -> None:
    learned = learned_from(2, 3)
    for_any(2)
    DynamicShapes().adopt(learned)
    assert for_any(5) == [True]


def test_what_the_script_lets_dynamo_forget_is_forgotten() -> None:
    mine = DynamicShapes()
    mine.adopt(learned_from(2, 3))
    torch._dynamo.reset()
    assert mine.capture() == []
    assert for_any(5) == [False]
    assert [sources["L['x']"][1] for _function, sources in mine.capture()] == [(5, 3)]


def test_a_look_without_a_compilation_is_the_last_one() -> None:
    for_any(2, 3)
    mine = DynamicShapes()
    first = mine.capture()
    kept = copy.deepcopy(first)
    assert mine.capture() is first
    for_any(4, 4, weights=(0.5, 0.25))
    assert mine.capture() != kept and first == kept


def test_a_step_that_is_done_again_begins_with_what_it_had() -> None:
    mine = DynamicShapes()
    nothing = mine.capture()
    assert for_any(2, 3) == [False, True]
    mine.go_back(nothing)
    assert for_any(2, 3) == [False, True]
    before = mine.capture()
    assert for_any(2, 3, weights=(0.5, 0.5)) == [True]
    mine.go_back(before)
    assert mine.capture() == before and for_any(5) == [True]


def test_kernels_are_kept_where_the_step_has_taught_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for_any(2, 3)
    mine = DynamicShapes()
    monkeypatch.setattr(torch._dynamo, "reset", lambda: pytest.fail("dropped"))
    mine.go_back(codec.loads(codec.dumps(mine.capture())))
    monkeypatch.undo()

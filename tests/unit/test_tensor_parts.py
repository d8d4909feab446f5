"""Tensors that consist of others, and what an optimizer keeps in its attributes, taken apart and made again."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashrecovery.adapter import ParamRecord, ParamShard, constant
from flashrecovery.adapter.beside import OptimizerAttributes
from flashrecovery.adapter.parts import TensorParts, decode, encode, put_together
from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.state import codec
from tests.scripts.state_forms import Grid, Lookahead, Masters, Packed, Rounding, Twice, Unnamed

GRID = Grid(levels=7, rounding=Rounding.NEAREST, shown_as=torch.float16)


def _twice() -> Twice:
    return Twice(Packed(torch.arange(6, dtype=torch.int8), torch.tensor(2.0), GRID), torch.ones(6))


def test_apart_and_together() -> None:
    parts = TensorParts.of(_twice(), "x", nn.Parameter(torch.zeros(6)))
    assert list(parts.tensors) == ["packed/codes", "packed/scale", "rest"] and parts.unchanged()
    form = codec.loads(codec.dumps(parts.form))
    made: Any = put_together(form, parts.tensors, torch.zeros(6))
    assert type(made) is Twice and made.packed.grid == GRID and made.packed.dtype == torch.float16
    assert made.packed.codes.data_ptr() == parts.tensors["packed/codes"].data_ptr()
    assert TensorParts.of(made, "x", torch.zeros(6)).form == form
    parts.whole.packed.grid = Grid(3, Rounding.NEAREST, torch.float16)  # type: ignore[attr-defined]
    assert not parts.unchanged()


def test_what_does_not_say_its_parts_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"state 'm' is a .*Unnamed"):
        TensorParts.of(Unnamed(torch.zeros(2)), "state 'm'", torch.zeros(2))


@pytest.mark.parametrize(
    "value",
    [None, 3, "a", torch.int8, torch.strided, (1, [2.5, {"a": torch.device("cpu")}]), {1, 2}, GRID, Rounding, len],
    ids=str,
)
def test_plain_values(value: Any) -> None:
    assert decode(codec.loads(codec.dumps(encode(value, "x")))) == value


def test_what_cannot_be_named_elsewhere_is_refused() -> None:
    for value in (object(), lambda: None):
        with pytest.raises(UnsupportedError, match="x "):
            encode(value, "x")
    with pytest.raises(RestoreError, match="import it"):
        decode(["member", "no_such_module:Kind", "ONE"])


def _lookahead() -> Lookahead:
    torch.manual_seed(0)
    return Lookahead(Masters([nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]))


def _step(optimizer: Lookahead) -> None:
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = torch.full_like(parameter, 0.1 * number + 0.05 * optimizer.calls)
    optimizer.step()


def _bytes(optimizer: Lookahead) -> list[Any]:
    _, content = OptimizerAttributes(optimizer, [optimizer]).capture()
    return [(key, tensor.tolist()) for key, tensor in content.items()]


def test_attributes_of_an_optimizer_that_has_stepped_in_one_that_has_not() -> None:
    one, other = _lookahead(), _lookahead()
    for _ in range(4):
        _step(one)
    captured = codec.loads(codec.dumps(OptimizerAttributes(one, [one]).capture()))
    begun = codec.loads(codec.dumps(OptimizerAttributes(other, [other]).capture()))
    with torch.no_grad():
        for mine, theirs in zip(other.param_groups[0]["params"], one.param_groups[0]["params"], strict=True):
            mine.copy_(theirs)
    masters = other.inner.param_groups_master[0]["params"][0]  # type: ignore[attr-defined]
    beside = OptimizerAttributes(other, [other])
    beside.restore(captured)
    assert beside.nested == [other.inner] and other.calls == 4 and isinstance(other.norms.recent, deque)
    assert [*other.slow] == other.param_groups[0]["params"]
    assert masters is other.inner.param_groups_master[0]["params"][0]  # type: ignore[attr-defined]
    assert {id(p) for p in other.slow} == {*other.factors}
    for _ in range(3):
        _step(one)
        _step(other)
    assert _bytes(one) == _bytes(other)
    beside.restore(begun)  # back to before its first step
    assert other.calls == 0 and not other.slow and not other.inner.state


def test_more_than_is_written_down_in_every_step_is_refused_by_name() -> None:
    optimizer = _lookahead()
    optimizer.late = torch.zeros(100_000)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"Lookahead keeps .* bytes of tensors in its attributes"):
        OptimizerAttributes(optimizer, [optimizer]).capture()


def test_generators_and_objects_keep_their_identity() -> None:
    class Own(torch.optim.SGD):
        pass

    optimizer: Any = Own([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.draws, optimizer.hook, optimizer.nested = random.Random(3), len, [(1, {"a": torch.ones(2)})]
    beside = OptimizerAttributes(optimizer, [optimizer])
    kept = codec.loads(codec.dumps(beside.capture()))
    before = copy.copy(vars(optimizer))
    drawn = optimizer.draws.random()
    optimizer.nested[0][1]["a"].fill_(5)
    optimizer.new = 4
    beside.restore(kept)
    assert optimizer.draws.random() == drawn and optimizer.draws is before["draws"] and optimizer.hook is len
    assert optimizer.nested is before["nested"] and not hasattr(optimizer, "new")
    expected: Tensor = optimizer.nested[0][1]["a"]
    assert expected.tolist() == [1, 1]


def test_a_parameter_of_parts_that_no_optimizer_trains() -> None:
    """Adapters are trained over quantised weights: the shard has parts, and no state."""

    def shard(fill: int) -> ParamShard:
        packed: Any = Packed(torch.full((6,), fill, dtype=torch.int8), torch.tensor(2.0), GRID)
        record = ParamRecord("w", "param/w", (0, 1), constant(packed))
        return ParamShard(record, {})

    mine, source = shard(1), shard(3)
    live = mine.allocate(source.spec())
    assert live.keys() == source.tensors().keys() and len(live) == 2
    for key, tensor in source.tensors().items():
        live[key].copy_(tensor)
    assert mine.tensors()["param::codes"].tolist() == [3] * 6

"""How ZeRO-3 divides parameters: every element at one place, padding at none, whatever the size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.adapter.shards import ParamRecord, ParamShard, constant
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.reshard.placements import Slices
from flashrecovery.plan.reshard.rules import unlike
from fr_deepspeed.shard_layout import partition_name
from fr_deepspeed.slices import SliceShardLayout, frozen_name, slice_beginning

GROUPS = ((97, 3, 16), (5,))
FROZEN = {"lin.bias": 7}


def whole(numels: tuple[int, ...]) -> list[torch.Tensor]:
    """Parameters end to end: 1, 2, 3, ... (0 is padding)."""
    return list(torch.arange(1, sum(numels) + 1, dtype=torch.float32).split(list(numels)))


def cut(parameter: torch.Tensor, place: int, size: int) -> torch.Tensor:
    """As DeepSpeed does it, but for the padding, which it leaves as it is."""
    each = math.ceil(parameter.numel() / size)
    padded = torch.cat([parameter, torch.zeros(each * size - parameter.numel())])
    return padded[place * each : (place + 1) * each]


def shard_layout(place: int, size: int, prefix: str = "", **odd: torch.Tensor) -> SliceShardLayout:
    shards, groups, names = [], [], {}
    for number, numels in enumerate(GROUPS):
        parameters = whole(numels)
        partition = torch.nn.Parameter(torch.cat([cut(p, place, size) for p in parameters]))
        optimizer = torch.optim.AdamW([partition])
        moments = {"exp_avg": partition.detach() * 2, "exp_avg_sq": partition.detach() * 3}
        optimizer.state[partition] = {"step": torch.tensor(5.0), **moments, **odd}
        record = ParamRecord("p", partition_name(number, place, size), (place,), constant(partition))
        shards.append(ParamShard(record, {0: optimizer}))
        groups.append([sliced(p, place, size) for p in parameters])
        names |= {p: f"{prefix}{number}.{place}" for place, p in enumerate(groups[-1])}
    frozen = {fqn: sliced(whole((numel,))[0], place, size) for fqn, numel in FROZEN.items()}
    zero = SimpleNamespace(partition_count=size, fp16_groups=groups, device="cpu", param_names=names)
    return SliceShardLayout(zero, lambda: shards, lambda: frozen, lambda *_: None)


class Sliced(SimpleNamespace):
    """A parameter. It is itself alone."""

    __hash__ = object.__hash__


def sliced(parameter: torch.Tensor, place: int, size: int) -> Any:
    return Sliced(
        ds_numel=parameter.numel(), ds_shape=parameter.shape, ds_tensor=cut(parameter, place, size).bfloat16()
    )


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 2), (3, 4), (2, 1), (1, 8), (8, 3)])
def test_every_element_goes_where_deepspeed_has_it(before: int, after: int) -> None:
    """All boxes of the old sharding, put into those of the new one, are what DeepSpeed would cut: padding is 0."""
    olds = [shard_layout(place, before) for place in range(before)]
    described = olds[0].describe()
    assert all(old.describe() == described and old.size == before for old in olds)
    tensors = {t.name: t for t in olds[0].tensors(described, before)}
    found: dict[str, torch.Tensor] = {}
    for place, old in enumerate(olds):
        for name, tensor in tensors.items():
            local = held(old, name, place)
            space = found.setdefault(name, torch.full(tensor.shape, -1.0))
            for part in old.parts(tensor, place, local):
                index = tuple(slice(low, high) for low, high in zip(part.box.low, part.box.high, strict=True))
                assert not tensor.shape or bool((space[index] == -1).all()), "two places have one element"
                space[index] = part.data.float()
    assert all(bool((space != -1).all()) for space in found.values()), "an element is at no place"
    for place in range(after):
        ready = olds[0].prepare(described, place, after)
        for tensor in olds[0].tensors(described, after):
            assert not ready.tensors[tensor.name].any()
            for part in olds[0].parts(tensor, place, ready.tensors[tensor.name]):
                index = tuple(slice(low, high) for low, high in zip(part.box.low, part.box.high, strict=True))
                part.data.copy_(found[tensor.name][index])
        new = shard_layout(place, after)
        for name, local in ready.tensors.items():
            assert torch.equal(local, held(new, name, place)), f"{name} at place {place}"
            assert local.dtype == held(new, name, place).dtype
        assert set(ready.values) == {partition_name(number, place, after) for number in range(len(GROUPS))}


def held(shard_layout: SliceShardLayout, name: str, place: int) -> torch.Tensor:
    """What a rank has, by the name in the sharding."""
    number, _, key = name.partition("/")
    if number == "frozen":
        tensor: torch.Tensor = shard_layout._frozen()[key].ds_tensor
        return tensor
    return shard_layout._shards()[int(number)].tensors()[key].detach()


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("numels", [(1,), (3, 1), (97, 3, 16), (8, 8)])
def test_pieces_begin_where_slices_do(numels: tuple[int, ...], size: int) -> None:
    cut, shape = Slices(numels), (sum(numels),)
    for place in range(size):
        starts, at = set(), 0
        for numel in numels:
            starts.add(at)
            at += math.ceil(numel / size)
        assert {part.at for part in cut.parts(shape, place, size)} <= starts
        assert cut.stored(shape, place, size) == (at,)
    covered = [
        i
        for place in range(size)
        for part in cut.parts(shape, place, size)
        for i in range(part.box.low[0], part.box.high[0])
    ]
    assert sorted(covered) == list(range(sum(numels)))


def test_names_say_which_division_they_are_of() -> None:
    old = shard_layout(0, 4)
    tensors = {tensor.name: tensor for tensor in old.tensors(old.describe(), 3)}
    assert list(tensors["1/state/exp_avg"].shards) == [partition_name(1, place, 3) for place in range(3)]
    frozen = tensors[frozen_name("lin.bias")]
    assert list(frozen.shards) == [f"{slice_beginning('lin.bias')}{place}/3" for place in range(3)]
    assert frozen.dtype is torch.bfloat16 and frozen.shape == (7,)
    assert all(len(tensors["0/state/step"].boxes(place)) == 1 for place in range(3))


def test_another_model_has_another_outline() -> None:
    one, other = shard_layout(0, 4), shard_layout(1, 3)
    assert one.outline(one.describe()) == other.outline(other.describe())
    described = one.describe()
    described["frozen"][0][1] += 1
    assert one.outline(described) != other.outline(other.describe())


def test_state_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'state/rows' has the shape \(7,\)"):
        shard_layout(0, 4, rows=torch.zeros(7)).describe()


def test_parameters_of_other_names_are_others() -> None:
    """They lie alike, so that nothing else would tell."""
    one, other = shard_layout(0, 4), shard_layout(0, 4, prefix="x")
    described, odd = one.describe(), other.describe()
    assert one.outline(described) == shard_layout(1, 4).outline(shard_layout(1, 4).describe()) != one.outline(odd)
    assert unlike(one.rules(described), one.rules(shard_layout(2, 4).describe())) == []
    moments = [f"{group}/state/{key}" for group in range(len(GROUPS)) for key in ("exp_avg", "exp_avg_sq")]
    assert unlike(one.rules(described), one.rules(odd)) == sorted([*moments, "0/param", "1/param"])

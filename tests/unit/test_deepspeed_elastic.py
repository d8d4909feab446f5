"""What an engine's numbers become in another size, and how ZeRO-1 and 2 divide a parameter group."""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.adapter.shards import ParamRecord, ParamShard, constant
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.reshard.rules import unlike
from fr_deepspeed.elastic import _moved_away, in_this_size
from fr_deepspeed.shard_layout import PartitionShardLayout, partition_name, ranges, weights_name

BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def state(micro_steps: int) -> dict[str, Any]:
    return {"replicas": 4, "batch": BATCH, "counters": {"micro_steps": micro_steps, "global_steps": 9}, "other": 1}


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 12), (2, 6), (3, 4), (6, 2)])
def test_micro_steps_belong_to_whole_steps(replicas: int, accumulation: int) -> None:
    before = state(27)
    found = in_this_size(SimpleNamespace(dp_world_size=replicas), before)
    assert found["batch"] == {**BATCH, "gradient_accumulation_steps": accumulation}
    assert found["counters"] == {"micro_steps": 9 * accumulation, "global_steps": 9}
    assert found["other"] == 1 and found["replicas"] == replicas
    assert before == state(27), "what is kept of a version stays as it is"
    assert in_this_size(SimpleNamespace(dp_world_size=replicas), found) == found
    assert in_this_size(SimpleNamespace(dp_world_size=4), found)["counters"]["micro_steps"] == 27


def test_in_the_same_size_nothing_changes() -> None:
    other = {**state(28), "batch": {**BATCH, "gradient_accumulation_steps": 1}}
    assert in_this_size(SimpleNamespace(dp_world_size=4), other) is other


def test_state_that_has_been_moved_to_the_host_is_noticed() -> None:
    assert not _moved_away(torch.optim.SGD([torch.zeros(1)]))
    assert not _moved_away(SimpleNamespace(offloaded_states=set()))
    assert _moved_away(SimpleNamespace(offloaded_states={"hp_params"}))
    assert _moved_away(SimpleNamespace(offloaded_states=set(), hp_params_pin_buffers=[]))  # ZeRO-3 uses them again


@pytest.mark.parametrize("length", [1, 3, 16, 97, 4096])
@pytest.mark.parametrize("size", range(1, 9))
def test_ranges_are_those_of_deepspeed(length: int, size: int) -> None:
    each = ceil(length / (2 * size)) * 2
    assert ranges(length, size) == [(place * each, (place + 1) * each) for place in range(size)]


def shard_layout(length: int, place: int, size: int, names: str = "ab", **odd: torch.Tensor) -> PartitionShardLayout:
    """Of one parameter group of that many elements, whose flat tensor is 0, 1, 2, ..."""
    start, stop = ranges(length, size)[place]
    whole = torch.zeros(stop * size)
    whole[:length] = torch.arange(length)
    partition = torch.nn.Parameter(whole[start:stop].clone())
    optimizer = torch.optim.AdamW([partition])
    moments = {"exp_avg": partition.detach() * 2, "exp_avg_sq": partition.detach() * 3}
    optimizer.state[partition] = {"step": torch.tensor(5.0), **moments, **odd}
    shard = ParamShard(ParamRecord("p", partition_name(0, place, size), (place,), constant(partition)), {0: optimizer})
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (1, length - 1)]
    zero = SimpleNamespace(
        partition_count=[size],
        round_robin_bit16_offsets=[[0]],
        round_robin_bit16_meta=[[torch.zeros(length, device="meta")]],
        bit16_groups=[parameters],
        param_names=dict(zip(parameters, names, strict=True)),
        bit16_groups_flat=[whole.bfloat16()],
        device="cpu",
    )
    return PartitionShardLayout(zero, lambda: [shard], lambda *_: None)


@pytest.mark.parametrize("length", [3, 97])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 2), (3, 4), (2, 1)])
def test_every_element_is_at_one_place_and_padding_at_none(length: int, before: int, after: int) -> None:
    olds = [shard_layout(length, place, before) for place in range(before)]
    described = olds[0].describe()
    assert all(old.describe() == described and old.size == before for old in olds)
    for size in (before, after):
        tensors = {tensor.name: tensor for tensor in olds[0].tensors(described, size)}
        assert set(tensors) == {"0/param", "0/state/step", "0/state/exp_avg", "0/state/exp_avg_sq", "0/weights"}
        boxes = [box for place in range(size) for box in tensors["0/param"].boxes(place)]
        covered = [i for box in boxes for i in range(box.low[0], box.high[0])]
        assert covered == list(range(length))
        assert all(len(tensors["0/weights"].boxes(place)) == 1 for place in range(size))
        assert list(tensors["0/param"].shards) == [partition_name(0, place, size) for place in range(size)]
        assert set(tensors["0/weights"].shards) == {weights_name(0, size)}


def test_parameters_in_another_order_are_others() -> None:
    """They are as long together, so that nothing else would tell."""
    one, other = shard_layout(97, 0, 4), shard_layout(97, 0, 4, names="ba")
    described, odd = one.describe(), other.describe()
    assert (
        one.outline(described) == shard_layout(97, 1, 3).outline(shard_layout(97, 1, 3).describe()) != one.outline(odd)
    )
    assert unlike(one.rules(described), one.rules(shard_layout(97, 2, 3).describe())) == []
    moments = ["0/state/exp_avg", "0/state/exp_avg_sq"]
    assert unlike(one.rules(described), one.rules(odd)) == ["0/param", *moments, "0/weights"]


def test_what_is_prepared_is_as_long_as_the_partition_and_zero() -> None:
    old = shard_layout(97, 0, 4)
    for place in range(3):
        ready = old.prepare(old.describe(), place, 3)
        start, stop = ranges(97, 3)[place]
        assert ready.tensors["0/param"].shape == ready.tensors["0/state/exp_avg"].shape == (stop - start,)
        assert ready.tensors["0/state/step"].shape == () and ready.tensors["0/weights"].shape == (97,)
        assert ready.tensors["0/weights"].dtype is torch.bfloat16
        assert not any(bool(tensor.any()) for tensor in ready.tensors.values())
        assert ready.values == {partition_name(0, place, 3): old.describe()["groups"][0]["values"]}


def test_state_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'state/rows' has the shape \(7,\)"):
        shard_layout(97, 0, 4, rows=torch.zeros(7)).describe()

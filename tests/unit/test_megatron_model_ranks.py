"""Megatron's distributed optimizer in replicas of several ranks: names of what each place in a replica divides, and of
its parameters the groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.plan.reshard.placements import FlatBuffer
from flashrecovery.plan.reshard.rules import TensorRule
from fr_megatron import elastic, replicas
from fr_megatron.optimizers import part_name, weights_name
from fr_megatron.shard_layout import FlatLayout, OptimizerShardLayout, Stored

STATE = [["state/exp_avg", "float32", False, False], ["state/step", "float32", True, True]]


def rules(group: str) -> list[TensorRule]:
    """Of a parameter that is long enough for three ranks."""
    layout = FlatLayout((FlatBuffer((1024,), 128),), (Stored("0.w", 0, 0, 0, 1000, 0, False),))
    shard_layout = OptimizerShardLayout.__new__(OptimizerShardLayout)
    given: dict[str, Any] = {"_buffers": [SimpleNamespace(param_dtype=torch.bfloat16)], "_numbers": [(0, 0)]}
    vars(shard_layout).update(given, _layout=layout, _group=group, _expert=False)
    return list(shard_layout.rules({"state": STATE}))


@pytest.mark.parametrize("group", ["", "stand=1", "stand=11"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rules_and_shards_have_the_same_names(size: int, group: str) -> None:
    """In any size, that of one replica included: what looks for a part finds it by its name."""
    *parts, flat = rules(group)
    assert len(parts) == 3 and flat.key == "data"
    for place in range(size):
        assert {rule.shard_at(place, size) for rule in parts} == {part_name("0.w", place, size, group)}
        assert flat.shard_at(place, size) == weights_name(0, "dense", 0, size, group)


def test_no_two_places_have_a_name_in_common() -> None:
    names: list[str] = []
    for group in ("", "stand=0", "stand=1", "stand=10"):
        for size in (1, 2, 3):
            of_size = {rule.shard_at(place, size) for rule in rules(group) for place in range(size)}
            names += of_size
    assert len(names) == len(set(names)) == 4 * (2 + 3 + 4)


@pytest.mark.parametrize("lowest", [0, 1, 10])
def test_the_groups_of_parameters_are_those_of_ones_own_peers(lowest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stages have parameters of the same names, in other groups; each rank knows those of its own parts."""
    peers = [lowest, lowest + 20]
    a, b = object(), object()
    chunk = SimpleNamespace(
        named_parameters=lambda: [("a", a), ("b", b)],
        intra_dp_cp_group=peers,
        intra_expt_dp_group=peers,
        expert_parallel_buffers=[],
    )
    inner = SimpleNamespace(model_param_group_index_map={a: (1, 0)}, is_stub_optimizer=False, param_groups=[{}])
    others = [
        *("0 0 0 0.a", "0 0 1 0.b", "0 1 0 0.a", "0 1 2 0.b", "0 10 0 0.a", "0 10 3 0.b", "0 100 5 0.b", "0 2 4 0.b"),
        *(f"1 {rank} 7 0.b" for rank in (2, 3, 100)),  # other experts
    ]
    told: list[str] = []

    def union(mine: Any) -> list[str]:
        told.extend(mine)
        return sorted({*mine, *(line for line in others if not line.endswith(".a"))})

    monkeypatch.setattr(replicas.dist, "get_process_group_ranks", list)
    monkeypatch.setattr(elastic, "union", union)
    assert elastic.membership([chunk], inner) == {"0.a": 1, "0.b": {0: 1, 1: 2, 10: 3}[lowest]}
    assert told == [f"0 {lowest} 1 0.a"]
    told.clear()
    several = SimpleNamespace(chained_optimizers=[inner, inner])  # how these divide the parameters is not known
    elastic.membership([chunk], several)
    assert not told

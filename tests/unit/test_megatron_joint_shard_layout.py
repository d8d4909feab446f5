"""The state of the distributed optimizers of dense parameters and of experts as one sharding: which rank has what, in
any number of replicas, and that all that share it plan the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.logical import LogicalPart, ShardedParts, ShardParts, sharded_description
from flashrecovery.plan.reshard.placements import FlatBuffer
from flashrecovery.worker.reshard import relayout
from flashrecovery.worker.reshard.relayout import RankStaging
from fr_megatron.joint_shard_layout import JointShardLayout, experts_tensor
from fr_megatron.shard_layout import DATA, WEIGHTS, FlatLayout, OptimizerShardLayout, Stored, state_of
from tests.support.adapters import AdapterStandIn

DENSE, EXPERTS = ({"state": [[f"state{n}/exp_avg", "float32", False, False]], "layout": {}} for n in ("", 1))
DESCRIPTION = {"dense": DENSE, "experts": EXPERTS}


def of(kind: str, length: int, group: str, size: int) -> OptimizerShardLayout:
    """Of one parameter of this length."""
    layout = FlatLayout((FlatBuffer((length,), 128),), (Stored(f"0.{kind}", 0, 0, 0, length, 0, False),))
    shard_layout = OptimizerShardLayout.__new__(OptimizerShardLayout)
    flat = torch.zeros(0, dtype=torch.bfloat16)
    buffers = [SimpleNamespace(param_dtype=torch.bfloat16, param_data=flat, data_parallel_world_size=size)]
    expert = kind == "expert"
    given: dict[str, Any] = {
        "_state": state_of(int(expert)),
        "_layout": layout,
        "_group": group,
        "_expert": expert,
        "_buffers": buffers,
        "_numbers": [(0, 0)],
    }
    vars(shard_layout).update(given, _install=lambda *_: None)
    return shard_layout


def shared(number: int, each: int, ranks: int) -> JointShardLayout:
    """Of the rank with this number among so many; ``each`` have all experts together."""
    groups = [f"stand={first}" for first in range(each)]
    experts = of("expert", 700, groups[number % each], ranks // each)
    return JointShardLayout(of("dense", 1000, "", ranks), experts, range(ranks), number, groups)


CASES = [(1, 1), (1, 3), (2, 2), (2, 4), (2, 6), (4, 8)]


@pytest.mark.parametrize(("each", "ranks"), CASES)
def test_every_element_is_stepped_on_once_of_each_place_of_experts(each: int, ranks: int) -> None:
    shard_layout = shared(0, each, ranks)
    assert shard_layout.size == ranks and list(shard_layout.sharers()) == list(range(ranks))
    seen: Counter[tuple[str, int]] = Counter()
    for tensor in shard_layout.tensors(DESCRIPTION, ranks):
        for share in tensor.placement:
            for place in share.ranks:
                assert tensor.shards[place], (tensor.name, place)
            if tensor.key != DATA:
                assert len(share.ranks) == 1
                seen.update((tensor.name, at) for at in range(share.box.low[0], share.box.low[0] + share.box.size))
            elif tensor.name.startswith("experts"):
                assert [place % each for place in share.ranks] == [int(tensor.name.split()[1][0])] * (ranks // each)
            else:
                assert sorted(share.ranks) == list(range(ranks))
    assert set(seen.values()) == {1} and len(seen) == 2 * (1000 + each * 700)


@pytest.mark.parametrize(("each", "ranks"), CASES)
def test_all_who_share_it_plan_the_same_and_name_their_own(each: int, ranks: int) -> None:
    """Other experts' shards have other names; and what a rank prepares is what the plan says that it has."""
    plans = [shared(number, each, ranks).tensors(DESCRIPTION, ranks) for number in range(ranks)]
    said = [[(t.name, t.shape, t.dtype, t.placement, list(t.shards), t.key) for t in plan] for plan in plans]
    assert all(plan == said[0] for plan in said)
    unique = [{name for tensor in plans[0] if tensor.key != DATA if (name := tensor.shards[n])} for n in range(ranks)]
    assert sum(map(len, unique)) == len(set().union(*unique))
    for number in range(ranks):
        shard_layout = shared(number, each, ranks)
        prepared = shard_layout.prepare(DESCRIPTION, number, ranks)
        for tensor in shard_layout.tensors(DESCRIPTION, ranks):
            if tensor.shards[number]:
                parts = shard_layout.parts(tensor, number, prepared.tensors[tensor.name])
                assert [part.box for part in parts] == tensor.boxes(number)
            else:
                assert not tensor.boxes(number)
        assert set(prepared.values) <= unique[number]
        assert {key for values in prepared.values.values() for key in values["places"]} == {"state/", "state1/"}


def test_without_experts() -> None:
    """Context parallelism alone."""
    shard_layout = JointShardLayout(of("dense", 1000, "", 4), None, range(4), 2, ["", "stand=1"])
    names = {tensor.name for tensor in shard_layout.tensors(DESCRIPTION, 4)}
    assert names == {"0.dense/param", "0.dense/state/exp_avg", "0.dense/weights"}
    assert set(shard_layout.prepare(DESCRIPTION, 2, 4).tensors) == names


def test_tensors_that_lie_alike_have_one_object() -> None:
    shard_layout = shared(0, 2, 4)
    placements: dict[str, set[int]] = {}
    for tensor in shard_layout.tensors(DESCRIPTION, 4):
        placements.setdefault(f"{tensor.name.split('/')[0]} {tensor.key == DATA}", set()).add(id(tensor.placement))
    assert {len(ids) for ids in placements.values()} == {1}


# -- in a job whose parallel layout may change, too ---------------------------------------------------


def own_parts(number: int, each: int, *, experts: bool = True) -> dict[str, ShardParts]:
    """What a rank says of what it divides: of the dense parameters, and of its own experts alone."""
    found: dict[str, ShardParts] = {}
    kinds = {"0.dense": ("dense", 1000)}
    if experts:
        kinds[experts_tensor(number % each, "0.expert")] = (f"experts of {number % each}", 700)
    for name, (logical, length) in kinds.items():
        part = LogicalPart(logical, (length,), Box((0,), (length,)), 0)
        found[f"{name}/param"] = ShardParts("main.", "state.{}.", (part,))
        found[name + WEIGHTS] = ShardParts("", "state.{}.", (part,))
    return found


NOTHING = {"dense": {"state": [], "layout": {}}, "experts": {"state": [], "layout": {}}}
"""Before the first step."""


def giving(thing: Any) -> Callable[[], Any]:
    return lambda: thing


def gather(
    each: int, ranks: int, said: dict[int, dict[str, ShardParts]], monkeypatch: pytest.MonkeyPatch
) -> RankStaging:
    """Of rank 0, which is the last one that tells the others."""
    told: set[str] = set()

    def union(mine: list[str]) -> list[str]:
        told.update(mine)
        return sorted(told)

    monkeypatch.setattr(relayout.all_equal, "union", union)
    shard_layouts = [shared(number, each, ranks) for number in range(ranks)]
    own = [(number, rule) for number, shard_layout in enumerate(shard_layouts) for rule in shard_layout.rules(NOTHING)]
    known = {(r.name, r.suffix): ShardedParts(r, said[n][r.name], each) for n, r in own if r.name in said[n]}
    made = RankStaging.__new__(RankStaging)
    made._described, made._in_size = sharded_description(known.values(), ranks // each), {}
    for number, shard_layout in reversed([*enumerate(shard_layouts)]):
        monkeypatch.setattr(shard_layout, "describe", lambda: NOTHING)
        names = {name for tensor in shard_layout.tensors(NOTHING, ranks) if (name := tensor.shards[number])}
        adapter = AdapterStandIn(shard_layout=giving(shard_layout))
        shape = ReplicaShape(ranks // each, each)
        made._registry = SimpleNamespace(adapters=[adapter], shape=shape, sharded=names.copy)  # type: ignore[assignment]
        made._state = SimpleNamespace(sharded=said[number].copy)  # type: ignore[assignment]
        made._sharded = made._gather_sharded()
    return made


@pytest.mark.parametrize(("each", "ranks"), [(1, 3), (2, 4), (2, 6), (4, 8)])
def test_all_shards_are_described_in_any_number_of_replicas(
    each: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the experts of all places, also where fewer replicas are left: which rank keeps copies of what a rank
    had that is lost, which has other experts, can write these."""
    made = gather(each, ranks, {number: own_parts(number, each) for number in range(ranks)}, monkeypatch)
    for replicas in range(1, ranks // each + 1):
        size = replicas * each
        tensors = shared(0, each, ranks).tensors(DESCRIPTION, size)
        names = {name for tensor in tensors for name in tensor.shards if name}
        described = made._in(replicas)
        assert names <= described.keys()
        elements: Counter[tuple[str, str]] = Counter()
        for name in names:
            for part in described[name].parts:
                elements[name.partition("/")[0], part.name] += part.box.size
        assert elements["param", "dense"] == 1000
        assert [elements["param", f"experts of {place}"] for place in range(each)] == [700] * each


def test_a_shard_that_nobody_describes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {number: own_parts(number, 2, experts=number != 0) for number in range(4)}
    said[2] = own_parts(2, 2, experts=False)
    with pytest.raises(UnsupportedError, match=r"shard '(param|weights)/.*expert"):
        gather(2, 4, said, monkeypatch)

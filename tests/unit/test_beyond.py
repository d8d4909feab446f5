"""Ranks beyond the launch: their numbers, their places in groups, and in whose place they run the script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.adapter.fsdp2_replicas import mesh_now
from flashrecovery.config import Settings, run_config
from flashrecovery.errors import ConfigError, UnsupportedError
from flashrecovery.groups.state import STATE
from flashrecovery.groups.stores import _beyond
from flashrecovery.plan.elastic.new_ranks import members_of, missing, stand_in, tells_apart
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.elastic.resize import ReplicaRange, filling, leaving
from flashrecovery.plan.membership.placement import ring_of, setup_log_keepers_among
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import NEW_RANK_ENV, rank_env
from flashrecovery.worker.reshard.elastic_checks import _check_beyond
from tests.support.adapters import AdapterStandIn

SHAPES = [ReplicaShape(2), ReplicaShape(3), ReplicaShape(2, 2), ReplicaShape(3, 2, 2), ReplicaShape(2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_go_on_replica_by_replica(shape: ReplicaShape) -> None:
    everybody = [shape.ranks(replica) for replica in range(shape.replicas + 3)]
    assert sorted(rank for ranks in everybody for rank in ranks) == list(range(shape.world + 3 * shape.each))
    for replica, ranks in enumerate(everybody):
        assert [shape.replica(rank) for rank in ranks] == [replica] * shape.each
        assert [shape.model_rank(rank) for rank in ranks] == list(range(shape.each))
    assert shape.whole(everybody[0] + everybody[-1]) == [0, shape.replicas + 2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_whose_place(shape: ReplicaShape) -> None:
    """At the same place of a replica, the same whoever there is; of the launch each rank in its own."""
    for replica in range(shape.replicas + 2):
        for rank in shape.ranks(replica):
            other = stand_in(rank, shape)
            assert other < shape.world and shape.model_rank(other) == shape.model_rank(rank)
            assert (other == rank) == (rank < shape.world)
            assert rank < shape.world or shape.replica(other) not in ((0, shape.replicas - 1)[: shape.replicas - 1])


def test_a_group_of_all_has_them_as_its_last_members() -> None:
    shape = ReplicaShape(2)
    assert members_of((0, 1), (0, 1, 2, 3), 0, shape) == (0, 1, 2, 3)
    assert members_of((0, 1), (1, 3), 3, shape) == (1, 3)
    assert members_of((0, 1), (2, 3), 2, shape) == (2, 3)
    assert members_of((0, 1), (0,), 0, shape) == (0,)
    assert members_of((0, 1, 2), (0, 2, 3), 2, shape) == (0, 2, 3)


def test_a_group_within_a_replica_is_of_ones_own() -> None:
    """Made by rank 1, in whose place rank 3 has run the script; rank 1 may be there as well."""
    shape = ReplicaShape(2)
    assert members_of((1,), (0, 1, 2, 3), 3, shape) == (3,)
    assert members_of((1,), (0, 1, 2, 3), 1, shape) == (1,)
    several = ReplicaShape(2, 2)
    assert members_of((2, 3), (0, 1, 2, 3, 4, 5), 5, several) == (4, 5)
    assert members_of((1, 3), (0, 1, 2, 3, 4, 5), 5, several) == (1, 3, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everybody_is_counted_as_in_a_launch_of_as_many(shape: ReplicaShape) -> None:
    """In the group of all, and in those over the replicas: so sums come out alike."""
    replicas = shape.replicas + 2
    larger = ReplicaShape(replicas, shape.inner, shape.outer)
    everybody = [rank for replica in range(replicas) for rank in shape.ranks(replica)]
    counted = shape.in_order(everybody)
    assert [(shape.replica(rank), shape.model_rank(rank)) for rank in counted] == [
        (larger.replica(rank), larger.model_rank(rank)) for rank in range(larger.world)
    ]
    assert shape.in_order(reversed(range(shape.world))) == list(range(shape.world))
    for me in everybody:
        mine = stand_in(me, shape)
        assert members_of(range(shape.world), everybody, me, shape) == tuple(counted)
        peers = [shape.rank(replica, shape.model_rank(mine)) for replica in range(shape.replicas)]
        assert members_of(peers, everybody, me, shape) == tuple(
            r for r in counted if shape.model_rank(r) == shape.model_rank(me)
        )
        own = shape.ranks(shape.replica(mine))
        assert members_of(own, everybody, me, shape) == tuple(shape.ranks(shape.replica(me)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_who_is_lost_takes_its_own_replica_with_it(shape: ReplicaShape) -> None:
    """Whether the launch has had it, or another one in the same job."""
    replicas = (0, shape.replicas, shape.replicas + 1)
    members = sorted(rank for replica in replicas for rank in shape.ranks(replica))
    for lost in members:
        gone = sorted(shape.ranks(shape.replica(lost)))
        assert list(leaving(members, [lost], ReplicaRange(1, 9), shape)) == gone
        others = [rank for rank in gone if rank != lost]
        if others:
            assert filling(members, [lost, *others], 1, ReplicaRange(1, 9), shape) == []
        of_two = [lost, shape.rank(next(r for r in replicas if r != shape.replica(lost)), 0)]
        filled = filling(members, of_two, 1, ReplicaRange(1, 9), shape)
        assert len(filled) == 1 and filled[0] in of_two


def test_of_pipeline_stages_who_comes_stands_with_its_stage() -> None:
    """Two replicas of two stages: ranks 0 and 1 have the first one. Ranks 4 and 5 come."""
    shape = ReplicaShape(2, 1, 2)
    assert shape.in_order(range(6)) == [0, 1, 4, 2, 3, 5]
    assert members_of((0, 1, 2, 3), range(6), 4, shape) == (0, 1, 4, 2, 3, 5)
    assert members_of((1, 3), range(6), 5, shape) == (4, 5) and members_of((0, 1), range(6), 4, shape) == (0, 1, 4)
    assert members_of((0, 1, 2, 3), (1, 3, 4, 5), 1, shape) == (1, 4, 3, 5)


def test_one_replica_of_several_ranks_does_not_tell() -> None:
    """A group of all its ranks may be of the job, or of a replica."""
    assert not tells_apart(ReplicaShape(1, 2)) and not tells_apart(ReplicaShape(1, 1, 2))
    assert tells_apart(ReplicaShape(2, 2)) and tells_apart(ReplicaShape(2))


def test_groups_of_one_name_in_several_replicas_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 4 has run the script in the place of rank 2, and has a group of that one's name."""
    assert _beyond((2, 3)) == "" and _beyond((4, 5)) == "", "a job that has not changed"
    monkeypatch.setattr(STATE, "shape", ReplicaShape(2, 2))
    assert _beyond((2, 3)) == "" and _beyond((0, 2, 4)) == ""
    assert len({_beyond((2, 3)), _beyond((4, 5)), _beyond((6, 7))}) == 3


@pytest.mark.parametrize(
    ("shape", "launched", "members", "mesh"),
    [
        (ReplicaShape(2, 2), [[0, 1], [2, 3]], (0, 1, 2, 3, 4, 5), [[0, 1], [2, 3], [4, 5]]),
        (ReplicaShape(2, 2), [[0, 1], [2, 3]], (2, 3, 4, 5), [[0, 1], [2, 3]]),
        (ReplicaShape(2, 1, 2), [[0, 2], [1, 3]], (0, 1, 4, 2, 3, 5), [[0, 3], [1, 4], [2, 5]]),
        (ReplicaShape(2, 1, 2), [[0, 2], [1, 3]], (4, 5), [[0, 1]]),
    ],
)
def test_hsdps_mesh_is_as_launched_with_as_many(
    shape: ReplicaShape,
    launched: list[list[int]],
    members: tuple[int, ...],
    mesh: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for me in members:
        for name, value in (("members", members), ("shape", shape), ("me", me)):
            monkeypatch.setattr(STATE, name, value)
        assert mesh_now(torch.tensor(launched)).tolist() == mesh


def test_of_the_missing_the_launch_comes_first() -> None:
    shape = ReplicaShape(3)
    assert missing(shape, (0, 2, 4), 6) == [1, 3, 5]
    assert missing(shape, (0, 1, 2), 3) == []
    assert missing(shape, (0, 2), 2) == [1]


def test_copies_go_to_nodes_that_the_launch_did_not_have() -> None:
    """Two nodes of the launch that share a failure domain, and one that came later."""
    assert ring_of((0, 1, 2), 1, 1, (0, 0)) in ([1, 2, 0], [2, 0, 1])
    assert ring_of((0, 1, 2, 3, 4, 5), 2, 2) == [2, 3, 4, 5, 0, 1]


def test_their_records_are_kept_on_other_nodes() -> None:
    nodes = {0: "a", 1: "b", 4: "c"}
    for rank in nodes:
        keepers = setup_log_keepers_among(rank, 1, 5, nodes)
        assert {nodes[keeper] for keeper in keepers} == {"a", "b", "c"} - {nodes[rank]}


def test_its_environment_is_that_of_the_rank_in_whose_place_it_runs() -> None:
    config = run_config(
        {"nproc_per_node": 2, "nnodes": 2, "controller": "h:1", "elastic": {"min": 2, "max": 8}}, "here"
    )
    own = rank_env(config, 6, 1, pb.Replace(local_rank=1, node_rank=3, stands_in=3))
    assert {name: own[name] for name in ("RANK", "ROLE_RANK", "GROUP_RANK", "LOCAL_RANK")} == {
        "RANK": "2",
        "ROLE_RANK": "2",
        "GROUP_RANK": "1",
        "LOCAL_RANK": "1",
    }
    assert own[NEW_RANK_ENV] == "6"
    assert NEW_RANK_ENV not in rank_env(config, 2, 1, pb.Replace(local_rank=0, node_rank=1))


def launched(shape: ReplicaShape, computing: int, refused: str = "") -> Any:
    """A registry, with twelve micro-batches in a step, of which that many ranks of a replica compute some."""
    batches = SimpleNamespace(ranks=shape.replicas * computing, micro_batches=12)
    adapter = AdapterStandIn(only_as_launched=lambda most: refused)
    return SimpleNamespace(shape=shape, adapters=[adapter], batches=batches)


def check(registry: Any, most: int, settings: Settings) -> None:
    _check_beyond(registry, registry.batches, most, settings)


def test_what_may_grow_so_far() -> None:
    settings = Settings.model_validate({"elastic": {"min": 1, "max": 12}})
    check(launched(ReplicaShape(2), 1), 12, settings)
    check(launched(ReplicaShape(2, 2), 1), 12, settings)  # tensor parallelism: a replica computes as one rank
    check(launched(ReplicaShape(2, 2), 2), 6, settings)  # HSDP: each of its ranks does


@pytest.mark.parametrize(
    ("registry", "most", "said"),
    [
        (launched(ReplicaShape(2), 1), 13, "at most 12 is allowed"),
        (launched(ReplicaShape(2, 2), 2), 7, r"\(14 then\) is needed; at most 6 is allowed"),
        (launched(ReplicaShape(1, 2), 1), 2, "one replica of 2 ranks at the launch, .* a launch with two replicas is"),
        (launched(ReplicaShape(2), 1, "what cannot grow"), 3, "what cannot grow: .* elastic.max = 2 is allowed"),
    ],
)
def test_what_may_not(registry: Any, most: int, said: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        check(registry, most, Settings.model_validate({"elastic": {"min": 1, "max": most}}))


def test_nor_where_the_layout_may_change() -> None:
    settings = Settings.model_validate({"elastic": {"min": 1, "max": 3}, "parallelism": {"min": 2}})
    with pytest.raises(UnsupportedError, match="a parallel layout that may change"):
        check(launched(ReplicaShape(2, 2), 1), 3, settings)

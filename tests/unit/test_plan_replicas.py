"""Which ranks make up a replica, and which of them leave together."""

from __future__ import annotations

import itertools

import pytest

from flashrecovery.controller.state.custody import choose_leaving
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.plan.elastic.new_ranks import missing
from flashrecovery.plan.elastic.replicas import ReplicaShape, shape_of, singles
from flashrecovery.plan.elastic.resize import ReplicaRange, filling, leaving
from flashrecovery.plan.reshard.layouts import RankGrid

SIZES = ReplicaRange(1, 8)


@pytest.mark.parametrize(("tp", "dp", "pp"), list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2))))
def test_it_counts_as_the_grid_does(tp: int, dp: int, pp: int) -> None:
    shape, grid = ReplicaShape(dp, tp, pp), RankGrid(tp=tp, dp=dp, pp=pp)
    assert (shape.world, shape.each) == (grid.size, tp * pp)
    for stage, replica, at in itertools.product(range(pp), range(dp), range(tp)):
        rank = grid.rank(tp=at, dp=replica, pp=stage)
        assert shape.replica(rank) == replica and shape.model_rank(rank) == stage * tp + at
        assert shape.rank(replica, shape.model_rank(rank)) == rank
    for replica in range(dp):
        assert shape.ranks(replica) == grid.replica(replica)
    for model_rank in range(shape.each):
        peers = [shape.rank(replica, model_rank) for replica in range(dp)]
        found = shape_of(peers, grid.size)
        assert found is not None and found.replicas == dp
        if dp > 1:
            assert found == shape


@pytest.mark.parametrize("peers", [[0, 3], [1, 0], [0, 1, 3], [], [1, 2]])
def test_peers_from_which_the_others_do_not_follow(peers: list[int]) -> None:
    assert shape_of(peers, 4) is None


def test_whose_groups_are_known_in_another_size() -> None:
    shape = ReplicaShape(3, 2)  # (0, 1), (2, 3), (4, 5)
    everybody = range(6)
    assert shape.follows([0, 1], everybody) and shape.follows([3], everybody)
    assert shape.follows([1, 3, 5], everybody) and shape.follows(everybody, everybody)
    assert not shape.follows([0, 2], everybody), "not of every replica"
    assert not shape.follows([0, 3, 4], everybody), "at other places"
    assert not shape.follows([0, 1, 2, 4], everybody), "all of one, and some of the others"
    assert shape.follows([0, 2], [0, 1, 2, 3]), "made when there were two"
    assert shape.everywhere([0, 2, 4], everybody) and not shape.everywhere([0, 1], everybody)


def test_a_place_in_what_is_left() -> None:
    shape = ReplicaShape(3, 1, 2)  # (0, 3), (1, 4), (2, 5)
    assert shape.by_replica([5, 2, 0, 3]) == {0: [0, 3], 2: [2, 5]}
    assert shape.place([0, 2, 3, 5], 5) == (1, 2)
    assert shape.whole([0, 1, 2, 3, 5]) == [0, 2] and missing(shape, [0, 3, 5], 3) == [1]


def test_a_replica_leaves_as_a_whole() -> None:
    shape = ReplicaShape(3, 2)
    assert leaving(range(6), {3}, SIZES, shape) == (2, 3)
    assert leaving(range(6), {3, 4}, SIZES, shape) == (2, 3, 4, 5)
    assert leaving(range(6), {1, 3, 4}, SIZES, shape) == (), "none would be left"
    assert leaving(range(6), {3}, ReplicaRange(3, 3), shape) == (), "too few would be left"
    assert leaving([0, 1, 3, 4, 5], {4}, SIZES, shape) == (3, 4, 5), "and what there is of one that has lost a rank"
    assert leaving([0, 1, 3, 4, 5], (), SIZES, shape) == (3,)
    assert leaving(range(6), {3}, ReplicaRange(1, 3, frozenset({1, 3})), shape) == (2, 3, 4, 5), "two are not allowed"


def test_the_replica_that_lacks_fewest_is_filled_first() -> None:
    shape = ReplicaShape(3, 2)
    assert filling(range(6), {0, 1, 4}, 1, SIZES, shape) == [4]
    assert filling(range(6), {0, 1, 4}, 2, SIZES, shape) == [4], "one rank of a replica is of no use"
    assert filling(range(6), {0, 2, 4}, 2, SIZES, shape) == [0, 2]
    assert filling(range(6), {0, 2, 4}, 1, ReplicaRange(2, 3), shape) == [], "too few would be left"
    assert filling([0, 1, 3, 4, 5], {0, 4}, 1, SIZES, shape) == [0], "rank 2 has left, so rank 3 goes, too"


def test_replicas_are_chosen_to_leave() -> None:
    shape = ReplicaShape(3, 1, 2)  # (0, 3), (1, 4), (2, 5)
    records = {rank: RankRecord(rank, shape=shape) for rank in range(6)}
    for rank, record in records.items():
        record.inventory.live, record.inventory.needs = 7, {f"part{shape.model_rank(rank)}": 8}
    assert choose_leaving(records, {}, 1, 7, shape=shape) == [2, 5]
    assert choose_leaving(records, {}, 2, 7, shape=shape) == [1, 2, 4, 5]
    assert choose_leaving(records, {}, 1, 7, named=[4], shape=shape) == [1, 4]
    for record in (records[0], records[3]):
        record.inventory.live = -1
    assert choose_leaving(records, {}, 2, 7, shape=shape) == [0, 2, 3, 5], "who alone has it stays"


def test_each_rank_by_itself() -> None:
    shape = singles([0, 2, 5])
    assert shape.each == 1 and shape.by_replica([0, 2, 5]) == {0: [0], 2: [2], 5: [5]}

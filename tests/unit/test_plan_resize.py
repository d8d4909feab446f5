"""Which replicas leave, which ranks are filled, who gets which number, and when replicas come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.errors import ConfigError
from flashrecovery.plan.layouts import RankGrid
from flashrecovery.plan.resize import (
    Loss,
    Remedy,
    ReplicaRange,
    groups,
    growth,
    position,
    renumbered,
    resolve,
    why_too_few,
)

GRID = RankGrid(tp=2, dp=4, pp=2)  # replica r: ranks 2r, 2r + 1, 2r + 8, 2r + 9
ANY = ReplicaRange(1, 8)
GRIDS = st.builds(RankGrid, tp=st.integers(1, 3), cp=st.integers(1, 2), dp=st.integers(1, 5), pp=st.integers(1, 3))


def lost(*ranks: int, **what: object) -> Loss:
    return Loss(GRID, frozenset(ranks), **{"sizes": ANY, "micro_batches": 64, **what})  # type: ignore[arg-type]


def test_a_lost_replica_leaves_as_a_whole() -> None:
    found = resolve(lost(3))
    assert (found.remedy, found.leaving, found.filled) == (Remedy.SHRINK, (1,), ()) and found.grid.dp == 3
    assert found.reason == "there is no node for rank 3: 1 of 4 replicas leave, 3 go on"
    assert resolve(lost(0, 9, 2, 8)).leaving == (0, 1)


def test_room_is_used_first_and_the_wait_if_it_is_short() -> None:
    assert resolve(lost(3, 4, room=2)).remedy is Remedy.FILL
    assert resolve(lost(room=0)).remedy is Remedy.FILL
    assert resolve(lost(3, expected_s=20, patience_s=30)).remedy is Remedy.WAIT
    assert resolve(lost(3, expected_s=40, patience_s=30)).remedy is Remedy.SHRINK


def test_what_lacks_least_is_filled() -> None:
    """Replica 0 has lost two ranks, replica 2 one; there is room for one."""
    found = resolve(lost(0, 1, 4, room=1))
    assert (found.filled, found.leaving) == ((4,), (0,))


def test_a_number_that_is_not_allowed() -> None:
    only = ReplicaRange(1, 8, frozenset({4, 2}))
    found = resolve(lost(3, sizes=only))
    assert found.leaving == (1, 3) and found.grid.dp == 2 and "no allowed number" in found.reason
    assert resolve(lost(3, uneven=False)).grid.dp == 2, "3 does not divide 64 micro-batches"
    filled = resolve(lost(0, 2, 3, room=1, sizes=only))
    assert filled.leaving == (0, 1) and filled.filled == (), "a whole replica stays rather than one to be filled"
    none = lost(3, sizes=ReplicaRange(4, 8))
    assert resolve(none).remedy is Remedy.GIVE_UP and "MIN 4" in resolve(none).reason
    assert resolve(lost(3, sizes=ReplicaRange(4, 8), can_replan=True)).remedy is Remedy.REPLAN
    assert resolve(lost(3, sizes=None)).remedy is Remedy.GIVE_UP


@settings(deadline=None)
@given(GRIDS, st.data())
def test_the_resolve_is_possible(grid: RankGrid, data: st.DataObject) -> None:
    ranks = data.draw(st.frozensets(st.integers(0, grid.size - 1)))
    least = data.draw(st.integers(1, 5))
    sizes = ReplicaRange(
        least, data.draw(st.integers(least, 6)), data.draw(st.none() | st.frozensets(st.integers(1, 6)))
    )
    loss = Loss(
        grid, ranks, data.draw(st.integers(0, 6)), sizes, data.draw(st.integers(1, 12)), data.draw(st.booleans())
    )
    found = resolve(loss)
    gone = {rank for dp in found.leaving for rank in grid.replica(dp)}
    assert set(found.filled) <= ranks and len(found.filled) <= loss.room
    if found.remedy in (Remedy.FILL, Remedy.SHRINK):
        assert ranks <= gone | set(found.filled), "every lost rank is filled or has left"
        assert found.grid.dp == grid.dp - len(found.leaving)
    if found.remedy is Remedy.SHRINK:
        assert not gone & set(found.filled)
        assert found.grid.dp in range(sizes.least, sizes.most + 1) and found.grid.dp <= loss.micro_batches
        assert sizes.allowed is None or found.grid.dp in sizes.allowed
        assert loss.uneven or loss.micro_batches % found.grid.dp == 0


@settings(deadline=None)
@given(GRIDS, st.data())
def test_numbers_are_dense_and_in_order(grid: RankGrid, data: st.DataObject) -> None:
    leaving = data.draw(st.frozensets(st.integers(0, grid.dp - 1), max_size=grid.dp - 1))
    becomes = renumbered(grid, leaving)
    after = RankGrid(grid.tp, grid.cp, grid.dp - len(leaving), grid.pp)
    assert sorted(becomes.values()) == list(range(after.size))
    assert list(becomes.values()) == [becomes[r] for r in becomes] and not {
        position(grid, r).dp for r in becomes
    } & set(leaving)
    ordered = sorted(becomes)
    assert [becomes[r] for r in ordered] == sorted(becomes.values()), "the order stays"
    for old, new in becomes.items():
        a, b = position(grid, old), position(after, new)
        assert (a.tp, a.cp, a.pp) == (b.tp, b.cp, b.pp)
    again = renumbered(after, (), grid.dp)
    assert len(set(again.values())) == after.size and max(again.values(), default=0) < grid.size
    assert all(position(grid, new).dp == position(after, old).dp for old, new in again.items())


@settings(deadline=None)
@given(GRIDS)
def test_positions_and_ranks(grid: RankGrid) -> None:
    for rank in range(grid.size):
        at = position(grid, rank)
        assert grid.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank and rank in grid.replica(at.dp)
    with pytest.raises(ValueError, match=f"rank {grid.size}"):
        position(grid, grid.size)


@pytest.mark.parametrize("grid", [RankGrid(2, 2, 3, 2), RankGrid(4, 1, 2, 1), RankGrid(1, 1, 3, 4)])
def test_groups_are_those_of_megatron(grid: RankGrid) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    theirs = state.RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order="tp-cp-ep-dp-pp")
    for name, ranks in groups(grid).items():
        assert [list(some) for some in ranks] == theirs.get_ranks(name), name


def test_replicas_come() -> None:
    assert (found := growth(GRID, 9, ANY, 64)).coming == 2 and found.grid.dp == 6
    assert growth(GRID, 3, ANY, 64).reason == "there is room for 3 ranks, but a replica has 4"
    assert "the most that are allowed" in growth(GRID, 40, ReplicaRange(1, 4), 64).reason
    assert growth(GRID, 4, ANY, 64, uneven=False).coming == 0
    assert growth(GRID, 16, ANY, 64, uneven=False).coming == 4


def test_the_range() -> None:
    assert ReplicaRange.parse("2:8") == ReplicaRange(2, 8)
    for wrong in ("2", "0:4", "5:4", "a:b", "2:", ":4", "-1:4"):
        with pytest.raises(ConfigError, match="MIN:MAX is allowed"):
            ReplicaRange.parse(wrong)
    with pytest.raises(ValueError, match="4 replicas stay"):
        renumbered(GRID, (), 3)


@pytest.mark.parametrize(
    ("sizes", "left", "text"),
    [
        (ReplicaRange(3, 4), 2, "with 2 replicas left there would be fewer than elastic.min = 3"),
        (ReplicaRange(2, 4), 1, "with 1 replica left there would be fewer than elastic.min = 2"),
        (
            ReplicaRange(3, 8, frozenset({1, 2, 4, 8, 16})),
            3,
            "with 3 replicas left no number from elastic.min = 3 to 3 divides the job's batch (1, 2, 4, 8 would)",
        ),
    ],
)
def test_why_a_job_cannot_go_on(sizes: ReplicaRange, left: int, text: str) -> None:
    assert why_too_few(sizes, left) == text and not sizes.largest(left, 16, uneven=True)

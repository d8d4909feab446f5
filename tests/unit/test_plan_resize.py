"""Which replicas leave, which ranks are filled, and how many replicas can come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.errors import ConfigError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.elastic.resize import ReplicaRange, coming, filling, leaving, why_too_few

SHAPE = ReplicaShape(4, 2, 2)  # replica r: ranks 2r, 2r + 1, 2r + 8, 2r + 9
ALL = range(SHAPE.world)
ANY = ReplicaRange(1, 8)
SHAPES = st.builds(ReplicaShape, st.integers(1, 5), inner=st.integers(1, 3), outer=st.integers(1, 3))


def replicas_of(ranks: object) -> set[int]:
    return {SHAPE.replica(rank) for rank in ranks}  # type: ignore[attr-defined]


def test_a_lost_replica_leaves_as_a_whole() -> None:
    assert leaving(ALL, {3}, ANY, SHAPE) == (2, 3, 10, 11)
    assert replicas_of(leaving(ALL, {0, 9, 2, 8}, ANY, SHAPE)) == {0, 1}


def test_what_lacks_least_is_filled() -> None:
    """Replica 0 has lost two ranks, replica 2 one; there is room for one."""
    assert filling(ALL, {0, 1, 4}, 1, ANY, SHAPE) == [4]


def test_a_number_that_is_not_allowed() -> None:
    only = ReplicaRange(1, 8, frozenset({4, 2}))
    assert replicas_of(leaving(ALL, {3}, only, SHAPE)) == {1, 3}
    assert filling(ALL, {0, 2, 3}, 1, only, SHAPE) == [], "a whole replica stays rather than one to be filled"
    assert leaving(ALL, {3}, ReplicaRange(4, 8), SHAPE) == ()


@settings(deadline=None)
@given(SHAPES, st.data())
def test_what_goes_on_is_possible(shape: ReplicaShape, data: st.DataObject) -> None:
    members = range(shape.world)
    lost = data.draw(st.frozensets(st.integers(0, shape.world - 1), min_size=1))
    least = data.draw(st.integers(1, 5))
    most = data.draw(st.integers(least, 6))
    sizes = ReplicaRange(least, most, data.draw(st.none() | st.frozensets(st.integers(1, 6))))
    room = data.draw(st.integers(0, len(lost) - 1))
    gone = leaving(members, lost, sizes, shape)
    if gone:
        left = [rank for rank in members if rank not in gone]
        assert lost.isdisjoint(left), "every lost rank has left"
        assert sizes.largest(len(left) // shape.each) == len(left) // shape.each
    filled = filling(members, lost, room, sizes, shape)
    assert lost.issuperset(filled) and len(filled) <= room
    replicas = {shape.replica(rank) for rank in filled}
    assert all(rank in filled for rank in lost if shape.replica(rank) in replicas), "whole replicas are filled"


def test_replicas_come() -> None:
    assert coming(4, 9, ANY, 4) == 2
    assert coming(4, 3, ANY, 4) == 0, "a replica has four ranks"
    assert coming(4, 40, ReplicaRange(1, 4), 4) == 0, "there are the most that are allowed"
    assert coming(4, 12, ReplicaRange(1, 8, frozenset({4, 6, 8})), 4) == 2, "seven are not allowed"


def test_the_range() -> None:
    assert ReplicaRange.parse("2:8") == ReplicaRange(2, 8)
    for wrong in ("2", "0:4", "5:4", "a:b", "2:", ":4", "-1:4"):
        with pytest.raises(ConfigError, match="MIN:MAX is allowed"):
            ReplicaRange.parse(wrong)


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
    assert why_too_few(sizes, left) == text and not sizes.largest(left)

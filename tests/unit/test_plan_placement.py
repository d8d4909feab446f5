"""Which node takes which ranks, where a rank's copies go, and which node looks after which."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.plan.membership.failure_domains import LossEvent, labelled_gpus, locations, may_be_lost_together
from flashrecovery.plan.membership.placement import (
    Room,
    apart,
    copied_by,
    neighbour_stride,
    place,
    place_joining,
    ring_of,
    shared_domains,
)
from flashrecovery.plan.membership.ring import following, preceding

PAIR = [2, 3]


def spare(name: str, domain: str = "", free: int = 2, suspect: bool = False) -> Room:
    return Room(name, domain, free, spare=True, suspect=suspect)


@pytest.mark.parametrize(
    ("rooms", "lost_domain", "node"),
    [
        pytest.param([Room("a", "", 2), spare("z")], "", "z", id="a spare one"),
        pytest.param([spare("a", suspect=True), Room("z", "", 2)], "", "z", id="a healthy one, though not spare"),
        pytest.param([spare("a", "left"), spare("z", "right")], "left", "z", id="another domain"),
        pytest.param([spare("a", "left"), Room("z", "right", 2)], "left", "a", id="spare before another domain"),
        pytest.param([spare("a", free=4), spare("z", free=2)], "", "z", id="what fits best"),
        pytest.param([spare("a", "left", free=2), spare("z", "right", free=4)], "left", "z", id="domain before fit"),
        pytest.param([spare("z"), spare("b")], "", "b", id="the first name"),
        pytest.param([spare("a", "", free=4), spare("z", "somewhere", free=2)], "", "z", id="no domain is known"),
        pytest.param([spare("a", free=1), Room("z", "", 2)], "", "z", id="as a whole"),
    ],
)
def test_ranks_go_to_one_node_together(rooms: list[Room], lost_domain: str, node: str) -> None:
    for order in (rooms, rooms[::-1]):
        assert place(PAIR, order, lost_domain) == {2: node, 3: node}


def test_a_node_without_a_domain_is_in_none_that_was_lost() -> None:
    """Nothing is lost with a domain of no name: the fit decides."""
    assert place(PAIR, [spare("a", "", 2), spare("b", "other", 3)]) == {2: "b", 3: "b"}


def test_ranks_are_spread_only_if_no_node_can_take_them_all() -> None:
    assert place([0, 1, 2], [spare("a", free=1), Room("b", "", 2)]) == {0: "b", 1: "b", 2: "a"}
    assert place([0, 1, 2], [spare("a", free=2, suspect=True), spare("b", free=1), Room("c", "", 1)]) == {
        0: "b",
        1: "c",
        2: "a",
    }
    assert place([0, 1, 2, 3], [spare("a", free=1), Room("b", "", 2)]) is None
    assert place([0], [spare("a", free=0)]) is None
    assert place([0, 1], [spare("a", free=1), spare("b", free=0), spare("c", free=1)]) == {0: "a", 1: "c"}


@pytest.mark.parametrize(
    ("places", "homes", "exchanged"),
    [
        pytest.param({4: "a", 5: "b"}, {0: "a", 3: "b"}, {4: "b", 5: "a"}, id="both would be with their copies"),
        pytest.param({4: "b", 5: "a"}, {0: "a", 3: "b"}, {4: "b", 5: "a"}, id="right already"),
        pytest.param({4: "a", 5: "a"}, {0: "a", 3: "b"}, {4: "a", 5: "a"}, id="nothing to exchange"),
        pytest.param({4: "a", 5: "b"}, {}, {4: "a", 5: "b"}, id="the others have no place either"),
    ],
)
def test_ranks_that_are_given_to_several_nodes_are_not_with_their_copies(
    places: dict[int, str], homes: dict[int, str], exchanged: dict[int, str]
) -> None:
    assert apart(places, homes, {0: 4, 3: 5, 4: 0, 5: 3}) == exchanged


@pytest.mark.parametrize(
    ("ranks", "rooms", "homes", "places"),
    [
        pytest.param(
            *([1, 4, 5], [Room("a", "", 2), Room("z", "", 1)], {0: "z", 2: "b", 3: "b"}, {1: "z", 4: "a", 5: "a"}),
            id="with their mates, not in the order of nodes",
        ),
        pytest.param(
            *([2, 3, 4, 5], [Room("a", "", 3), Room("z", "", 3)], {0: "b", 1: "b"}, {2: "a", 3: "a", 4: "z", 5: "z"}),
            id="mates together",
        ),
        pytest.param(
            *([2, 3, 4, 5], [Room("a", "", 4), Room("z", "", 4)], {0: "b", 1: "b"}, {2: "a", 3: "a", 4: "z", 5: "z"}),
            id="who keeps copies for each other on two nodes",
        ),
        pytest.param(
            *([3], [Room("a", "", 1), Room("b", "", 4, spare=True)], {0: "a", 1: "a", 2: "a"}, {3: "b"}),
            id="rather on an empty node than with mates and others",
        ),
        pytest.param([3], [Room("a", "", 1), Room("c", "", 1)], {0: "a", 1: "c", 2: "a"}, {3: "a"}, id="no empty one"),
        pytest.param(
            *([2, 3], [Room("a", "", 2), Room("b", "", 1), Room("c", "", 1)], {0: "a"}, {2: "a", 3: "a"}),
            id="together, if no empty node has room for all",
        ),
        pytest.param([1], [Room("a", "", 1, suspect=True), Room("z", "", 1)], {0: "a"}, {1: "z"}, id="not in doubt"),
        pytest.param([1, 2], [Room("a", "", 1)], {0: "a", 3: "b"}, {}, id="no room"),
    ],
)
def test_who_comes_into_a_job_goes_where_its_mates_are(
    ranks: list[int], rooms: list[Room], homes: dict[int, str], places: dict[int, str]
) -> None:
    assert place_joining(ranks, rooms, homes, 2) == places


@pytest.mark.parametrize(
    ("domains", "stride"),
    [
        (["s"], 1),
        (["s", "s"], 8),
        (["s", "t"], 8),
        (["s", "s", "t", "t"], 16),
        (["s", "t", "s", "t"], 8),
        (["s", "s", "s", "t", "t", "t"], 24),
        (["s", "s", "t", "u", "u", "t"], 16),
        (["s", "s", "s"], 8),
    ],
)
def test_copies_go_to_another_node_and_domain(domains: list[str], stride: int) -> None:
    assert neighbour_stride(domains, 8) == stride


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 2), (4, 4), (8, 1), (9, 1)])
def test_copies_on_one_node_go_to_gpus_that_are_not_lost_with_the_ranks_own(size: int, stride: int) -> None:
    """Where there are others."""
    gpus = labelled_gpus(size, 8)
    assert neighbour_stride(["s"], 8, gpus) == stride
    assert ring_of(range(8), stride, 8, (), gpus) == [(rank + stride) % 8 for rank in range(8)]
    where = locations(8, 8, gpus)
    joined = [may_be_lost_together(one, where[(one.rank + stride) % 8], LossEvent.GPUS) for one in where]
    assert any(joined) == (size >= 8)


def test_a_ring_of_some_ranks_leaves_their_gpus_where_it_can() -> None:
    gpus = labelled_gpus(2, 4)
    assert ring_of((0, 1, 2), 2, 4, (), gpus) in ([1, 2, 0], [2, 0, 1])
    assert ring_of((0, 1, 2, 3), 1, 4, (), gpus) == [2, 3, 0, 1]
    assert ring_of((0, 2, 3), 2, 4, (), gpus) in ([1, 2, 0], [2, 0, 1])
    assert ring_of(range(8), 4, 4, (), gpus) == [4, 5, 6, 7, 0, 1, 2, 3], "another node is other GPUs"


class _Rack(str):
    __slots__ = ()
    looks = 0

    def __eq__(self, other: object) -> bool:
        _Rack.looks += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


@pytest.mark.parametrize("rack", [1, 9])
def test_a_stride_is_found_without_looking_at_all_pairs_of_nodes(rack: int) -> None:
    domains = [_Rack(node // rack) for node in range(900)]
    _Rack.looks = 0
    assert neighbour_stride(domains, 8) == rack * 8
    assert _Rack.looks == rack * len(domains)


def test_a_nodes_observers_are_the_next_in_the_ring() -> None:
    ring = ["a", "b", "c", "d"]
    assert list(following("b", ring)) == ["c", "d", "a"]
    assert list(following("d", ring)) == ["a", "b", "c"]
    assert list(preceding("b", ring)) == ["a", "d", "c"]
    assert list(preceding("a", ring)) == ["d", "c", "b"]


def test_a_node_that_is_not_in_the_ring_has_its_place() -> None:
    ring = ["a", "c", "e"]
    assert list(following("b", ring)) == ["c", "e", "a"] and list(preceding("b", ring)) == ["a", "e", "c"]
    assert list(following("f", ring)) == ["a", "c", "e"] and list(preceding("f", ring)) == ["e", "c", "a"]
    assert list(following("", ring)) == ring and list(preceding("", ring)) == ring[::-1]
    assert list(following("a", ["a"])) == list(following("a", [])) == list(preceding("a", [])) == []


def test_who_follows_is_preceded() -> None:
    """Both sides of a silence ask the same nodes."""
    ring = [f"node{i:02}" for i in range(7)]
    for node in ring:
        for distance, other in enumerate(following(node, ring)):
            assert list(preceding(other, ring))[distance] == node


def test_failure_domains_have_numbers_only_where_nodes_share_one() -> None:
    assert shared_domains(["a", "b", "c"]) == ()
    assert shared_domains(["s1", "s1", "s2", "s1"]) == (0, 0, 1, 0)


# -- whose shards are copied ----------------------------------------------------------------------


@given(st.data())
def test_whatever_is_lost_at_once_leaves_a_holder_or_a_copy(data: st.DataObject) -> None:
    """Of parity: of the shards that it is of, at most as many owners are lost as it may lack."""
    nodes, each, losses = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    world = nodes * each
    domains = [f"node {rank // each}" for rank in range(world)]
    holders = sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
    name = data.draw(st.text())
    by = copied_by(name, holders, domains, losses, lambda rank: (rank + each) % world)
    assert by is None or by in holders
    for lost in itertools.combinations({*domains}, losses):
        left = [rank for rank in holders if domains[rank] not in lost]
        if losses == 1:
            kept = by is not None and domains[(by + each) % world] not in lost
            assert left or kept
        elif nodes > losses:
            assert left or by is not None
    if len({domains[rank] for rank in holders}) > losses:
        assert by is None, "nothing is copied in vain"


def test_a_copy_goes_out_of_the_domain_if_any_holder_can_send_it_there() -> None:
    domains = ["left", "left", "left", "right"]
    for name in "abcdefgh":
        assert copied_by(name, (1, 2), domains, 1, lambda rank: (rank + 1) % 4) == 2


def test_of_the_ranks_of_one_domain_only_what_one_alone_holds_is_copied() -> None:
    assert copied_by("x", (0,), ["all"] * 2, 1) == 0
    assert copied_by("x", (0, 1), ["all"] * 2, 1) is None


def test_holders_share_the_work() -> None:
    found = {copied_by(f"shard {i}", (0, 1), ["a", "a", "b", "b"], 1, lambda rank: (rank + 2) % 4) for i in range(20)}
    assert found == {0, 1}

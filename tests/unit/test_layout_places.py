"""Where the ranks of another layout are: tensor-parallel groups on one node each, copies on another one."""

from __future__ import annotations

import random

import pytest

from flashrecovery.plan.strategy.layout_places import NodeSlot, groups_that_fit, numbered, places, stride
from flashrecovery.plan.strategy.relayout import LayoutFacts, best, layout_text

FACTS = LayoutFacts({"tp": 2, "pp": 2, "cp": 1, "ep": 1, "dp": 1}, 4, 64, 4, 4, 256, 1000, 32, 12, 1)


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_on_one_node_where_that_is_possible(seed: int) -> None:
    choose = random.Random(seed)
    slots = {f"n{n}": tuple(choose.sample(range(8), choose.randint(0, 8))) for n in range(choose.randint(1, 5))}
    tp = choose.choice([1, 2, 3, 4])
    rooms = [len(free) for free in slots.values()]
    groups = choose.randint(0, sum(rooms) // tp)
    found = places(tp, groups * tp, slots)
    assert len(set(found)) == len(found) and all(slot.local_rank in slots[slot.node] for slot in found)
    together = sum(len({slot.node for slot in found[i : i + tp]}) == 1 for i in range(0, len(found), tp))
    assert together >= min(groups, groups_that_fit(tp, rooms))


def test_who_is_there_stays() -> None:
    assert places(2, 4, {"a": (0, 2), "b": (1, 0)}) == [
        NodeSlot("a", 0),
        NodeSlot("a", 2),
        NodeSlot("b", 1),
        NodeSlot("b", 0),
    ]


def test_a_group_for_which_no_node_has_enough_is_on_several() -> None:
    assert [slot.node for slot in places(2, 4, {"a": (0, 1, 2), "b": (0,)})] == ["a", "a", "a", "b"]


def test_too_few_places_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 ranks, and 2 places"):
        places(1, 3, {"a": (0, 1)})


@pytest.mark.parametrize(
    ("domains", "expected"),
    [("aabb", 2), ("abab", 1), ("aaab", 1), ("aabbcc", 2), ("aaaabbcc", 4), ("ab", 1), ("a", 1), ("aaa", 1)],
)
def test_copies_are_in_another_domain(domains: str, expected: int) -> None:
    numbers = numbered(list(domains), [f"n{n}" for n in range(len(domains))] if len(set(domains)) > 1 else ["n"])
    found = stride(numbers if len(numbers) == len(domains) else [0] * len(domains))
    assert found == expected


def test_nodes_of_one_domain_are_told_apart() -> None:
    assert numbered(["rack"] * 3, ["x", "y", "x"]) == (0, 1, 0)
    assert numbered(["r", "s", "r"], ["x", "y", "z"]) == (0, 1, 0)


@pytest.mark.parametrize(
    ("rooms", "never"), [([1, 1], "tp=2"), ([3, 3], "tp=2,pp=1,dp=3"), ([2, 1], "tp=4"), ([1] * 4, "tp=2")]
)
def test_tensor_parallelism_stays_within_a_node(rooms: list[int], never: str) -> None:
    choice = best(FACTS, rooms, 1)
    shown = [layout_text(estimate.strategy) for estimate in choice.ranked]
    assert shown and not [text for text in shown if text.startswith(never)]
    for estimate in choice.ranked:
        s = estimate.strategy
        assert s.ranks <= groups_that_fit(s.tp, rooms) * s.tp and FACTS.micro_batches % s.dp == 0


def test_where_groups_do_not_fit_there_are_fewer_replicas() -> None:
    assert "tp=2,pp=1,dp=2" in [layout_text(e.strategy) for e in best(FACTS, [3, 3], 1).ranked]

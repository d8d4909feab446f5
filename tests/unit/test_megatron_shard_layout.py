"""How the distributed optimizer's state lies on the ranks, in any size. That it lies so in megatron-core is compared by
the jobs themselves before their first step, and by tests/integration/elastic/test_elastic_megatron.py bit for bit."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from flashrecovery.plan.reshard.placements import FlatBuffer
from fr_megatron.shard_layout import FlatLayout, Stored


def made(seed: int) -> FlatLayout:
    """Two buffers of a few buckets, with parameters at multiples of 64 elements."""
    draw = random.Random(seed)
    buffers, stored = [], []
    for number in range(2):
        buckets = []
        for bucket in range(draw.randint(1, 3)):
            at = 0
            for parameter in range(draw.randint(1, 5)):
                at = -(-at // 64) * 64
                length = draw.randint(1, 900)
                name = f"0.{number}.{bucket}.{parameter}"
                stored.append(Stored(name, number, bucket, at, length, draw.randint(0, 1), number == 0))
                at += length
            buckets.append(at)
        buffers.append(FlatBuffer(tuple(buckets), 128))
    return FlatLayout(tuple(buffers), tuple(stored))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_each_element_is_stepped_on_once(seed: int, size: int) -> None:
    layout = made(seed)
    for one in layout.stored:
        covered = [i for place in range(size) for i in range(*layout.range_of(one, place, size))]
        assert covered == list(range(one.length))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_buckets_divide_and_do_not_overlap(seed: int, size: int) -> None:
    layout = made(seed)
    for number, buffer in enumerate(layout.buffers):
        assert all(length % size == 0 and length % 128 == 0 for length in buffer.lengths(size))
        ends = [
            (layout.start_of(one, size), layout.start_of(one, size) + one.length)
            for one in layout.stored
            if one.buffer == number
        ]
        assert ends == sorted(ends) and all(a[1] <= b[0] for a, b in pairwise(ends))
        assert ends[-1][1] <= sum(buffer.lengths(size))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_groups(seed: int) -> None:
    """First group first, and in it what has no copy first; each rank knows those of which it has a part."""
    layout, size = made(seed), 3
    for place in range(size):
        order = [layout.by_name[name] for name in layout.order(place, size)]
        assert [(one.group, not one.wide) for one in order] == sorted((one.group, not one.wide) for one in order)
        held = {one.fqn for one in layout.stored if len(range(*layout.range_of(one, place, size)))}
        assert {one.fqn for one in order} == held and len(order) == len(held)


def test_a_model_may_be_too_small_for_more_ranks_than_the_launch_has() -> None:
    """Buffers are padded to multiples of 128 elements: among three ranks the first one has all that there are."""
    one = FlatLayout((FlatBuffer((100,), 128),), (Stored("0.w", 0, 0, 0, 100, 0, True),))
    assert one.without_part(2) is None
    assert one.without_part(3) == one.without_part(5) == (1, 3)

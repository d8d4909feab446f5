"""Which range a holder is asked for: every one once, none that would hold up the rest, and always by somebody."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flashrecovery.state.spec import TensorSpec
from flashrecovery.worker.transfer.ranges import UNDER_WAY, HolderProgress, Ranges, cut, takes_another

MB = 1 << 20


def known(speed: float, under_way: int = 0) -> HolderProgress:
    """Of a holder that has sent for a second."""
    return HolderProgress(round(speed), 1.0, under_way)


def test_a_holder_of_which_nothing_has_come_sends_one_range() -> None:
    fast = known(100 * MB)
    assert takes_another(HolderProgress(), [fast], 50, MB)
    assert not takes_another(HolderProgress(under_way=MB), [fast], 50, MB)
    assert not takes_another(HolderProgress(0, 3.0, MB), [fast], 50, MB)


def test_a_slow_holder_is_asked_as_long_as_it_is_a_help() -> None:
    slow, fast = known(MB), known(10 * MB)
    assert takes_another(slow, [fast], 11, MB)
    assert takes_another(slow, [fast], 10, MB), "the tenth would come when this one does"
    assert not takes_another(slow, [fast], 9, MB)
    assert not takes_another(known(MB, under_way=MB), [fast], 19, MB)
    assert takes_another(slow, [known(10 * MB, under_way=5 * MB)], 5, MB)


def test_the_last_range_goes_to_the_one_that_is_first() -> None:
    assert takes_another(known(2 * MB), [known(MB), known(MB)], 1, MB)
    assert not takes_another(known(MB), [known(2 * MB), known(MB)], 1, MB)


def test_one_holder_alone_sends_all() -> None:
    assert takes_another(known(1), [], 1, MB) and takes_another(known(1), [HolderProgress()], 1, MB)


speeds = st.floats(1.0, 1e9)
under_way = st.integers(0, 64 * MB)


@given(st.lists(st.tuples(speeds, under_way), min_size=1, max_size=5), st.integers(1, 1000), st.integers(1, 8 * MB))
@example(found=[(200008913.0, 426), (200008913.0, 426)], left=1, nbytes=1)
def test_one_of_them_is_always_asked(found: list[tuple[float, int]], left: int, nbytes: int) -> None:
    """Or all would wait for ever."""
    holders = [HolderProgress(round(speed) or 1, 1.0, busy) for speed, busy in found]
    others = [[*holders[:i], *holders[i + 1 :]] for i in range(len(holders))]
    assert any(takes_another(one, rest, left, nbytes) for one, rest in zip(holders, others, strict=True))


class Links:
    """Holders behind links of so many bytes a second, each asked over one stream; time passes as ranges come."""

    def __init__(self, speeds: Sequence[float], sizes: Sequence[int], then: Callable[[float], Sequence[float]]) -> None:
        self.now = 0.0
        self.asked: dict[int, list[int]] = {holder: [] for holder in range(len(speeds))}
        ranges = Ranges(sizes, range(len(speeds)), lambda: None, lambda: self.now)
        free = [0.0] * len(speeds)  # when a link has carried what it was asked for
        coming: list[tuple[float, int, int]] = []
        self.ended = 0.0
        under_way = [0] * len(speeds)
        while True:
            for holder in range(len(speeds)):
                while under_way[holder] < UNDER_WAY:
                    number = ranges.take(holder, wait=False)
                    if number is None:
                        break
                    self.asked[holder].append(number)
                    under_way[holder] += 1
                    free[holder] = max(free[holder], self.now) + sizes[number] / then(self.now)[holder]
                    heapq.heappush(coming, (free[holder], holder, number))
            if not coming:
                break
            self.now, holder, number = heapq.heappop(coming)
            under_way[holder] -= 1
            ranges.arrived(holder, number)
        self.ended = self.now


@pytest.mark.parametrize(
    "speeds", [(1.0,), (1.0, 1.0), (5.0, 1.0), (1.0, 5.0), (100.0, 1.0), (4.0, 2.0, 1.0), (1.0,) * 4]
)
def test_unequal_links_carry_what_they_can(speeds: tuple[float, ...]) -> None:
    sizes = [1] * 256
    links = Links(speeds, sizes, lambda _: speeds)
    assert sorted(number for asked in links.asked.values() for number in asked) == list(range(256))
    least = sum(sizes) / sum(speeds)
    # At the worst, the first range of the slowest one comes last.
    assert links.ended <= max(1.05 * least, 1 / min(speeds)), (links.ended, least)


def test_a_link_that_becomes_slow_is_asked_less() -> None:
    before, after = (1.0, 1.0), (1.0, 0.05)
    links = Links(before, [1] * 256, lambda now: before if now < 20 else after)
    halves = 128 / 1.0 + (128 - 20) / 0.05 - 128
    assert links.ended < 320 < halves


def test_who_waits_is_asked_when_the_others_have_become_slow() -> None:
    """A refusal is not for ever."""
    now = [0.0]
    ranges = Ranges([MB] * 4, [0, 1], lambda: None, lambda: now[0])
    assert (ranges.take(0, wait=False), ranges.take(1, wait=False)) == (0, 1)
    now[0] = 0.01
    ranges.arrived(0, 0)
    now[0] = 1.0
    ranges.arrived(1, 1)
    assert ranges.take(0, wait=False) == 2
    assert ranges.take(1, wait=False) is None, "the other one would have both by then"
    now[0] = 500.0
    assert ranges.take(1, wait=False) == 3


def test_no_range_after_a_stop_and_none_of_one_who_was_left_out() -> None:
    ranges = Ranges([MB] * 4, [0, 1], lambda: None, lambda: 0.0)
    assert ranges.take(0, wait=True) == 0
    ranges.leave_out(1)
    assert ranges.take(1, wait=True) is None
    ranges.stop()
    assert ranges.take(0, wait=True) is None


def test_who_waits_sees_that_communication_was_abandoned() -> None:
    class AbandonedError(Exception):
        pass

    def check() -> None:
        raise AbandonedError

    ranges = Ranges([MB] * 4, [0], check, lambda: 0.0)
    assert ranges.take(0, wait=True) == 0
    with pytest.raises(AbandonedError):
        ranges.take(0, wait=True)  # nothing has come yet


sizes = st.one_of(st.integers(0, 4096), st.sampled_from([MB - 1, MB, 9 * MB, 100 * MB + 3]))


@given(st.lists(sizes, max_size=80))
def test_ranges_cover_every_byte_once_and_are_small(nbytes: list[int]) -> None:
    covered: dict[int, int] = {}
    for message in cut([TensorSpec((n,), torch.uint8) for n in nbytes]):
        assert 0 < message.nbytes <= max(MB // 2, min(8 * MB, sum(nbytes) // 64))
        for piece in message.pieces:
            assert piece.start == covered.get(piece.index, 0)
            covered[piece.index] = piece.start + piece.nbytes
    assert covered == {i: n for i, n in enumerate(nbytes) if n}

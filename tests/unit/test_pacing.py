"""What earlier copies have shown decides how long the next one may be held back."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery.plan import pacing
from flashrecovery.redundancy.memory import neighbor_copy
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.pacing import Pacing
from flashrecovery.redundancy.memory.peer_exchange import CopyContext


class Network:
    first_tag = 7

    def __init__(self) -> None:
        self.begun: list[tuple[int, float, float]] = []
        self.hurries = 0
        self.held = 0.0

    def begin(self, nbytes: int, window_s: float, rate: float) -> None:
        self.begun.append((nbytes, round(window_s, 6), round(rate, 6)))

    def hurry(self) -> None:
        self.hurries += 1

    def held_s(self) -> float:
        return self.held


class Rank:
    def __init__(self) -> None:
        self.now = 100.0
        self.network = Network()
        self.pacing = Pacing(self.network, lambda: self.now)

    def step(self, *, copy_s: float, held_s: float, needed_after_s: float, streams: int = 1) -> None:
        """A step whose copy of 1000 bytes begins 1 s after the hand-out."""
        handed_out = self.now
        self.pacing.committed()
        self.now += 1.0
        with self.pacing.sending(1000, streams):
            self.now += copy_s
            self.network.held = held_s
        self.now = handed_out + needed_after_s
        self.pacing.needed()
        self.pacing.needed()  # again, as in a step of several micro-batches


def test_nothing_is_held_back_as_long_as_nothing_is_known() -> None:
    assert pacing.window_s([]) == 0 and pacing.rate([]) == 0
    rank = Rank()
    rank.step(copy_s=2, held_s=0, needed_after_s=10)
    assert rank.network.begun == [(1000, 0, 0)] and rank.network.hurries == 1


def test_the_shortest_window_counts_and_the_best_rate() -> None:
    rank = Rank()
    rank.step(copy_s=2, held_s=0, needed_after_s=10)
    rank.step(copy_s=8, held_s=4, needed_after_s=20, streams=2)  # 6 s without what the two streams were held back
    rank.step(copy_s=1, held_s=0, needed_after_s=20)
    rank.step(copy_s=1, held_s=0, needed_after_s=20)
    assert rank.network.begun[1:] == [(1000, 9, 500), (1000, 9, 500), (1000, 9, 1000)]


def test_what_is_long_ago_is_forgotten() -> None:
    rank = Rank()
    rank.step(copy_s=1, held_s=0, needed_after_s=2)
    for _ in range(pacing.STEPS_LOOKED_AT):
        rank.step(copy_s=10, held_s=0, needed_after_s=20)
    rank.step(copy_s=10, held_s=0, needed_after_s=20)
    assert rank.network.begun[-2:] == [(1000, 1, 1000), (1000, 19, 100)]


def test_a_copy_that_is_needed_before_it_begins_is_not_held_back() -> None:
    rank = Rank()
    rank.step(copy_s=1, held_s=0, needed_after_s=20)
    rank.pacing.committed()
    rank.pacing.needed()
    with rank.pacing.sending(1000, 1):
        assert rank.network.hurries == 3


def test_a_copy_that_breaks_off_teaches_nothing() -> None:
    rank = Rank()
    rank.pacing.committed()
    with pytest.raises(ValueError), rank.pacing.sending(1000, 1):
        raise ValueError
    rank.pacing.needed()
    rank.step(copy_s=1, held_s=0, needed_after_s=20)
    assert rank.network.begun[-1][2] == 0


def test_the_tensors_of_a_copy_go_over_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tag has a separate connection; one alone does not fill a fast network."""
    monkeypatch.setattr(neighbor_copy, "MESSAGE_BYTES", 16)
    group = MagicMock()
    copies = NeighbourCopies(CopyContext(group, network=Network()), Ring.of_world(0, 2), [])
    copies._send_tensors(torch.zeros(16 * 6, dtype=torch.uint8))
    tags = [call.args[2] for call in group.send.call_args_list]
    assert tags == [7, 8, 9, 10, 7, 8] == [copies._tag(i) for i in range(6)]
    copies.close()

"""Megatron-LM's loaders as streams: where a survivor that goes back far begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrecovery.worker.data.stream import DataStream
from fr_megatron.lm.data import PlacedLoader


class MegatronPretrainingSampler:
    """As Megatron's: one global order, begun behind that many samples."""

    consumed_samples = 8
    micro_batch_times_data_parallel_size = 2


class Loader:
    def __init__(self) -> None:
        self.batch_sampler = MegatronPretrainingSampler()

    def __iter__(self) -> Iterator[int]:
        yield from range(self.batch_sampler.consumed_samples, 20, 2)


def taken(stream: DataStream, count: int) -> list[int]:
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("back", [0, 1, 2, 4])
@pytest.mark.parametrize("further", [0, 1, 5, 8])
def test_a_survivor_goes_back_far(back: int, further: int) -> None:
    """Also to before the first batch: an evaluation's loader may not have been used by then."""
    stream = DataStream(PlacedLoader(Loader()))
    order = [8, 10, 12, 14, 16, 18] * 3
    states = [stream.capture()]
    for number in range(4):
        assert next(stream) == order[number]
        stream.commit(number + 1)
        states.append(stream.capture())
    assert taken(stream, further) == order[4 : 4 + further]
    for _ in range(2):
        stream.restore(states[back])
        assert taken(stream, 9) == order[back : back + 9]


def test_a_replacement_goes_where_the_dead_process_was() -> None:
    dead = DataStream(PlacedLoader(Loader()))
    taken(dead, 2)
    dead.commit(1)
    taken(dead, 2)
    dead.commit(2)
    fresh = DataStream(PlacedLoader(Loader()))
    fresh.restore(dead.capture())
    assert taken(fresh, 3) == [16, 18, 8]

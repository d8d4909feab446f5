"""The samples of a step are the same in every size, each once, and weigh the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan.elastic.sample_order import BatchSplit, SampleOrder, exact_sizes, stream_seed

BATCHES = st.tuples(st.integers(1, 6), st.integers(1, 30)).map(lambda t: (t[0], t[0] * t[1]))


@settings(deadline=None)
@given(BATCHES, st.integers(1, 40), st.integers(0, 1000), st.integers(1, 500), st.none() | st.integers(-5, 5))
def test_all_sizes_compute_the_same_samples(
    batch: tuple[int, int], replicas: int, step: int, samples: int, seed: int | None
) -> None:
    micro_batch, global_batch = batch
    order = SampleOrder(samples, global_batch, seed)
    batch_split = BatchSplit(global_batch, micro_batch, replicas)
    lines = [line for replica in range(replicas) for line in batch_split.schedule(step, replica)]
    assert [number for number, _ in lines] == list(range(batch_split.micro_batches))
    assert [p for _, positions in lines for p in positions] == list(order.positions(step))
    alone = BatchSplit(global_batch, micro_batch, 1)
    assert lines == list(alone.schedule(step, 0)), "what a micro-batch is does not depend on the size"
    counts = [batch_split.count(replica) for replica in range(replicas)]
    assert max(counts) == batch_split.accumulation and max(counts) - min(counts) <= 1
    assert batch_split.even == (max(counts) == min(counts))
    assert all(batch_split.owner(number) == r for r in range(replicas) for number in batch_split.of(r))


@settings(deadline=None)
@given(BATCHES, st.integers(1, 40), st.data())
def test_all_samples_weigh_the_same(batch: tuple[int, int], replicas: int, data: st.DataObject) -> None:
    micro_batch, global_batch = batch
    batch_split = BatchSplit(global_batch, micro_batch, replicas)
    values = data.draw(st.lists(st.integers(-99, 99), min_size=global_batch, max_size=global_batch))
    mean = Fraction(sum(values), global_batch)

    def of(number: int) -> Fraction:
        some = [values[p] for p in batch_split.positions(0, number)]
        return Fraction(sum(some), len(some))

    for averaged in (False, True):
        parts = [sum(of(m) * batch_split.weight(averaged=averaged) for m in batch_split.of(r)) for r in range(replicas)]
        assert sum(parts) / (replicas if averaged else 1) == mean
    own = [sum(map(of, batch_split.of(r)), Fraction(0)) / max(1, batch_split.count(r)) for r in range(replicas)]
    assert sum(own[r] * batch_split.correction(r) for r in range(replicas)) / replicas == mean
    assert not batch_split.even or all(batch_split.correction(r) == 1 for r in range(replicas))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 5), st.integers(-(2**70), 2**70))
def test_each_sample_comes_once_in_an_epoch(samples: int, epoch: int, seed: int) -> None:
    order = SampleOrder(samples, 7, seed)
    found = [order.sample(epoch * samples + i) for i in range(samples)]
    assert sorted(found) == list(range(samples))


def test_epochs_and_seeds_differ_and_an_order_is_for_ever() -> None:
    first = [SampleOrder(100, 10, 1).sample(i) for i in range(200)]
    assert first[:100] != first[100:] and first[:100] != list(range(100))
    assert first[:100] != [SampleOrder(100, 10, 2).sample(i) for i in range(100)]
    assert SampleOrder(10, 4, 7).of_step(3) == [2, 4, 5, 8], "a change of this would change every job's data"
    assert SampleOrder(3, 4).of_step(1) == [1, 2, 0, 1]


def test_a_shuffle_is_one() -> None:
    """Neighbours are not kept together, and every place is reached from everywhere."""
    hits = [[0] * 8 for _ in range(8)]
    for seed in range(800):
        order = SampleOrder(8, 1, seed)
        for i in range(8):
            hits[i][order.sample(i)] += 1
    assert all(55 <= n <= 150 for row in hits for n in row)


def test_streams_depend_on_everything_but_the_replica() -> None:
    some = [stream_seed(s, i, m, p) for s in (0, 1) for i in range(9) for m in range(9) for p in ("", "dropout")]
    assert len(set(some)) == len(some) and all(0 <= seed < 2**63 for seed in some)
    assert stream_seed(1234, 5, 6) == 7858793074183099876, "a change of this would change every job's numbers"


def test_sizes_that_divide_and_others() -> None:
    assert exact_sizes(64, 2, 5, least=3) == [5, 4, 3]
    assert exact_sizes(64, 2, 40, uneven=False) == [32, 16, 8, 4, 2, 1]
    with pytest.raises(ValueError, match="micro_batch = 3: a divisor of the global batch"):
        exact_sizes(64, 3, 5)
    with pytest.raises(ValueError, match="replica = 4: 0 to 3"):
        BatchSplit(8, 1, 4).of(4)
    with pytest.raises(ValueError, match="samples = 0"):
        SampleOrder(0, 1)
    with pytest.raises(ValueError, match="replicas = 0"):
        BatchSplit(8, 1, 0)

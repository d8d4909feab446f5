"""Replicas several of whose ranks have their own micro-batches, as with expert parallelism.

Which numbers of replicas divide a step."""

from __future__ import annotations

import pytest

from flashrecovery.plan.elastic.sample_order import exact_sizes
from flashrecovery.worker.data import global_batches
from flashrecovery.worker.data.framework_batches import CallBatches


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "each", "sizes"),
    [
        (12, 6, 2, [3, 2, 1]),
        (12, 12, 2, [6, 3, 2, 1]),
        (8, 8, 2, [4, 2, 1]),
        (8, 8, 4, [2, 1]),
        (6, 6, 2, [3, 1]),  # four ranks would not divide six
        (12, 4, 1, [4, 3, 2, 1]),
    ],
)
def test_sizes_are_numbers_of_replicas(micro_batches: int, ranks: int, each: int, sizes: list[int]) -> None:
    assert exact_sizes(2 * micro_batches, 2, ranks, uneven=False, each=each) == sizes


def test_of_calls() -> None:
    def sizes(ranks: int, each: int) -> list[int]:
        made = CallBatches(
            global_batch=12,
            micro_batch=1,
            seed=1,
            place=lambda: (0, ranks),
            seed_framework=lambda seed, chunk: None,
            computing=each,
        )
        assert made.accumulation == 12 // ranks
        return list(made.sizes)

    assert sizes(6, 2) == [3, 2, 1]
    assert sizes(4, 2) == [2, 1]
    assert sizes(4, 1) == [4, 3, 2, 1]


@pytest.mark.parametrize(("ranks", "sizes"), [(6, [3, 2, 1]), (4, [2, 1]), (2, [1])])
def test_of_a_loop_of_ones_own(ranks: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_batches, "_place", lambda _: (0, ranks))
    batch = global_batches.FrameworkBatch(12, 1, computing=2)
    found = global_batches.ElasticBatches([0] * 24, global_batches.BatchSettings(seed=1), framework=lambda: batch)
    assert list(found.sizes) == sizes
    assert len(list(found.of(0))) == 12 // ranks

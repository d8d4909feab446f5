"""A range of a flattened tensor as boxes of it."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fr_megatron.pieces import boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    whole = torch.arange(prod(shape)).view(shape)
    found: list[int] = []
    for offset, size in boxes(shape, start, stop):
        box = whole
        for dimension, (begin, length) in enumerate(zip(offset, size, strict=True)):
            box = box.narrow(dimension, begin, length)
        found += box.flatten().tolist()
    assert found == list(range(start, stop))


def test_a_matrix_is_cut_into_a_row_end_whole_rows_and_a_row_beginning() -> None:
    assert list(boxes((4, 5), 3, 17)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert list(boxes((4, 5), 6, 8)) == [((1, 1), (1, 2))]
    assert list(boxes((4, 5), 0, 20)) == [((0, 0), (4, 5))]

"""Boxes of a tensor: what a rank has of it, as index ranges in each dimension.

Every tensor of a job has one *logical space*, its shape without any parallelism. What a rank holds is one or more boxes
of it: a row or column shard of tensor parallelism is one box; its part of a fused weight is one box in each section; a
range of a flattened buffer (ZeRO, distributed optimizer) is a few boxes for each tensor that it touches. Two layouts
then differ by the intersections of their boxes, whatever they are called.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, TypeVar

from flashrecovery.errors import RestoreError


@dataclass(frozen=True, slots=True)
class Space:
    """A tensor without any parallelism. ``itemsize``: bytes of an element. A scalar has the shape ``()``."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        if any(n < 0 for n in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape = {self.shape}: sizes of 0 or more are allowed")
        if self.itemsize < 1:
            raise ValueError(f"tensor {self.name!r}: itemsize = {self.itemsize}: 1 byte or more is allowed")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Box:
    """The indices from ``low`` up to, not including, ``high``, in each dimension."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(h - lo for lo, h in zip(self.low, self.high, strict=True))

    @property
    def size(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """What is in both; None if nothing is."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return Box(low, high) if all(lo < h for lo, h in zip(low, high, strict=True)) else None

    def __sub__(self, other: Box) -> list[Box]:
        """What is in this one alone, as boxes that do not overlap."""
        common = self & other
        if common is None:
            return [self] if self.size else []
        found, low, high = [], list(self.low), list(self.high)
        for d in range(len(low)):
            if low[d] < common.low[d]:
                found.append(Box(tuple(low), (*high[:d], common.low[d], *high[d + 1 :])))
                low[d] = common.low[d]
            if common.high[d] < high[d]:
                found.append(Box((*low[:d], common.high[d], *low[d + 1 :]), tuple(high)))
                high[d] = common.high[d]
        return found

    def narrowed(self, dim: int, start: int, stop: int) -> Box:
        """Its part from ``start`` up to ``stop`` in dimension ``dim``, both counted in the tensor."""
        return Box(
            (*self.low[:dim], start, *self.low[dim + 1 :]),
            (*self.high[:dim], stop, *self.high[dim + 1 :]),
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in an array that holds ``outer``, as that array's index."""
        return tuple(slice(lo - o, h - o) for lo, h, o in zip(self.low, self.high, outer.low, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{lo}:{h}" for lo, h in zip(self.low, self.high, strict=True)) + "]"


class HasBox(Protocol):
    """What says where a box lies."""

    @property
    def box(self) -> Box: ...


PartT = TypeVar("PartT", bound=HasBox)


def part_with(parts: Sequence[PartT], box: Box) -> PartT | None:
    """The one that has all of ``box``; None if none has. ``parts``: in the order of their first elements (``low``). A
    rank has thousands of them where each is a slice of a parameter, so that not all can be looked at for each box."""
    number = bisect_right(parts, box.low, key=lambda part: part.box.low) - 1
    if number >= 0 and parts[number].box & box == box:
        return parts[number]
    return next((part for part in parts if part.box & box == box), None)


class NoHolderError(RestoreError):
    """A part of a tensor is needed, and no living place holds it.

    Do: nothing by hand; the checkpoint is used, or the job ends and names the tensors.

    Attributes:
        missing: the tensors and the boxes, of the first tensors that lack something.
    """

    def __init__(self, message: str, missing: tuple[tuple[str, Box], ...]) -> None:
        super().__init__(message)
        self.missing = missing


def left_of(box: Box, taken: Sequence[Box]) -> list[Box]:
    """What is in ``box`` and in none of ``taken``."""
    return reduce(lambda rest, t: [piece for one in rest for piece in one - t], taken, [box] if box.size else [])


def flat_boxes(outer: Box, start: int, stop: int) -> list[Box]:
    """Elements ``start`` up to ``stop`` of ``outer``, counted row by row: as few boxes as possible (of n dimensions, at
    most 2 n - 1), in order. Each of them is contiguous in ``outer``."""
    start, stop = max(start, 0), min(stop, outer.size)
    if start >= stop:
        return []
    if not outer.low:
        return [outer]
    return list(_flat(outer, 0, start, stop))


def _flat(outer: Box, dim: int, start: int, stop: int) -> Iterator[Box]:
    """The same from dimension ``dim`` on: in those before it, ``outer`` has one index each."""
    base = outer.low[dim]
    row = math.prod(outer.shape[dim + 1 :])
    first, last = start // row, -(-stop // row)  # rows that are touched
    if start % row == 0 and stop % row == 0:
        yield outer.narrowed(dim, base + first, base + last)
        return
    if last - first == 1:
        inner = outer.narrowed(dim, base + first, base + last)
        yield from _flat(inner, dim + 1, start - first * row, stop - first * row)
        return
    if start % row:
        inner = outer.narrowed(dim, base + first, base + first + 1)
        yield from _flat(inner, dim + 1, start - first * row, row)
        first += 1
    full = stop // row
    if first < full:
        yield outer.narrowed(dim, base + first, base + full)
    if stop % row:
        inner = outer.narrowed(dim, base + full, base + full + 1)
        yield from _flat(inner, dim + 1, 0, stop - full * row)


def chunks(box: Box, limit: int) -> list[Box]:
    """``box`` in pieces of at most ``limit`` elements, each contiguous in ``box`` and as large as its rows allow."""
    if limit < 1:
        raise ValueError(f"limit = {limit} elements: 1 or more is allowed")
    if box.size <= limit:
        return [box] if box.size else []
    dim = next(d for d in range(len(box.low)) if math.prod(box.shape[d + 1 :]) <= limit)
    rows = limit // math.prod(box.shape[dim + 1 :])
    found = []
    for outer in _indices(box, dim):
        for start in range(box.low[dim], box.high[dim], rows):
            found.append(outer.narrowed(dim, start, min(start + rows, box.high[dim])))
    return found


def _indices(box: Box, dims: int) -> Iterator[Box]:
    """``box`` with a single index in each of the first ``dims`` dimensions."""
    if dims == 0:
        yield box
        return
    for outer in _indices(box, dims - 1):
        d = dims - 1
        for i in range(box.low[d], box.high[d]):
            yield outer.narrowed(d, i, i + 1)

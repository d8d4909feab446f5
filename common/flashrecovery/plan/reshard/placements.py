"""Ways in which a tensor is sharded among places, each for any number of them. Pure.

A *pattern* says which boxes of a tensor a place has, and where they lie in what is stored there: ZeRO and Megatron
store ranges of several parameters end to end, with padding between or behind them, which belongs to no tensor. It
consists of numbers and needs no framework, so it can be written into a checkpoint.

=====================  ===========================================================================================
:class:`Rows`          FSDP2: rows, as ``torch.chunk`` divides them
:class:`Whole`         everything on every place: numbers such as a step, replicated weights
:class:`EqualRanges`   ZeRO-1 and 2: equal ranges of a flat tensor that is padded at its end
:class:`Slices`        ZeRO-3: each parameter's slice, one after another, each padded
:class:`BufferRange`   Megatron's distributed optimizer: what a place steps on of one parameter of a flat buffer
:class:`WithRange`     a number that goes with such a range, where there is one
:class:`InBuffer`      a parameter as a whole, in a flat buffer whose paddings depend on the size
:class:`EveryNth`      one of these, on every n-th place alone: experts, each on some of the data-parallel ranks
=====================  ===========================================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flashrecovery.plan.reshard import layouts
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.layouts import Placement, Share

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box that a place has, and the number of its first element in what is stored there: the others follow, row by
    row."""

    box: Box
    at: int


class Pattern(ABC):
    """One way. ``shape``: of the tensor without any sharding."""

    @property
    def divides(self) -> bool:
        """No two places have the same of it; False: a place that has it, has all of it."""
        return True

    def counted(self, place: int, size: int) -> tuple[int, int] | None:
        """A place, and how many there are, as the names of shards count them; None: a place that has no part of it in
        any size."""
        return place, size

    @abstractmethod
    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        """What a place has, in the order of the first elements; none of them is empty."""

    @abstractmethod
    def stored(self, shape: Shape, place: int, size: int) -> Shape | None:
        """The shape, padding included, of what is stored at a place; None: nothing is, not even an empty tensor."""

    def placement(self, shape: Shape, size: int) -> Placement:
        """On all places."""
        return tuple(Share(part.box, (place,)) for place in range(size) for part in self.parts(shape, place, size))


@dataclass(frozen=True)
class Rows(Pattern):
    """Rows as ``torch.chunk`` divides them; the last places may have few or none, as an empty tensor."""

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        low, high = layouts.chunked(shape[0], size)[place]
        box = Box.whole(shape).narrowed(0, low, high)
        return (StoredBox(box, 0),) if box.size else ()

    def stored(self, shape: Shape, place: int, size: int) -> Shape:
        low, high = layouts.chunked(shape[0], size)[place]
        return (high - low, *shape[1:])

    def placement(self, shape: Shape, size: int) -> Placement:
        return layouts.sharded(shape, 0, layouts.chunked(shape[0], size), [(place,) for place in range(size)])


@dataclass(frozen=True)
class Whole(Pattern):
    """Everything on every place."""

    @property
    def divides(self) -> bool:
        return False

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        box = Box.whole(shape)
        return (StoredBox(box, 0),) if box.size else ()

    def stored(self, shape: Shape, place: int, size: int) -> Shape:
        return shape

    def placement(self, shape: Shape, size: int) -> Placement:
        return layouts.replicated(shape, range(size))


@dataclass(frozen=True)
class EqualRanges(Pattern):
    """Equal ranges of a tensor of one dimension, whose lengths are multiples of ``align``. The last ones may reach
    past its end, or begin there."""

    align: int

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        (length,) = shape
        start, stop = layouts.padded(length, size, self.align)[place]
        stop = min(stop, length)
        return (StoredBox(Box((start,), (stop,)), 0),) if start < stop else ()

    def stored(self, shape: Shape, place: int, size: int) -> Shape:
        start, stop = layouts.padded(shape[0], size, self.align)[place]
        return (stop - start,)


@dataclass(frozen=True)
class Slices(Pattern):
    """Parameters of these numbers of elements, end to end: that is the tensor. Each of them is cut into as many slices
    of one length as there are places, the last ones padded; a place stores its slices one after another."""

    numels: tuple[int, ...]

    @staticmethod
    def length(numel: int, size: int) -> int:
        """Elements of each slice of a parameter, padding included."""
        return -(-numel // size)

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        return _slices(self.numels, place, size)

    def stored(self, shape: Shape, place: int, size: int) -> Shape:
        return (sum(self.length(numel, size) for numel in self.numels),)


@lru_cache(maxsize=4096)
def _slices(numels: tuple[int, ...], place: int, size: int) -> tuple[StoredBox, ...]:
    found, offset, at = [], 0, 0
    for numel in numels:
        each = Slices.length(numel, size)
        start, stop = min(place * each, numel), min((place + 1) * each, numel)
        if start < stop:
            found.append(StoredBox(Box((offset + start,), (offset + stop,)), at))
        offset, at = offset + numel, at + each
    return tuple(found)


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer: the elements of each of its buckets without the padding at their ends, and of what their lengths
    are multiples besides the number of ranks."""

    buckets: tuple[int, ...]
    multiple: int

    def lengths(self, size: int) -> Sequence[int]:
        """Lengths of the buckets for ``size`` ranks."""
        return _lengths(self, size)

    def begin(self, bucket: int, size: int) -> int:
        """The first element of a bucket."""
        return sum(self.lengths(size)[:bucket])


@lru_cache(maxsize=4096)
def _lengths(buffer: FlatBuffer, size: int) -> tuple[int, ...]:
    multiple = math.lcm(size, buffer.multiple)
    return tuple(-(-elements // multiple) * multiple for elements in buffer.buckets)


@dataclass(frozen=True)
class BufferRange(Pattern):
    """A parameter lies in a bucket of a flat buffer, from its element ``start`` on, and each place has an equal range
    of the bucket: what that has of the parameter is stored by itself. A place may have nothing of it."""

    buffer: FlatBuffer
    bucket: int
    start: int

    def range_at(self, length: int, place: int, size: int) -> tuple[int, int]:
        """Which of the parameter's ``length`` elements a place has; an empty range if none."""
        share = self.buffer.lengths(size)[self.bucket] // size
        low, high = place * share - self.start, (place + 1) * share - self.start
        return min(max(low, 0), length), min(max(high, 0), length)

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        low, high = self.range_at(shape[0], place, size)
        return (StoredBox(Box((low,), (high,)), 0),) if low < high else ()

    def stored(self, shape: Shape, place: int, size: int) -> Shape | None:
        low, high = self.range_at(shape[0], place, size)
        return (high - low,) if low < high else None


@dataclass(frozen=True)
class WithRange(Pattern):
    """A number, on the places that have something of a parameter of ``length`` elements."""

    range: BufferRange
    length: int

    @property
    def divides(self) -> bool:
        return False

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        low, high = self.range.range_at(self.length, place, size)
        return (StoredBox(Box.whole(shape), 0),) if low < high else ()

    def stored(self, shape: Shape, place: int, size: int) -> Shape | None:
        low, high = self.range.range_at(self.length, place, size)
        return shape if low < high else None

    def placement(self, shape: Shape, size: int) -> Placement:
        return layouts.replicated(shape, [place for place in range(size) if self.parts(shape, place, size)])


@dataclass(frozen=True)
class InBuffer(Pattern):
    """A parameter as a whole, on every place, where it lies in a flat buffer: in a bucket, from its element ``start``
    on. What is stored is the buffer."""

    buffer: FlatBuffer
    bucket: int
    start: int

    @property
    def divides(self) -> bool:
        return False

    def first(self, size: int) -> int:
        """The number of its first element in the buffer."""
        return self.buffer.begin(self.bucket, size) + self.start

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        return (StoredBox(Box.whole(shape), self.first(size)),)

    def stored(self, shape: Shape, place: int, size: int) -> Shape:
        return (sum(self.buffer.lengths(size)),)

    def placement(self, shape: Shape, size: int) -> Placement:
        return layouts.replicated(shape, range(size))


@dataclass(frozen=True)
class EveryNth(Pattern):
    """As the pattern ``of`` says, among every ``each``-th place alone, from the ``first`` one on. The number of places
    is a multiple of ``each``."""

    of: Pattern
    each: int
    first: int

    @property
    def divides(self) -> bool:
        return self.of.divides

    def counted(self, place: int, size: int) -> tuple[int, int] | None:
        return (place // self.each, size // self.each) if place % self.each == self.first else None

    def parts(self, shape: Shape, place: int, size: int) -> Sequence[StoredBox]:
        counted = self.counted(place, size)
        return () if counted is None else self.of.parts(shape, *counted)

    def stored(self, shape: Shape, place: int, size: int) -> Shape | None:
        counted = self.counted(place, size)
        return None if counted is None else self.of.stored(shape, *counted)

    def placement(self, shape: Shape, size: int) -> Placement:
        return tuple(
            Share(share.box, tuple(place * self.each + self.first for place in share.ranks))
            for share in self.of.placement(shape, size // self.each)
        )


KINDS: dict[str, type[Pattern]] = {
    "rows": Rows,
    "whole": Whole,
    "equal_ranges": EqualRanges,
    "slices": Slices,
    "buffer_range": BufferRange,
    "with_range": WithRange,
    "in_buffer": InBuffer,
    "every_nth": EveryNth,
}
"""By the names under which checkpoints have them."""

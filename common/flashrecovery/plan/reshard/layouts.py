"""Which rank holds which boxes of which tensor: the layouts of the frameworks in one form.

A *placement* is how one tensor lies on ranks: parts, each a box and all ranks that hold it. Tensors of one shape that
lie alike (the layers of a stage) share one placement object, which makes planning for them as cheap as for one. A rank
that is in no part has nothing of the tensor (another pipeline stage, another expert); ranks in one part are replicas.

=======================================  ==================================================================
layout                                   made by
=======================================  ==================================================================
DDP, layer norms in tensor parallelism   :func:`replicated`
tensor parallelism, experts by rows      :func:`sharded` with :func:`even`
FSDP2, ``torch.chunk``                   :func:`sharded` with :func:`chunked`, uneven and empty ones included
HSDP                                     the same, with groups of replicas
fused gate-up, [q; k; v]                 :func:`fused`: interleaved sections, several boxes a rank
ZeRO-1/2/3, distributed optimizer        :func:`flat_partitions`: ranges of tensors laid end to end, padding included
=======================================  ==================================================================
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrecovery.plan.reshard.boxes import Box, flat_boxes

Ranks = Sequence[int]
"""Ranks that hold the same: a ``range`` or a tuple, each rank once."""


@dataclass(frozen=True, slots=True)
class Share:
    """``box`` is on all of ``ranks``."""

    box: Box
    ranks: Ranks


Placement = tuple[Share, ...]
"""How one tensor lies on the ranks."""
RankLayout = Mapping[str, Placement]
"""A placement for each tensor, by name."""


def even(size: int, parts: int) -> list[tuple[int, int]]:
    """Equal ranges. Raises ValueError if ``parts`` does not divide ``size``."""
    if parts < 1 or size % parts:
        raise ValueError(f"{size} rows in {parts} equal parts: a divisor of {size} is allowed")
    return [(i * size // parts, (i + 1) * size // parts) for i in range(parts)]


def chunked(size: int, parts: int) -> list[tuple[int, int]]:
    """As ``torch.chunk`` does it, and so FSDP2: all of the rounded-up size, the last ones smaller or empty."""
    if parts < 1:
        raise ValueError(f"{size} rows in {parts} parts: 1 part or more is allowed")
    chunk = -(-size // parts)
    return [(min(i * chunk, size), min((i + 1) * chunk, size)) for i in range(parts)]


def replicated(shape: Sequence[int], ranks: Ranks) -> Placement:
    """The whole tensor on each rank."""
    return (Share(Box.whole(shape), ranks),)


def sharded(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]], groups: Sequence[Ranks]) -> Placement:
    """``groups[i]`` holds ``ranges[i]`` of dimension ``dim``; an empty range is on no rank."""
    whole = Box.whole(shape)
    return tuple(
        Share(whole.narrowed(dim, start, stop), ranks)
        for (start, stop), ranks in zip(ranges, groups, strict=True)
        if start < stop
    )


@dataclass(frozen=True, slots=True)
class Section:
    """One of the weights that a fused one consists of.

    Attributes:
        size: its rows.
        unit: rows that stay together, such as a head's. Where there are fewer units than parts (key and value heads
            in wide tensor parallelism), successive parts hold the same unit.
    """

    size: int
    unit: int = 1


def fused(shape: Sequence[int], dim: int, sections: Sequence[Section], groups: Sequence[Ranks]) -> Placement:
    """Each section is divided over all groups, so that a rank has one box in each of them.

    Raises ValueError if the sections are not as many rows as there are, or one does not divide.
    """
    if sum(s.size for s in sections) != shape[dim]:
        raise ValueError(f"sections of {sum(s.size for s in sections)} rows: {shape[dim]} are needed")
    whole, parts, base = Box.whole(shape), len(groups), 0
    found: list[Share] = []
    for section in sections:
        units, rest = divmod(section.size, section.unit)
        if rest or not units or (units % parts and parts % units):
            raise ValueError(
                f"a section of {section.size} rows in units of {section.unit} over {parts} parts: whole units, as "
                "many in each part, or as many parts for each unit, are allowed"
            )
        count = min(units, parts)
        for i, (start, stop) in enumerate(even(section.size, count)):
            some = groups[i * parts // count : (i + 1) * parts // count]
            ranks = some[0] if len(some) == 1 else tuple(itertools.chain.from_iterable(some))
            found.append(Share(whole.narrowed(dim, base + start, base + stop), ranks))
        base += section.size
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor, or the box of it that a group of ranks shares, at its place in their flat buffer.

    Attributes:
        start: its first element in the buffer. What lies between segments is padding.
    """

    tensor: str
    box: Box
    start: int


def end_to_end(boxes: Sequence[tuple[str, Box]], align: int = 1) -> tuple[list[Segment], int]:
    """One segment after the other, each beginning at a multiple of ``align`` elements; and where the last one ends."""
    found, at = [], 0
    for tensor, box in boxes:
        at = -(-at // align) * align
        found.append(Segment(tensor, box, at))
        at += box.size
    return found, at


def padded(size: int, parts: int, align: int = 1) -> list[tuple[int, int]]:
    """Equal ranges of a flat buffer that is padded at its end so that it divides, and each begins at a multiple of
    ``align`` elements. The last ones may reach past the buffer's own ``size``: that is padding."""
    if parts < 1 or align < 1:
        raise ValueError(f"{parts} parts, aligned to {align}: 1 or more is allowed")
    length = -(-size // (parts * align)) * align
    return [(i * length, (i + 1) * length) for i in range(parts)]


def flat_partitions(
    segments: Sequence[Segment], ranges: Sequence[tuple[int, int]], groups: Sequence[Ranks]
) -> dict[str, list[Share]]:
    """The parts of each tensor, by its name, if ``groups[i]`` holds ``ranges[i]`` of the flat buffer. Padding belongs
    to no rank. :func:`together` joins the buffers of several groups of ranks (of each tensor and pipeline position)."""
    found: dict[str, list[Share]] = defaultdict(list)
    ordered = sorted(segments, key=lambda s: s.start)
    first = 0
    for (start, stop), ranks in sorted(zip(ranges, groups, strict=True), key=lambda part: part[0]):
        while first < len(ordered) and ordered[first].start + ordered[first].box.size <= start:
            first += 1
        for segment in itertools.islice(ordered, first, None):
            if segment.start >= stop:
                break
            for box in flat_boxes(segment.box, start - segment.start, stop - segment.start):
                found[segment.tensor].append(Share(box, ranks))
    return dict(found)


def together(*layouts: Mapping[str, Sequence[Share]]) -> dict[str, Placement]:
    """What several groups of ranks hold, as one layout. A placement that only one of them has stays that object."""
    parts: dict[str, list[Sequence[Share]]] = defaultdict(list)
    for layout in layouts:
        for name, some in layout.items():
            parts[name].append(some)
    found: dict[str, Placement] = {}
    for name, lists in parts.items():
        only = lists[0]
        alone = len(lists) == 1 and isinstance(only, tuple)
        found[name] = tuple(only if alone else itertools.chain.from_iterable(lists))  # tuple(t) is t itself
    return found


@dataclass(frozen=True)
class RankGrid:
    """Ranks as Megatron and DeepSpeed number them: tensor-parallel ones next to each other, then context-parallel, then
    data-parallel ones, then stages.

    Attributes:
        first: the number of its first rank.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    first: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return self.first + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def peers(self, *, tp: int, pp: int) -> range:
        """All ranks of a tensor position and a stage: they hold equal weights."""
        return range(self.rank(tp=tp, pp=pp), self.first + self.tp * self.cp * self.dp * (pp + 1), self.tp)

    def stage(self, pp: int) -> range:
        """All ranks of a stage."""
        width = self.tp * self.cp * self.dp
        return range(self.first + pp * width, self.first + (pp + 1) * width)

    def shards(self, pp: int) -> list[range]:
        """The ranks of each tensor position of a stage."""
        return [self.peers(tp=tp, pp=pp) for tp in range(self.tp)]

    def replica(self, dp: int) -> list[int]:
        """All ranks of a data-parallel coordinate: what leaves together."""
        return [
            self.rank(tp=tp, cp=cp, dp=dp, pp=pp)
            for pp in range(self.pp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        ]

"""Where the boxes of an old layout and those of a new one meet, for very many boxes at once.

Boxes are rows of arrays: ``group`` (boxes of different groups never meet), ``low`` and ``high`` of shape (n, d), int64,
and ``holders``, the number of a set of ranks. All of them are compared by sorting along the one dimension that
separates a group's boxes best, so that a tensor cut into thousands of rows costs as little as one cut into columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flashrecovery.plan.reshard.boxes import Box

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Boxes:
    """n boxes in d dimensions; those of tensors with fewer dimensions are one index thick in the others."""

    group: Ints
    low: Ints
    high: Ints
    holders: Ints

    def __len__(self) -> int:
        return len(self.group)

    @property
    def sizes(self) -> Ints:
        """Elements of each."""
        sizes: Ints = np.prod(self.high - self.low, axis=1, dtype=np.int64)
        return sizes

    def take(self, rows: npt.NDArray[np.generic]) -> Boxes:
        return Boxes(self.group[rows], self.low[rows], self.high[rows], self.holders[rows])

    def box(self, row: int, dims: int) -> Box:
        return Box(tuple(map(int, self.low[row, :dims])), tuple(map(int, self.high[row, :dims])))


def spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """For each range ``starts[i] .. starts[i] + counts[i]``: i, and the numbers in it, one after the other."""
    owner = np.repeat(np.arange(len(counts)), counts)
    inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, inner + np.repeat(starts, counts)


def meeting(old: Boxes, new: Boxes) -> tuple[Ints, Ints]:
    """All pairs (row of ``old``, row of ``new``) that have an element in common, by row of ``new``."""
    if not len(old) or not len(new):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    span = int(max(old.high.max(), new.high.max(), 1))
    dim = _best_dimension(old, new)
    old_low, old_high = _on_line(old, dim, span)
    new_low, new_high = _on_line(new, dim, span)
    order = np.argsort(old_low, kind="stable")
    reach = np.maximum.accumulate(old_high[order])
    first = np.searchsorted(reach, new_low, side="right")
    last = np.searchsorted(old_low[order], new_high, side="left")
    j, place = spread(first, np.maximum(last - first, 0))
    i = order[place]
    met = old.group[i] == new.group[j]
    for d in range(old.low.shape[1]):
        met &= np.maximum(old.low[i, d], new.low[j, d]) < np.minimum(old.high[i, d], new.high[j, d])
    return i[met], j[met]


def _best_dimension(old: Boxes, new: Boxes) -> Ints:
    """For each group, the dimension in which its boxes begin at the most places."""
    group = np.concatenate([old.group, new.group])
    low = np.concatenate([old.low, new.low])
    groups = int(group.max()) + 1
    places = np.zeros((groups, low.shape[1]), np.int64)
    span = int(low.max()) + 1
    for d in range(low.shape[1]):
        distinct = np.unique(group * span + low[:, d]) // span
        places[:, d] = np.bincount(distinct, minlength=groups)
    best: Ints = places.argmax(axis=1)
    return best


def _on_line(boxes: Boxes, dim: Ints, span: int) -> tuple[Ints, Ints]:
    """Each box as an interval of one line, on which the groups lie one after the other."""
    rows = np.arange(len(boxes))
    chosen, base = dim[boxes.group], boxes.group * (span + 1)
    return base + boxes.low[rows, chosen], base + boxes.high[rows, chosen]


def disjoint(boxes: Boxes, union: Callable[[int, int], int]) -> Boxes:
    """The same, cut such that no two of a group overlap; where some did, ``union`` of their holders is what holds the
    common part."""
    i, j = meeting(boxes, boxes)
    clashing = np.unique(i[i != j])
    if not len(clashing):
        return boxes
    alone = np.ones(len(boxes), bool)
    alone[clashing] = False
    by_group: dict[int, dict[tuple[bytes, bytes], tuple[int, int]]] = {}
    for row in clashing.tolist():
        equal = by_group.setdefault(int(boxes.group[row]), {})
        key = (boxes.low[row].tobytes(), boxes.high[row].tobytes())
        known = equal.get(key)
        holders = int(boxes.holders[row])
        equal[key] = (row, holders) if known is None else (known[0], union(known[1], holders))
    merged = boxes.take(np.array([row for equal in by_group.values() for row, _ in equal.values()]))
    merged = Boxes(
        merged.group,
        merged.low,
        merged.high,
        np.array([holders for equal in by_group.values() for _, holders in equal.values()]),
    )
    i, j = meeting(merged, merged)
    if (i != j).any():
        merged = _cut_up(merged, union)
    rest = boxes.take(np.flatnonzero(alone))
    return Boxes(
        np.concatenate([rest.group, merged.group]),
        np.concatenate([rest.low, merged.low]),
        np.concatenate([rest.high, merged.high]),
        np.concatenate([rest.holders, merged.holders]),
    )


def _cut_up(boxes: Boxes, union: Callable[[int, int], int]) -> Boxes:
    """Box by box, against those of its group before it."""
    dims = boxes.low.shape[1]
    done: dict[int, list[tuple[Box, int]]] = {}
    for row in range(len(boxes)):
        fresh = [boxes.box(row, dims)]
        holders = int(boxes.holders[row])
        kept: list[tuple[Box, int]] = []
        for known, theirs in done.get(int(boxes.group[row]), []):
            common = [c for c in (one & known for one in fresh) if c is not None]
            if not common:
                kept.append((known, theirs))
                continue
            rest = [known]
            for c in common:
                kept.append((c, union(theirs, holders)))
                rest = [piece for one in rest for piece in one - c]
            kept += [(piece, theirs) for piece in rest]
            fresh = [piece for one in fresh for piece in one - known]
        done[int(boxes.group[row])] = kept + [(piece, holders) for piece in fresh]
    flat = [(group, box, holders) for group, some in done.items() for box, holders in some]
    return Boxes(
        np.array([group for group, _, _ in flat]),
        np.array([box.low for _, box, _ in flat]),
        np.array([box.high for _, box, _ in flat]),
        np.array([holders for _, _, holders in flat]),
    )

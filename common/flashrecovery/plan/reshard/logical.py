"""Which parts of the whole model a rank's shards are, in terms that hold for every layout. Pure.

A shard belongs to one layout: its name says which tensor-parallel rank, stage or part of a flat buffer it is of. Its
content does not: each of its tensors consists of *parts*, boxes of *logical tensors*, which have the same names and
shapes in every layout (layers are numbered across all stages, rows across all tensor-parallel ranks). So the shards of
one layout can be converted to those of any other: :func:`~.plan.plan_reshard` cuts the new parts from the old ones.

===========================  ===================================================================================
a tensor of a shard          its logical tensors
===========================  ===================================================================================
the parameter                one part for each piece of it (a gated MLP's weight has two), or for each run of rows
                             of a flat range
optimizer state like it      the same parts, of tensors with its own name
a number (Adam's step)       one part of a tensor without dimensions, for all parameters together
the flat buffer of weights   the parts of all its parameters; the bytes between them are padding
===========================  ===================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrecovery.errors import RestoreError
from flashrecovery.plan.reshard.boxes import Box, Space, flat_boxes
from flashrecovery.plan.reshard.rules import TensorRule

PARAM, DATA, STATE = "param", "data", "state"
"""How the keys of a shard's tensors are, or begin: what is stepped on, a fixed tensor, the optimizer's state."""


@dataclass(frozen=True, slots=True)
class LogicalPart:
    """A box of a logical tensor, in a shard's tensor.

    Attributes:
        name: of the logical tensor, without what says that it is optimizer state.
        whole: the logical tensor's shape.
        box: the part's place in it.
        begin: the part is ``tensor.flatten()[begin:][:box.size].view(box.shape)``.
        padded: another layout may have more rows of the tensor, or fewer, which mean nothing (a padded vocabulary).
    """

    name: str
    whole: tuple[int, ...]
    box: Box
    begin: int
    padded: bool = False

    def plain(self) -> list[Any]:
        """As JSON knows it."""
        return [self.name, list(self.whole), list(self.box.low), list(self.box.high), self.begin, self.padded]

    @staticmethod
    def of(plain: Sequence[Any]) -> LogicalPart:
        name, whole, low, high, begin, padded = plain
        return LogicalPart(str(name), tuple(whole), Box(tuple(low), tuple(high)), int(begin), bool(padded))


@dataclass(frozen=True, slots=True)
class ShardParts:
    """What one shard is of.

    Attributes:
        param: what the names of logical tensors begin with of what is stepped on, or of the fixed tensor.
        state: the same of the optimizer's state, with the place of its name, as ``optimizer.state.{}.``
        parts: of the parameter; the optimizer's state is alike.
    """

    param: str
    state: str
    parts: tuple[LogicalPart, ...]

    def of(self, key: str, shape: Sequence[int], like: Sequence[int]) -> list[LogicalPart]:
        """The parts of the shard's tensor ``key``, which has this ``shape``, with the full names of their logical
        tensors. ``like``: the shape of the parameter. Raises RestoreError for state of another shape."""
        if key in (PARAM, DATA):
            return [self._named(self.param + part.name, part) for part in self.parts]
        kind, _, name = key.partition("/")
        if not kind.startswith(STATE) or not name:
            raise RestoreError(f"tensor {key!r} of a shard is neither a parameter nor optimizer state")
        if math.prod(shape) == 1 and tuple(shape) != tuple(like):
            return [LogicalPart(self.state.format(name).rstrip("."), tuple(shape), Box.whole(shape), 0)]
        if tuple(shape) != tuple(like):
            raise RestoreError(
                f"optimizer state {name!r} of the shape {tuple(shape)}, where the parameter has {tuple(like)}: how it "
                "is cut in another layout is not known; numbers, and what is as large as the parameter, are allowed"
            )
        return [self._named(self.state.format(name) + part.name, part) for part in self.parts]

    @staticmethod
    def _named(name: str, part: LogicalPart) -> LogicalPart:
        return LogicalPart(name, part.whole, part.box, part.begin, part.padded)

    def plain(self) -> list[Any]:
        return [self.param, self.state, [part.plain() for part in self.parts]]

    @staticmethod
    def from_plain(plain: Sequence[Any]) -> ShardParts:
        param, state, parts = plain
        return ShardParts(str(param), str(state), tuple(LogicalPart.of(part) for part in parts))


Description = Mapping[str, ShardParts]
"""The descriptions of all shards, by name."""


@dataclass(frozen=True, slots=True)
class ShardedParts:
    """The parts of a tensor that is sharded among the replicas of a job, for any number of replicas.

    Attributes:
        rule: how it is sharded; it has one dimension.
        whole: its parts without that sharding.
        each: number of ranks of a replica that share it with those of other replicas (several with context and expert
            parallelism).
    """

    rule: TensorRule
    whole: ShardParts
    each: int = 1


def sharded_description(tensors: Iterable[ShardedParts], replicas: int) -> Description:
    """The description of all shards of this many ``replicas``, at all places; their parts in memory order."""
    found: dict[str, list[LogicalPart]] = {}
    of: dict[str, ShardParts] = {}
    for tensor in tensors:
        size = replicas * tensor.each
        owners = tensor.rule.owners(size)
        for place in owners[:1] if tensor.rule.shared else owners:  # what is shared lies alike at all of them
            shard = tensor.rule.shard_at(place, size)
            of.setdefault(shard, tensor.whole)
            parts = found.setdefault(shard, [])
            for stored in tensor.rule.parts(place, size):
                (low,), (high,) = stored.box.low, stored.box.high
                parts += [
                    LogicalPart(part.name, part.whole, part.box, stored.at + part.begin - low, part.padded)
                    for part in ranged(tensor.whole.parts, low, high)
                ]
    return {
        shard: ShardParts(of[shard].param, of[shard].state, tuple(sorted(parts, key=lambda part: part.begin)))
        for shard, parts in found.items()
    }


def ranged(parts: Iterable[LogicalPart], low: int, high: int) -> Iterator[LogicalPart]:
    """What elements ``low`` up to ``high`` of a flattened tensor are of that consists of these ``parts``; where they
    begin is counted in the whole tensor."""
    for part in parts:
        at = max(low, part.begin)
        for box in flat_boxes(part.box, low - part.begin, high - part.begin):
            yield LogicalPart(part.name, part.whole, box, at, part.padded)
            at += box.size


def spaces(parts: Mapping[str, Sequence[tuple[LogicalPart, int]]]) -> Iterator[Space]:
    """The logical tensors by name. ``parts``: (part, bytes of an element) of each of them.

    Raises RestoreError where two parts say different things of their tensor.
    """
    for name, some in parts.items():
        kinds = {(part.whole, itemsize) for part, itemsize in some}
        if len(kinds) > 1:
            shown = " and ".join(sorted(f"{shape} of {itemsize} bytes" for shape, itemsize in kinds))
            raise RestoreError(f"logical tensor {name!r} is {shown} at once")
        ((shape, itemsize),) = kinds
        yield Space(name, shape, itemsize)


def fitted(part: LogicalPart, whole: tuple[int, ...]) -> LogicalPart | None:
    """``part`` of a tensor that may be padded otherwise, as one of the tensor of the shape ``whole``: what is in both;
    None: nothing is. Raises RestoreError if the shapes differ, and it is not padded."""
    if part.whole == whole:
        return part
    if not part.padded or len(part.whole) != len(whole):
        raise RestoreError(f"logical tensor {part.name!r} has the shape {part.whole} here and {whole} there")
    common = part.box & Box.whole(whole)
    return None if common is None else LogicalPart(part.name, whole, common, part.begin, True)

"""How a tensor is sharded among ranks, as a rule that holds for any number of them. Pure.

A rule needs no model and no framework, so it can be written into a checkpoint: a job that reads that one later, in
whatever size, knows from the rules which box of which tensor is in which rank's files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any

from flashrecovery.plan.reshard.boxes import Space
from flashrecovery.plan.reshard.layouts import Placement
from flashrecovery.plan.reshard.placements import KINDS, FlatBuffer, Pattern, StoredBox


class Naming(str, Enum):
    """What follows the beginning of a shard's name."""

    PLACE = "place"
    """A place and the size, as ``1/4``: each place has its own shard."""
    PLACE_UNLESS_ALONE = "place_unless_alone"
    """The same; and where there is one place, the name ends before its ``#``."""
    SIZE = "size"
    """The size: all places have one shard, which is the same on them."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor.

    Attributes:
        name: the same in all sizes.
        shape: without any sharding.
        itemsize: bytes of an element.
        pattern: how it is sharded.
        shard: what the names of the shards begin with in which the places have their parts.
        key: of the part among the tensors of these shards. Several tensors of different rules may lie in one.
        naming: how the names of the shards go on.
        turn: where an optimizer has state of this shard: it numbers those that a place has in the order of this
            number. -1: their numbers are the same at all places. Each optimizer has its own numbers.
        content: a digest of what lies in the tensor, one after another, where its name does not say it (several
            parameters, end to end). A tensor of another content is another tensor, however alike they lie.
        suffix: how the names of the shards end, where several groups of ranks divide tensors of one name among
            themselves, each its own.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    pattern: Pattern
    shard: str
    key: str
    naming: Naming = Naming.PLACE
    turn: int = -1
    content: str = ""
    suffix: str = ""

    @property
    def space(self) -> Space:
        return Space(self.name, self.shape, self.itemsize)

    @property
    def shared(self) -> bool:
        """All places have one shard."""
        return self.naming is Naming.SIZE

    @property
    def home(self) -> tuple[str, str]:
        """What the names of its shards begin with, and end with: tensors that have it alike are in the same shards."""
        return self.shard, self.suffix

    def owners(self, size: int) -> list[int]:
        """The places that have its shards."""
        return [place for place in range(size) if self.shard_at(place, size)]

    @property
    def of_optimizer(self) -> bool:
        """It is optimizer state, which is not there before the first step."""
        return self.key.startswith("state")

    def shard_at(self, place: int, size: int) -> str:
        """The name of the shard; "" if the place has none."""
        counted = self.pattern.counted(place, size)
        if counted is None:
            return ""
        number, among = counted
        end = f",{self.suffix}" if self.suffix else ""
        if self.naming is Naming.SIZE:
            return f"{self.shard}{among}{end}"
        if self.stored(place, size) is None:
            return ""
        if self.naming is Naming.PLACE_UNLESS_ALONE and among == 1:
            return self.shard.rpartition("#")[0] + (f"#{self.suffix}" if self.suffix else "")
        return f"{self.shard}{number}/{among}{end}"

    def parts(self, place: int, size: int) -> Sequence[StoredBox]:
        """What a place has of it; it may be nothing."""
        return self.pattern.parts(self.shape, place, size)

    def stored(self, place: int, size: int) -> tuple[int, ...] | None:
        """The shape of what a place stores, padding included; None: it has no shard."""
        return self.pattern.stored(self.shape, place, size)

    def placement(self, size: int) -> Placement:
        """On the places of a job of this size. Tensors that lie alike have one object."""
        return _placement(self.shape, self.pattern, size)


@lru_cache(maxsize=4096)
def _placement(shape: tuple[int, ...], pattern: Pattern, size: int) -> Placement:
    return pattern.placement(shape, size)


def by_shard(rules: Iterable[TensorRule]) -> Mapping[tuple[str, str], Sequence[TensorRule]]:
    """The tensors of each shard, by what its names begin and end with, in their order."""
    found: dict[tuple[str, str], list[TensorRule]] = defaultdict(list)
    for rule in rules:
        found[rule.home].append(rule)
    return found


def shards_at(rules: Iterable[TensorRule], place: int, size: int) -> dict[str, bool]:
    """The names of the shards that a place has, each with whether all places have it, in their order."""
    names = ((rule.shard_at(place, size), rule.shared) for rule in rules)
    return {name: shared for name, shared in names if name}


def unlike(ours: Sequence[TensorRule], theirs: Sequence[TensorRule]) -> list[str]:
    """The names of the tensors that are not the same by both, optimizer state that only one of them has left out."""
    own, other = ({rule.name: rule for rule in rules} for rules in (ours, theirs))
    alone = [name for one, two in ((own, other), (other, own)) for name in one.keys() - two.keys()]
    names = {name for name in alone if not (own.get(name) or other[name]).of_optimizer}
    return sorted(names | {name for name in own.keys() & other.keys() if own[name] != other[name]})


# -- as plain values --------------------------------------------------------------------------------

_KINDS: Mapping[str, Any] = {**KINDS, "flat_buffer": FlatBuffer}
_NAME_OF = {kind: name for name, kind in _KINDS.items()}
_REFERENCES = ("buffer", "range", "of")
"""Attributes of patterns that are patterns or buffers themselves."""


def to_plain(rules: Sequence[TensorRule]) -> tuple[list[Any], list[Any]]:
    """A table of patterns, and the rules, as numbers and words. What several have in common stands there once."""
    table: list[Any] = []
    known: dict[Any, int] = {}

    def number_of(thing: Any) -> int:
        if thing not in known:
            values = [(field.name, getattr(thing, field.name)) for field in fields(thing)]
            plain = [number_of(value) if name in _REFERENCES else value for name, value in values]
            known[thing] = len(table)
            table.append((_NAME_OF[type(thing)], *plain))
        return known[thing]

    rows = [
        (
            *(r.name, r.shape, r.itemsize, number_of(r.pattern), r.shard, r.key, r.naming.value, r.turn, r.content),
            *([r.suffix] if r.suffix else []),
        )
        for r in rules
    ]
    return table, rows


def from_plain(table: Sequence[Any], rows: Sequence[Any]) -> tuple[TensorRule, ...]:
    """Raises ValueError, KeyError or TypeError if that is not what :func:`to_plain` gives."""
    things: dict[int, Any] = {}
    for kind, *plain in table:
        names = [field.name for field in fields(_KINDS[kind])]
        values = [things[v] if name in _REFERENCES else v for name, v in zip(names, plain, strict=True)]
        things[len(things)] = _KINDS[kind](*values)
    return tuple(
        TensorRule(name, shape, itemsize, things[pattern], shard, key, Naming(naming), turn, content, *suffix)
        for name, shape, itemsize, pattern, shard, key, naming, turn, content, *suffix in rows
    )

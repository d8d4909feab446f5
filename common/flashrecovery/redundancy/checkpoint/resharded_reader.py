"""What another number of ranks has written: a rank's part, put together from boxes in their files.

The rules in the manifests say how each tensor lay on the ranks that wrote it, and how it lies on those that read it. A
checkpoint is then a layout whose ranks are files, and :func:`~flashrecovery.plan.reshard.plan.plan_reshard` says which
boxes come from which of them. Each rank reads its own, at most :data:`LIMIT` bytes at a time, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashrecovery.errors import RestoreError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.boxes import Box, chunks, part_with
from flashrecovery.plan.reshard.layouts import Placement, Share
from flashrecovery.plan.reshard.placements import StoredBox
from flashrecovery.plan.reshard.plan import Portion, plan_reshard
from flashrecovery.plan.reshard.rules import TensorRule, by_shard
from flashrecovery.plan.reshard.schedule import timetable
from flashrecovery.redundancy.checkpoint.blocks import StoredTensors, runs
from flashrecovery.redundancy.checkpoint.keys import tensor_prefix, writer_among
from flashrecovery.redundancy.checkpoint.manifest import Manifest, ShardEntry, StoredCheckpoint
from flashrecovery.state.exact import exact_copy
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec, encode_spec

LIMIT = 64 << 20
"""Bytes that are read at a time."""
_PLACES = "places"
"""Under which a shard's values say, by optimizer, which place its state has there."""


@dataclass(frozen=True)
class Taken:
    """An entry of a manifest, and whose it is."""

    writer: int
    entry: ShardEntry


def read_sharded(
    checkpoint: StoredCheckpoint,
    shards: Sequence[Shard],
    first: Manifest,
    rank: int,
    world: int,
    limit: int = LIMIT,
    *,
    sharing: Sharing | None = None,
) -> int:
    """Fill ``shards``, all those that ``rank`` of ``world`` ranks has by the rules in ``first``, the manifest of the
    first one of those that have shared this state. Returns how many bytes of tensors have been read. ``sharing``: the
    ranks that share it here; None: all. From here on everybody is called by his place among those.

    Raises DamagedCheckpointError if something is missing or is not what was written, and RestoreError if the ranks that
    wrote it say different things of a shard.
    """
    rules = first.rules or ()
    if not rules:
        return 0
    here = sharing or Sharing(ReplicaShape(world), (0,))
    there = first.sharing(here.model_ranks[0])
    place, size = here.place(rank), here.size
    portions = _portions(rules, there.size, place, size, limit)
    sources = {there.ranks[source]: source for source in sorted({portion.source for portion in portions} - {0})}
    path, found = checkpoint.path, checkpoint.manifests(sources)
    manifests = {0: first, **{source: found[number] for number, source in sources.items()}}
    for writer, manifest in manifests.items():
        said = (manifest.version, manifest.ranks, manifest.shape, manifest.model_ranks, manifest.rules)
        if said != (first.version, first.ranks, first.shape, first.model_ranks, rules):
            ranks = f"{there.ranks[0]} and {there.ranks[writer]}"
            raise RestoreError(
                f"checkpoint {path}: ranks {ranks} disagree on how it is sharded: its files are not all of one job"
            )
    into = _allocated(path, shards, rules, manifests, there.size, place, size)
    by_name = {rule.name: rule for rule in rules}
    mine = {rule.name: rule.parts(place, size) for rule in rules}
    stored, filled = StoredTensors(checkpoint.index), dict.fromkeys(by_name, 0)
    written: dict[tuple[str, int], _Written] = {}
    for portion in portions:
        rule = by_name[portion.tensor]
        part = _part_with(mine[rule.name], portion.box)
        target = _view(into[rule.home][rule.key], part)[portion.box.within(part.box)]
        whose = rule.name, portion.source
        if whose not in written:
            written[whose] = _Written.by(rule, portion.source, there, manifests[portion.source])
        exact_copy(target, _read(stored, written[whose], portion).view(target.dtype).view(target.shape))
        filled[rule.name] += portion.box.size
    wrong = [name for name, parts in mine.items() if filled[name] != sum(part.box.size for part in parts)]
    if wrong:
        raise RestoreError(f"checkpoint {path}: not all of {wrong[:3]} has been read")
    return stored.nbytes


def _allocated(
    path: Path,
    shards: Sequence[Shard],
    rules: Sequence[TensorRule],
    manifests: Mapping[int, Manifest],
    ranks: int,
    rank: int,
    world: int,
) -> dict[tuple[str, str], Mapping[str, torch.Tensor]]:
    """The live tensors of this rank, by what the names of their shards begin and end with, and by key: what of them is
    padding, is 0. ``ranks``: the number of ranks that wrote them."""
    of_name = {shard.name: shard for shard in shards}
    shared_out = by_shard(rules)
    turns: dict[str, set[int]] = {}
    for some in shared_out.values():
        if some[0].turn >= 0 and some[0].shard_at(rank, world):
            turns.setdefault(_optimizer(some), set()).add(some[0].turn)
    place_of = {(which, turn): place for which, of in turns.items() for place, turn in enumerate(sorted(of))}
    into: dict[tuple[str, str], Mapping[str, torch.Tensor]] = {}
    for home, some in shared_out.items():
        name = some[0].shard_at(rank, world)
        if not name:
            continue
        place = place_of.get((_optimizer(some), some[0].turn))
        spec = _spec(path, some, manifests, ranks, rank, world, place)
        live = {key: tensor.detach() for key, tensor in of_name[name].allocate(spec).items()}
        for key, tensor in live.items():
            had = sum(part.box.size for rule in some if rule.key == key for part in rule.parts(rank, world))
            if had < tensor.numel():
                tensor.zero_()
        into[home] = live
    return into


def _optimizer(rules: Sequence[TensorRule]) -> str:
    """The optimizer whose state is in a shard: the prefix of its keys; "" if there is none."""
    return next((rule.key.partition("/")[0] for rule in rules if rule.of_optimizer), "")


def _portions(rules: Sequence[TensorRule], ranks: int, rank: int, world: int, limit: int) -> list[Portion]:
    """What this rank reads, and from whose files. What several have written comes from files that it reads anyway, if
    it can."""
    sharded = [rule for rule in rules if rule.pattern.divides and rule.parts(rank, world)]
    mine: dict[tuple[Any, ...], Placement] = {}
    for rule in sharded:
        if (rule.shape, rule.pattern) not in mine:
            shares = (Share(part.box, (rank,)) for part in rule.parts(rank, world))
            mine[rule.shape, rule.pattern] = tuple(shares)
    old = {rule.name: rule.placement(ranks) for rule in sharded}
    new = {rule.name: mine[rule.shape, rule.pattern] for rule in sharded}
    plan = plan_reshard([rule.space for rule in sharded], old, new, becomes={})
    table = timetable(plan, max([limit, *(rule.itemsize for rule in rules)]))
    found = [portion for _, portion in table.messages(dest=rank)]
    read_anyway = {portion.source: None for portion in found}
    by_name = {rule.name: rule for rule in rules}
    of_shard = {by_name[portion.tensor].home: portion.source for portion in found}
    for rule in rules:
        if rule.pattern.divides or not rule.parts(rank, world):
            continue
        source = _whose(rule, ranks, [*([of_shard[rule.home]] if rule.home in of_shard else []), *read_anyway], rank)
        pieces = chunks(Box.whole(rule.shape), max(limit // rule.itemsize, 1))
        found += [Portion(rule.name, box, source, rank, box.size * rule.itemsize) for box in pieces]
    return found


def _whose(rule: TensorRule, ranks: int, preferred: Sequence[int], rank: int) -> int:
    """The rank from which this one reads state that several ranks have completely."""
    if rule.shared:
        owners = rule.owners(ranks)
        return writer_among(rule.shard_at(owners[0], ranks), owners)
    for place in preferred:
        if rule.shard_at(place, ranks):
            return place
    owners = rule.owners(ranks)
    return owners[rank % len(owners)]


def _spec(
    path: Path,
    rules: Sequence[TensorRule],
    manifests: Mapping[int, Manifest],
    ranks: int,
    rank: int,
    world: int,
    place: int | None,
) -> ShardSpec:
    """What a shard consists of here, from what those of ``ranks`` say that wrote its parts. ``place``: the number of
    its optimizer state among those of this rank, where that is not the same on all ranks."""
    known: tuple[bytes, ShardSpec] | None = None
    owners = rules[0].owners(ranks) if rules[0].shared else ()
    for writer, manifest in manifests.items():
        name = rules[0].shard_at(writer, ranks)
        if not name or (rules[0].shared and writer != writer_among(name, owners)):
            continue
        entry = manifest.entries.get(name)
        if entry is None:
            raise RestoreError(f"checkpoint {path}: place {writer} has not written {name!r}")
        spec = decode_spec(entry.spec)
        for rule in rules:
            tensor = spec.tensors.get(rule.key)
            expected = rule.stored(writer, ranks)
            if tensor is None or tensor.shape != expected or tensor.dtype.itemsize != rule.itemsize:
                raise RestoreError(f"checkpoint {path}: {rule.key!r} of {name!r} is {tensor}, and not of {expected}")
        here = ShardSpec(
            {
                rule.key: TensorSpec(shape, spec.tensors[rule.key].dtype)
                for rule in rules
                if (shape := rule.stored(rank, world)) is not None
            },
            spec.values if place is None else _at(place, spec.values),
        )
        encoded = encode_spec(here)
        if spec.tensors.keys() != here.tensors.keys() or (known is not None and known[0] != encoded):
            raise RestoreError(f"checkpoint {path}: the ranks that wrote it disagree on {rules[0].shard!r}")
        known = encoded, here
    if known is None:
        raise RestoreError(f"checkpoint {path}: no rank has written {rules[0].shard!r}")
    return known[1]


def _at(place: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a shard whose optimizer state has this place in its optimizer's."""
    if _PLACES not in values:
        return dict(values)
    return {**values, _PLACES: dict.fromkeys(values[_PLACES], place)}


def _part_with(parts: Sequence[StoredBox], box: Box) -> StoredBox:
    """The part that has ``box``. Raises RestoreError if none has all of it."""
    part = part_with(parts, box)
    if part is None:
        raise RestoreError(f"box {box} is in none of {len(parts)} parts")
    return part


def _view(tensor: torch.Tensor, part: StoredBox) -> torch.Tensor:
    """Where a part lies."""
    if part.box.shape == tuple(tensor.shape):
        return tensor
    return tensor.view(-1)[part.at : part.at + part.box.size].view(part.box.shape)


@dataclass(frozen=True)
class _Written:
    """What a rank has written of a tensor: its parts, and of that in which they lie the key, the bytes and the digests
    of its blocks."""

    parts: Sequence[StoredBox]
    itemsize: int
    key: str
    total: int
    known: bytes

    @staticmethod
    def by(rule: TensorRule, writer: int, there: Sharing, manifest: Manifest) -> _Written:
        """``writer``: the place of the rank of which the manifest is."""
        name = rule.shard_at(writer, there.size)
        entry = manifest.entries[name]
        return _Written(
            rule.parts(writer, there.size),
            rule.itemsize,
            f"{tensor_prefix(name, entry.shared, there.ranks[writer])}{rule.key}",
            math.prod(rule.stored(writer, there.size) or ()) * rule.itemsize,
            entry.blocks.get(rule.key, b""),
        )


def _read(stored: StoredTensors, of: _Written, portion: Portion) -> torch.Tensor:
    """The bytes of a portion."""
    part = _part_with(of.parts, portion.box)
    found = [
        stored.read(of.key, (part.at + start) * of.itemsize, (part.at + stop) * of.itemsize, of.total, of.known)
        for start, stop in runs(portion.box, part.box)
    ]
    data = found[0] if len(found) == 1 else bytearray().join(found)
    return torch.frombuffer(data, dtype=torch.uint8)

"""What another number of ranks has written: a rank's part, put together from boxes in their files.

The rules in the manifests say how each tensor lay on the ranks that wrote it, and how it lies on those that read it. A
checkpoint is then a layout whose ranks are files, and :func:`~flashrecovery.plan.reshard.plan_reshard` says which boxes
come from which of them. Each rank reads its own, at most :data:`LIMIT` bytes at a time, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashrecovery.errors import RestoreError
from flashrecovery.plan.boxes import Box, chunks
from flashrecovery.plan.layouts import Share
from flashrecovery.plan.reshard import Portion, plan_reshard
from flashrecovery.plan.rules import TensorRule, by_shard
from flashrecovery.plan.timetable import timetable
from flashrecovery.redundancy.blocks import StoredTensors, runs
from flashrecovery.redundancy.keys import tensor_prefix
from flashrecovery.redundancy.manifest import Manifest, ShardEntry, manifests_of
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec, encode_spec

LIMIT = 64 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Taken:
    """An entry of a manifest, and whose it is."""

    writer: int
    entry: ShardEntry


def read_divided(
    path: Path, shards: Sequence[Shard], first: Manifest, rank: int, world: int, limit: int = LIMIT
) -> int:
    """Fill ``shards``, all those that ``rank`` of ``world`` ranks has by the rules in ``first``, the manifest of rank
    0. Returns how many bytes of tensors have been read.

    Raises DamagedCheckpointError if something is missing or is not what was written, and RestoreError if the ranks that
    wrote it say different things of a shard.
    """
    rules = first.rules or ()
    if not rules:
        return 0
    portions = _portions(rules, first.ranks, rank, world, limit)
    manifests = {0: first, **manifests_of(path, sorted({portion.source for portion in portions} - {0}))}
    for writer, manifest in manifests.items():
        if (manifest.version, manifest.ranks, manifest.rules) != (first.version, first.ranks, first.rules):
            raise RestoreError(f"checkpoint {path}: ranks 0 and {writer} say different things of how it is divided")
    into: dict[str, torch.Tensor] = {}
    of_name = {shard.name: shard for shard in shards}
    for beginning, some in by_shard(rules).items():
        spec = _spec(path, beginning, some, manifests, rank, world)
        live = of_name[f"{beginning}{rank}/{world}"].allocate(spec)
        into |= {rule.name: live[rule.key].detach() for rule in some}
    by_name = {rule.name: rule for rule in rules}
    stored, filled = StoredTensors(path), dict.fromkeys(by_name, 0)
    for portion in portions:
        rule = by_name[portion.tensor]
        box = rule.box(rank, world)
        target = into[rule.name][portion.box.within(box)]
        with torch.no_grad():
            target.copy_(_read(stored, rule, portion, manifests, first.ranks).view(target.dtype).view(target.shape))
        filled[rule.name] += portion.box.size
    wrong = [name for name, rule in by_name.items() if filled[name] != rule.box(rank, world).size]
    if wrong:
        raise RestoreError(f"checkpoint {path}: not all of {wrong[:3]} has been read")
    return stored.nbytes


def _portions(rules: Sequence[TensorRule], ranks: int, rank: int, world: int, limit: int) -> list[Portion]:
    """What this rank reads, and from whose files. What everybody has written comes from files that it reads anyway."""
    divided = [rule for rule in rules if rule.rows]
    mine = {rule.shape: (Share(rule.box(rank, world), (rank,)),) for rule in divided}
    old = {rule.name: rule.placement(ranks) for rule in divided}
    new = {rule.name: mine[rule.shape] for rule in divided}
    plan = plan_reshard([rule.space for rule in divided], old, new, becomes={})
    table = timetable(plan, max([limit, *(rule.itemsize for rule in rules)]))
    found = [portion for _, portion in table.messages(dest=rank)]
    source = found[0].source if found else rank * ranks // world
    for rule in rules:
        if not rule.rows:
            pieces = chunks(Box.whole(rule.shape), max(limit // rule.itemsize, 1))
            found += [Portion(rule.name, box, source, rank, box.size * rule.itemsize) for box in pieces]
    return found


def _spec(
    path: Path, beginning: str, rules: Sequence[TensorRule], manifests: Mapping[int, Manifest], rank: int, world: int
) -> ShardSpec:
    """What a shard consists of here, from what those who wrote its parts say of them."""
    known: tuple[bytes, ShardSpec] | None = None
    for writer, manifest in manifests.items():
        name = f"{beginning}{writer}/{manifest.ranks}"
        entry = manifest.entries.get(name)
        if entry is None:
            raise RestoreError(f"checkpoint {path}: rank {writer} has not written {name!r}")
        spec = decode_spec(entry.spec)
        for rule in rules:
            tensor = spec.tensors.get(rule.key)
            expected = rule.box(writer, manifest.ranks).shape
            if tensor is None or tensor.shape != expected or tensor.dtype.itemsize != rule.itemsize:
                raise RestoreError(f"checkpoint {path}: {rule.key!r} of {name!r} is {tensor}, and not of {expected}")
        here = ShardSpec(
            {rule.key: TensorSpec(rule.box(rank, world).shape, spec.tensors[rule.key].dtype) for rule in rules},
            spec.values,
        )
        encoded = encode_spec(here)
        if len(spec.tensors) != len(rules) or (known is not None and known[0] != encoded):
            raise RestoreError(f"checkpoint {path}: the ranks that wrote it say different things of {beginning!r}")
        known = encoded, here
    assert known is not None
    return known[1]


def _read(
    stored: StoredTensors, rule: TensorRule, portion: Portion, manifests: Mapping[int, Manifest], ranks: int
) -> torch.Tensor:
    """The bytes of a portion."""
    writer = portion.source
    outer: Box = rule.box(writer, ranks)
    name = rule.shard_at(writer, ranks)
    entry = manifests[writer].entries[name]
    key = f"{tensor_prefix(name, entry.shared, writer)}{rule.key}"
    total = outer.size * rule.itemsize
    known = entry.blocks.get(rule.key, b"")
    found = [
        stored.read(key, start * rule.itemsize, stop * rule.itemsize, total, known)
        for start, stop in runs(portion.box, outer)
    ]
    data = found[0] if len(found) == 1 else bytearray().join(found)
    return torch.frombuffer(data, dtype=torch.uint8)

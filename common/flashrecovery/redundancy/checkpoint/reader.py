"""A checkpoint is read: by as many ranks as have written it, or, where an elastic job has, by any number of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashrecovery.errors import DamagedCheckpointError, RestoreError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.rules import TensorRule, shards_at, unlike
from flashrecovery.redundancy.checkpoint.dcp import read_into, unreadable
from flashrecovery.redundancy.checkpoint.keys import tensor_prefix, writer_of
from flashrecovery.redundancy.checkpoint.manifest import UNREADABLE, Manifest, StoredCheckpoint
from flashrecovery.redundancy.checkpoint.resharded_reader import Taken, read_sharded
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec, decode_spec

_MISSING = (OSError, KeyError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class PlainState:
    """What a checkpoint has besides shards: this rank's rank-local state and the common state, as they were given. No
    rank-local state: the ranks that wrote it had another layout, or were others; then ``lent`` is that of one which
    had the model rank of this one, if it was asked for and there is one."""

    local_state: bytes | None
    common: bytes
    lent: bytes | None = None


def load(
    checkpoint: StoredCheckpoint,
    shards: Sequence[Shard],
    *,
    rank: int,
    world: int,
    form: CheckpointFormat | None = None,
    elastic: bool = False,
    rules: Sequence[TensorRule] | None = None,
    sharing: Sharing | None = None,
    lend: bool = False,
) -> PlainState:
    """Write a checkpoint into the live shards of this rank. Each rank reads for itself, without a collective unless
    ``form`` has some. ``elastic``: another number of ranks may have written it, if they were an elastic job, too.
    ``rules``: how this job's state is sharded; None: that is not known. ``sharing``: the ranks among which this rank's
    state is sharded; None: all, and each of them is a replica. ``lend``: a rank's own state is that of any other one
    with its model rank.

    Raises DamagedCheckpointError if the checkpoint is not whole or does not have its digests, RestoreError if it was
    written by another world, by another model (the shards that differ are named) or in another format.

    Of what ranks of another layout have written, ``form`` alone decides; there are no digests for it.
    """
    path, first = checkpoint.path, checkpoint.first
    _check_format(path, first, form)
    here = Sharing.of_rank(ReplicaShape(world), rank) if sharing is None else sharing
    of = here.shape
    if elastic and form is None:
        _check_replicas(path, first, of)
        first = _of_first(checkpoint, here)
    _check_rules(path, rules, first.rules)
    if form is not None and _other_layout(first, form):
        form.load(path.parent, path.name)
        return PlainState(None, first.common)
    if first.ranks != world:
        if not elastic or form is not None:
            raise RestoreError(
                f"checkpoint {path} was written by {first.ranks} ranks, this job has {world}: launch it with as "
                "many, or as an elastic job (--elastic)"
            )
        read = _load_resized(checkpoint, shards, first, rank, here)
        return replace(read, lent=_local_state_at(checkpoint, first, of.model_rank(rank))) if lend else read
    manifests = checkpoint.manifests(sorted({rank, *map(writer_of, shards)}))
    mine = manifests[rank]
    if mine.local_state is None and not elastic:
        raise RestoreError(
            f"checkpoint {path} has been converted from another number of ranks, and so it has no rank's own random "
            "numbers and data position: an elastic job can go on from it"
        )
    entries = {
        name: Taken(writer, entry)
        for writer, manifest in manifests.items()
        for name, entry in manifest.entries.items()
        if entry.shared or writer == rank
    }
    _check_names(path, {s.name for s in shards}, entries, rank)
    live = _read_tensors(checkpoint, shards, entries) if form is None else _load_as(form, path, shards)
    _check_digests(path, live, entries)
    return PlainState(mine.local_state, mine.common)


def _check_replicas(path: Path, first: Manifest, here: ReplicaShape) -> None:
    """What ranks of the same model rank have must be the same pieces of the model."""
    if here.unlike(first.shape):
        raise RestoreError(
            f"checkpoint {path} was written by {first.shape.text} (inner {first.shape.inner}), and this job has "
            f"{here.text} (inner {here.inner}): another number of the same replicas can read it"
        )


def _of_first(checkpoint: StoredCheckpoint, here: Sharing) -> Manifest:
    """The manifest of the first of those that have the model rank of this one, or share the state with it."""
    number = Sharing(checkpoint.first.shape, here.model_ranks).ranks[0]
    found = checkpoint.manifests([number])[number]
    there = found.sharing(here.model_ranks[0])
    if there.model_ranks != here.model_ranks and found.rules:
        raise RestoreError(
            f"checkpoint {checkpoint.path}: its state was sharded among the model ranks {list(there.model_ranks)} "
            f"together, and this job's is among {list(here.model_ranks)}: the same kinds of "
            "parallelism within a replica can read it"
        )
    return found


def _local_state_at(checkpoint: StoredCheckpoint, first: Manifest, model_rank: int) -> bytes | None:
    """That of the first rank of those that stood there. ``first``: any manifest."""
    number = Sharing(first.shape, (model_rank,)).ranks[0]
    return checkpoint.manifests([number])[number].local_state


def _load_resized(
    checkpoint: StoredCheckpoint, shards: Sequence[Shard], first: Manifest, rank: int, here: Sharing
) -> PlainState:
    """The part of this rank of what another number of ranks has written: boxes of what was sharded among them, and of
    all else one of the copies. ``first``: the manifest of the first of those that share its state with it."""
    path, rules, there = checkpoint.path, first.rules or (), first.sharing(here.model_ranks[0])
    sharded = {*shards_at(rules, here.place(rank), here.size)}
    _check_names(path, sharded, {s.name: None for s in shards}, rank, "this job has no")
    parts = [s for s in shards if s.name in sharded]
    others = [s for s in shards if s.name not in sharded]
    if others:
        manifests = checkpoint.manifests(range(first.ranks))
        known = {name for place in range(there.size) for name in shards_at(rules, place, there.size)}
        entries = {
            name: Taken(writer, entry)
            for writer, manifest in manifests.items()
            for name, entry in manifest.entries.items()
            if name not in known
        }
        if first.rules is None and not {s.name for s in others} <= entries.keys():
            raise RestoreError(
                f"checkpoint {path} was written by {first.ranks} ranks, and this job has {here.shape.world}: how its "
                "state is sharded in another size has not been written down with it; elastic jobs do that"
            )
        _check_names(path, {s.name for s in others}, entries, rank)
        _check_digests(path, _read_tensors(checkpoint, others, entries), entries)
    read_sharded(checkpoint, parts, first, rank, here.shape.world, sharing=here)
    return PlainState(None, first.common)


def checkpoint_layout_mismatch(checkpoint: StoredCheckpoint, form: CheckpointFormat) -> str:
    """The layout of the ranks that wrote a checkpoint, if ``form`` has another one now and can load it; else
    "". It is the same on all ranks. Raises RestoreError if it cannot be read."""
    return _other_layout(checkpoint.first, form) if form.layout() else ""


def _other_layout(first: Manifest, form: CheckpointFormat) -> str:
    mine = form.layout()
    return "" if not mine or first.layout == mine else first.layout


_Live = dict[str, tuple[ShardSpec, list[torch.Tensor]]]


def _read_tensors(checkpoint: StoredCheckpoint, shards: Sequence[Shard], entries: Mapping[str, Taken]) -> _Live:
    wanted: dict[str, torch.Tensor] = {}
    live: _Live = {}
    for shard in shards:
        taken = entries[shard.name]
        spec = decode_spec(taken.entry.spec)
        allocated = shard.allocate(spec)
        live[shard.name] = spec, [allocated[key].detach() for key in spec.tensors]
        prefix = tensor_prefix(shard.name, taken.entry.shared, taken.writer)
        wanted.update(zip((f"{prefix}{key}" for key in spec.tensors), live[shard.name][1], strict=True))
    try:
        read_into(wanted, checkpoint.index)
    except UNREADABLE as e:
        where = unreadable(list(wanted), checkpoint.path, UNREADABLE)
        raise DamagedCheckpointError(f"checkpoint {checkpoint.path} cannot be read: {where}{e}") from e
    return live


def _check_digests(path: Path, live: _Live, entries: Mapping[str, Taken]) -> None:
    wrong = [
        name for name, (spec, tensors) in live.items() if shard_digest(tensors, spec) != entries[name].entry.digest
    ]
    if wrong:
        raise DamagedCheckpointError(
            f"checkpoint {path}: {_some(wrong)} do not have the digests they were written with"
        )


def _load_as(form: CheckpointFormat, path: Path, shards: Sequence[Shard]) -> _Live:
    try:
        form.load(path.parent, path.name)
    except _MISSING as e:
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {type(e).__name__}: {e}") from e
    return {s.name: (s.spec(), [t.detach() for t in s.tensors().values()]) for s in shards}


def _check_format(path: Path, manifest: Manifest, form: CheckpointFormat | None) -> None:
    if manifest.form != ("" if form is None else form.name):
        raise RestoreError(
            f"checkpoint {path} has the format {manifest.form or 'of the core'!r}, which this job does not use: "
            "elastic jobs read and write the core's, and all others that of their framework, if it has one"
        )


def _check_rules(path: Path, mine: Sequence[TensorRule] | None, found: Sequence[TensorRule] | None) -> None:
    """What lies alike, and has the same name, need not be the same."""
    other = [] if mine is None or found is None else unlike(mine, found)
    if other:
        raise RestoreError(
            f"checkpoint {path} is of another model, or of one whose state is sharded otherwise (parameters of other "
            f"names, shapes or order, other buckets): {_some(other, 'tensors')} differ"
        )


def _check_names(
    path: Path, mine: set[str], found: Mapping[str, Taken | None], rank: int, lacks: str = "it lacks"
) -> None:
    missing = sorted(mine - found.keys())
    if missing:
        surplus = sorted(n for n in found.keys() - mine if (one := found[n]) is not None and not one.entry.shared)
        also = f"; it has {_some(surplus)} instead" if surplus else ""
        raise RestoreError(f"checkpoint {path} is of another model: {lacks} {_some(missing)} of rank {rank}{also}")


def _some(names: Sequence[str], kind: str = "shards") -> str:
    shown = ", ".join(repr(n) for n in names[:3])
    return f"{kind} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")

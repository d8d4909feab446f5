"""The last resort: everything on disk, seldom, asynchronously, with torch.distributed.checkpoint (DCP).

Saving needs no collective, so a failure in the middle cannot hang it and it cannot hang a recovery. Some place
announces a version (see :mod:`flashrecovery.plan.interval`); every rank that commits it copies its part to host memory
(``k0``, the only time training is held up) and writes it in the background as a DCP checkpoint of its own,
``.pending-<version>.<generation>/ part-<rank>/``. The rank that finds all parts durable joins their metadata, renames
the directory to ``step-<version>`` and points ``latest`` at it; both are atomic, so a half-written checkpoint is never
found. Only the newest ``keep`` stay.

The published directory is one ordinary DCP checkpoint. Keys: ``rank<r>/<shard>/<tensor>`` for what only rank
r holds, ``shared/<shard>/<tensor>`` for replicated shards, written once by one of their holders (spread over
the holders by name), and ``manifest/<r>``: structure, small values and digests of what rank r wrote, its
capsule, the common state. The directory must be on storage that all ranks share.

A framework's own format (:class:`~flashrecovery.contract.CheckpointFormat`) takes the place of the tensors; the
manifests with their digests stay, so that a load is verified like any other. It may write DCP checkpoints into further
subdirectories ``<name>-<rank>``, which become parts of the one. It may be able to load what ranks of another layout
have written: then model and optimizer, and no rank's own state.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from flashrecovery.errors import (
    ConfigError,
    DamagedCheckpointError,
    FlashRecoveryError,
    RestoreError,
)
from flashrecovery.plan.rules import TensorRule
from flashrecovery.redundancy import blocks
from flashrecovery.redundancy.background import Background
from flashrecovery.redundancy.dcp import join_parts, read_into, unreadable, write_part
from flashrecovery.redundancy.host import HostCopies, LaterCopies
from flashrecovery.redundancy.manifest import (
    INDEX_DIGEST,
    UNREADABLE,
    Manifest,
    ShardEntry,
    as_tensor,
    index_digest,
    manifest_key,
    manifests_of,
)
from flashrecovery.redundancy.resized import Taken, read_divided, tensor_prefix
from flashrecovery.runtime.durable import write_durably
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec, decode_spec, encode_spec

_LATEST = "latest"
_DONE = "done-{}"
_MISSING = (OSError, KeyError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Published:
    """A checkpoint that has become visible. ``seconds`` from its commit; ``k0_s`` training was held up on
    this rank.
    """

    version: int
    path: Path
    seconds: float
    k0_s: float


@dataclass(frozen=True)
class PlainState:
    """What a checkpoint has besides shards: this rank's capsule and the common state, as they were given. No capsule:
    the ranks that wrote it had another layout."""

    capsule: bytes | None
    common: bytes


@dataclass(frozen=True)
class _Part:
    """Which rank's part of a checkpoint it is, of how many, and what its manifest has besides shards. All of it is as
    it was at the commit: an elastic job may change its size while the part is being written."""

    rank: int
    world: int
    capsule: bytes | None
    common: bytes
    rules: tuple[TensorRule, ...] | None


class CheckpointFallback:
    """Writes this rank's parts. ``commit`` belongs to the training thread; the callbacks run in the writing
    thread.

    Args: directory: where checkpoints go; made if it does not exist. rank, world: this rank and the world
        size. keep: published checkpoints to keep, >= 1. form: the framework's own, None for the core's.
        on_published: called on the one rank that published. on_error: called with what writing has raised (disk
        full, ...); training goes on, this checkpoint is lost.

    Raises ConfigError if the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world: int,
        keep: int = 2,
        form: CheckpointFormat | None = None,
        on_published: Callable[[Published], None] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._rank, self._world, self._keep = rank, world, keep
        self._form = form
        self._on_published = on_published
        self._on_error = on_error
        self._background = Background("flashrecovery-checkpoint")
        self._announced: tuple[int, int] | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".probe-{rank}"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise ConfigError(f"checkpoint.dir = {str(directory)!r} cannot be written: {e.strerror}") from e

    def announce(self, version: int, generation: int) -> None:
        """Take a checkpoint when ``version`` is committed in ``generation``. Any thread. Too late is harmless: see
        :mod:`flashrecovery.plan.interval`.
        """
        self._announced = version, generation

    @property
    def announced(self) -> int | None:
        """The version of which the next checkpoint is to be; None if it has not been announced yet."""
        return None if self._announced is None else self._announced[0]

    def resize(self, rank: int, world: int) -> None:
        """From the next checkpoint on this is ``rank`` of ``world`` ranks."""
        self._rank, self._world = rank, world

    def withdraw(self, generation: int) -> None:
        """Training goes on in ``generation``: not every rank knows of what was announced in an earlier one. What has
        been announced in this one counts, although it has come here before the news of it."""
        announced = self._announced
        if announced is not None and announced[1] < generation:
            self._announced = None

    def due(self, version: int) -> bool:
        """True if ``version`` is the announced one and no earlier checkpoint is still being written."""
        announced = self.announced
        if announced is None or announced > version:
            return False
        self._announced = None
        return announced == version and not self._background.busy

    def commit(
        self,
        version: int,
        shards: Sequence[Shard],
        *,
        capsule: bytes | None,
        common: bytes,
        generation: int,
        rules: tuple[TensorRule, ...] | None = None,
    ) -> float:
        """The live state is ``version``: copy this rank's part of it, and write it in the background.

        Returns k0, the seconds this took of training. The previous checkpoint must have been written
        (:meth:`due`). ``rules``: how what is divided among the ranks is divided in any number of them, and all else is
        the same on all ranks; None: that is not so.
        """
        began = time.monotonic()
        mine = [s for s in shards if writer_of(s) == self._rank]
        specs = {s.name: s.spec() for s in mine}
        copy = HostCopies()
        tensors = {tensor_key(s, key): copy(t) for s in mine for key, t in s.tensors().items()}
        write = None if self._form is None else self._form.capture(self.directory, _name(version), copy)
        k0_s = time.monotonic() - began
        owned = [(s.name, len(s.holders) > 1, specs[s.name]) for s in mine]

        of = _Part(self._rank, self._world, capsule, common, rules)

        def job() -> None:
            self._write(version, generation, owned, tensors, write, of, began, k0_s)

        self._submit(job)
        return k0_s

    def _submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the background; what it raises is told to ``on_error``."""

        def told() -> None:
            try:
                job()
            except (OSError, RuntimeError, FlashRecoveryError) as e:
                if self._on_error is None:
                    raise
                self._on_error(e)

        self._background.submit(told)

    def commit_copy(
        self,
        version: int,
        shards: Sequence[Shard],
        copy: Callable[[], Callable[[str], ShardSource] | None],
        release: Callable[[], None],
        *,
        capsule: bytes,
        common: bytes,
        generation: int,
        rules: tuple[TensorRule, ...] | None = None,
    ) -> None:
        """Like :meth:`commit`, from a copy of ``version`` that is being made anyway: training is held up only for what
        a framework's own format has besides the shards.

        ``shards``: those of the copy. ``copy``: waits for it, in the background; gives each shard's content by name,
        None if there is none. ``release``: called when it has been written.
        """
        began = time.monotonic()
        mine = [(s.name, len(s.holders) > 1) for s in shards if writer_of(s) == self._rank]  # they may get other names
        later, write, k0_s = None, None, 0.0
        if self._form is not None:
            later = LaterCopies(shards)
            write = self._form.capture(self.directory, _name(version), later)
            k0_s = time.monotonic() - began
        of = _Part(self._rank, self._world, capsule, common, rules)

        def job() -> None:
            try:
                content = copy()
                if content is None:
                    return  # the other ranks' parts are swept away by the next one
                found = {name: content(name) for name, _ in mine}
                tensors = {
                    f"{tensor_prefix(name, shared, of.rank)}{key}": tensor
                    for name, shared in mine
                    for key, tensor in zip(found[name].spec.tensors, found[name].tensors, strict=True)
                }
                owned = [(name, shared, found[name].spec) for name, shared in mine]
                if later is not None:
                    later.fill(content)
                self._write(version, generation, owned, tensors, write, of, began, k0_s)
            finally:
                release()

        self._submit(job)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when nothing is being written. Raises what writing has raised if there is no ``on_error``."""
        done = self._background.wait(timeout_s)
        error = self._background.error
        if error is not None:
            self._background.clear_error()
            raise error
        return done

    def close(self, timeout_s: float) -> bool:
        """Let the part under way be finished, at most ``timeout_s``; an unfinished one is never published."""
        return self._background.close(timeout_s)

    # -- in the background thread -----------------------------------------------------------------

    def _write(
        self,
        version: int,
        generation: int,
        owned: list[tuple[str, bool, ShardSpec]],
        tensors: dict[str, torch.Tensor],
        write: Callable[[Path], None] | None,
        of: _Part,
        began: float,
        k0_s: float,
    ) -> None:
        rules = of.rules if write is None else None  # a framework's format is divided in its own way
        divided = {rule.shard_at(of.rank, of.world) for rule in rules or ()}
        entries = {}
        for name, shared, spec in owned:
            prefix = tensor_prefix(name, shared, of.rank)
            digest = shard_digest([tensors[f"{prefix}{key}"] for key in spec.tensors], spec)
            of_blocks = {}
            for key in spec.tensors if name in divided else ():
                tensors[f"{prefix}{key}"] = tensors[f"{prefix}{key}"].contiguous()  # as it will lie in the file
                of_blocks[key] = blocks.digests(tensors[f"{prefix}{key}"])
            entries[name] = ShardEntry(shared, encode_spec(spec), digest, of_blocks)
        form = ("", "") if self._form is None else (self._form.name, self._form.layout())
        manifest = Manifest(version, of.world, entries, of.capsule, of.common, *form, rules)
        pending = self.directory / f".pending-{version}.{generation}"
        part = pending / f"part-{of.rank}"
        try:
            if part.exists():  # of the same generation and version: cannot be, unless the file system is slow
                shutil.rmtree(part)
            part.mkdir(parents=True)
            if write is not None:
                write(pending)
                tensors = {}
            write_part({**tensors, manifest_key(of.rank): as_tensor(manifest.encode())}, part)
            write_durably(pending / _DONE.format(of.rank), b"")
            complete = all((pending / _DONE.format(r)).exists() for r in range(of.world))
        except FileNotFoundError:
            return  # a newer checkpoint has been published meanwhile and has swept this one away
        if complete and self._publish(pending, version, of.world) and self._on_published is not None:
            path = self.directory / _name(version)
            self._on_published(Published(version, path, time.monotonic() - began, k0_s))

    def _publish(self, pending: Path, version: int, world: int) -> bool:
        """True if this rank published; two may find all parts durable at once."""
        try:
            os.close(os.open(pending / "publisher", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        ranks = {str(r) for r in range(world)}  # no leftover of a larger world
        found = sorted(p.parent.name for p in pending.glob("*/.metadata"))
        join_parts(pending, [name for name in found if name.rpartition("-")[2] in ranks])
        write_durably(pending / INDEX_DIGEST, index_digest(pending))
        final = self.directory / _name(version)
        if final.exists():  # the same step again after a recovery, or another run's leftover
            replaced = pending.with_name(f"{pending.name}.replaced")
            os.rename(final, replaced)
        os.rename(pending, final)
        write_durably(self.directory / _LATEST, final.name.encode())
        self._sweep(version)
        return True

    def _sweep(self, version: int) -> None:
        """Drop what is older than the newest ``keep``, and what was never completed. Later versions in the
        directory are another run's, and none of our business."""
        older = sorted(v for v in _published(self.directory) if v <= version)
        for old in older[: -self._keep]:
            shutil.rmtree(self.directory / _name(old), ignore_errors=True)
        for pending in self.directory.glob(".pending-*"):
            number = pending.name.removeprefix(".pending-").split(".")[0]
            if number.isdigit() and int(number) <= version:
                shutil.rmtree(pending, ignore_errors=True)


# -- reading ------------------------------------------------------------------------------------------


def published(directory: Path) -> list[tuple[int, Path]]:
    """Version and path of the newest published checkpoint and those before it, the oldest first."""
    last = newest(directory)
    older = sorted(_published(directory)) if last is not None else []
    return [(v, Path(directory) / _name(v)) for v in older if last is not None and v <= last[0]]


def newest(directory: Path) -> tuple[int, Path] | None:
    """Version and path of the newest published checkpoint, or None."""
    directory = Path(directory)
    versions = _published(directory) if directory.is_dir() else []
    try:
        named = _version_of((directory / _LATEST).read_text())
    except OSError:
        named = None
    version = named if named in versions else max(versions, default=None)
    return None if version is None else (version, directory / _name(version))


def load(
    path: Path,
    shards: Sequence[Shard],
    *,
    rank: int,
    world: int,
    form: CheckpointFormat | None = None,
    elastic: bool = False,
) -> PlainState:
    """Write a checkpoint into the live shards of this rank. Each rank reads for itself, without a collective unless
    ``form`` has some. ``elastic``: another number of ranks may have written it, if they were an elastic job, too.

    Raises DamagedCheckpointError if the checkpoint is not whole or does not have its digests, RestoreError if it was
    written by another world, by another model (the shards that differ are named) or in another format.

    Of what ranks of another layout have written, ``form`` alone decides; there are no digests for it.
    """
    path = Path(path)
    (first,) = manifests_of(path, [0]).values()
    _check_format(path, first, form)
    if form is not None and _other_layout(first, form):
        form.load(path.parent, path.name)
        return PlainState(None, first.common)
    if first.ranks != world:
        if not elastic or form is not None:
            raise RestoreError(f"checkpoint {path} was written by {first.ranks} ranks, this job has {world}")
        return _load_resized(path, shards, first, rank, world)
    manifests = manifests_of(path, sorted({rank, *map(writer_of, shards)}))
    mine = manifests[rank]
    if mine.capsule is None and not elastic:
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
    live = _read_tensors(path, shards, entries) if form is None else _load_as(form, path, shards)
    _check_digests(path, live, entries)
    return PlainState(mine.capsule, mine.common)


def _load_resized(path: Path, shards: Sequence[Shard], first: Manifest, rank: int, world: int) -> PlainState:
    """The part of this rank of what another number of ranks has written: boxes of what was divided among them, and of
    all else one of the copies."""
    rules = first.rules or ()
    divided = {rule.shard_at(rank, world) for rule in rules}
    _check_names(path, divided, {s.name: None for s in shards}, rank, "this job has no")
    parts = [s for s in shards if s.name in divided]
    others = [s for s in shards if s.name not in divided]
    if others:
        manifests = manifests_of(path, range(first.ranks))
        known = {rule.shard_at(place, first.ranks) for rule in rules for place in range(first.ranks)}
        entries = {
            name: Taken(writer, entry)
            for writer, manifest in manifests.items()
            for name, entry in manifest.entries.items()
            if name not in known
        }
        if first.rules is None and not {s.name for s in others} <= entries.keys():
            raise RestoreError(
                f"checkpoint {path} was written by {first.ranks} ranks, and this job has {world}: how its state is "
                "divided in another size has not been written down with it; elastic jobs do that"
            )
        _check_names(path, {s.name for s in others}, entries, rank)
        _check_digests(path, _read_tensors(path, others, entries), entries)
    read_divided(path, parts, first, rank, world)
    return PlainState(None, first.common)


def other_layout(path: Path, form: CheckpointFormat) -> str:
    """In words, the layout of the ranks that wrote a checkpoint, if ``form`` has another one now and can load it; else
    "". It is the same on all ranks. Raises RestoreError if it cannot be read."""
    if not form.layout():
        return ""
    (first,) = manifests_of(Path(path), [0]).values()
    return _other_layout(first, form)


def _other_layout(first: Manifest, form: CheckpointFormat) -> str:
    mine = form.layout()
    return "" if not mine or first.layout == mine else first.layout


_Live = dict[str, tuple[ShardSpec, list[torch.Tensor]]]


def _read_tensors(path: Path, shards: Sequence[Shard], entries: Mapping[str, Taken]) -> _Live:
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
        read_into(wanted, path)
    except UNREADABLE as e:
        where = unreadable(list(wanted), path, UNREADABLE)
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {where}{e}") from e
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


def writer_of(shard: Shard) -> int:
    """The rank that writes a shard: one of its holders, the same one on all of them."""
    return shard.holders[xxhash.xxh32_intdigest(shard.name.encode()) % len(shard.holders)]


def tensor_key(shard: Shard, key: str) -> str:
    """DCP key of one tensor of a shard."""
    return f"{tensor_prefix(shard.name, len(shard.holders) > 1, shard.holders[0])}{key}"


def _check_format(path: Path, manifest: Manifest, form: CheckpointFormat | None) -> None:
    if manifest.form != ("" if form is None else form.name):
        raise RestoreError(
            f"checkpoint {path} has the format {manifest.form or 'of the core'!r}, which this job does not use"
        )


def _check_names(
    path: Path, mine: set[str], found: Mapping[str, Taken | None], rank: int, lacks: str = "it lacks"
) -> None:
    missing = sorted(mine - found.keys())
    if missing:
        surplus = sorted(n for n in found.keys() - mine if (one := found[n]) is not None and not one.entry.shared)
        also = f"; it has {_some(surplus)} instead" if surplus else ""
        raise RestoreError(f"checkpoint {path} is of another model: {lacks} {_some(missing)} of rank {rank}{also}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:3])
    return f"shards {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- files --------------------------------------------------------------------------------------------


def _name(version: int) -> str:
    return f"step-{version:010d}"


def _version_of(name: str) -> int | None:
    kind, _, number = name.strip().partition("-")
    return int(number) if kind == "step" and number.isdigit() else None


def _published(directory: Path) -> list[int]:
    return [v for p in directory.glob("step-*") if (v := _version_of(p.name)) is not None and p.is_dir()]

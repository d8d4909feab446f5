"""The last resort: everything on disk, seldom, asynchronously, with torch.distributed.checkpoint (DCP).

Saving needs no collective, so a failure in the middle cannot hang it and it cannot hang a recovery. Some place
announces a version (see :mod:`flashrecovery.plan.checkpoint_interval`); every rank that commits it copies its part to
host memory (``k0``, the only time training is held up) and writes it in the background as a separate DCP checkpoint,
``.pending-<version>.<generation>-<launch>/part-<rank>/``: what a launch that was killed has left there never becomes
a part of the next one's. The rank that finds all parts durable joins their metadata, renames the directory to
``step-<version>`` and points ``latest`` at it; both are atomic, so a half-written checkpoint is never found. Only the
newest ``keep`` stay.

The published directory is one ordinary DCP checkpoint. Keys: ``rank<r>/<shard>/<tensor>`` for what only rank
r holds, ``shared/<shard>/<tensor>`` for replicated shards, written once by one of their holders (spread over
the holders by name), and ``manifest/<r>``: structure, small values and digests of what rank r wrote, its
rank-local state, the common state. The directory must be on storage that all ranks share.

A framework's own format (:class:`~flashrecovery.contract.adapter.CheckpointFormat`) takes the place of the tensors; the
manifests with their digests stay, so that a load is verified like any other. It may write DCP checkpoints into further
subdirectories ``<name>-<rank>``, which become parts of the one. It may be able to load what ranks of another layout
have written: then model and optimizer, and no rank's own state.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from flashrecovery.errors import ConfigError, FlashRecoveryError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.rules import TensorRule, shards_at
from flashrecovery.redundancy.announcement import Announcement
from flashrecovery.redundancy.checkpoint import blocks
from flashrecovery.redundancy.checkpoint.dcp import join_parts, write_part
from flashrecovery.redundancy.checkpoint.host_copies import HostCopies, LaterCopies
from flashrecovery.redundancy.checkpoint.keys import tensor_key, tensor_prefix, writer_of
from flashrecovery.redundancy.checkpoint.manifest import (
    INDEX_DIGEST,
    Manifest,
    ShardEntry,
    as_tensor,
    index_digest,
    manifest_key,
)
from flashrecovery.redundancy.checkpoint.published import LATEST, REPLACED, bring_back, step_name, versions_in
from flashrecovery.redundancy.memory.background import Background
from flashrecovery.runtime.durable import put_folder_in_place, write_durably
from flashrecovery.state.checkpoint_format import CheckpointFormat
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec, encode_spec

_DONE = "done-{}"
_MAY_BE_SLOW = 4
"""Checkpoints that this rank has written last: one that others are still writing may be among them."""


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
class _Part:
    """Which rank's part of a checkpoint it is, of how many, and what its manifest has besides shards. All of it is as
    it was at the commit: an elastic job may change its size while the part is being written."""

    rank: int
    shape: ReplicaShape
    local_state: bytes | None
    common: bytes
    rules: tuple[TensorRule, ...] | None
    model_ranks: tuple[int, ...]

    @property
    def sharing(self) -> Sharing:
        """The ranks among which its state is sharded."""
        return Sharing.of_rank(self.shape, self.rank, self.model_ranks)

    @property
    def world(self) -> int:
        return self.shape.world


@dataclass(frozen=True)
class LastPart:
    """A rank's part, from tensors that no longer change. ``sources``: each with whether other ranks hold it."""

    rank: int
    sources: Sequence[tuple[ShardSource, bool]]
    local_state: bytes
    common: bytes


class CheckpointFallback:
    """Writes this rank's parts. ``commit`` belongs to the training thread; the callbacks run in the writing
    thread.

    Args: directory: where checkpoints go; made if it does not exist. rank, world: this rank and the world
        size. shape: which ranks make up replicas; by default each is one. model_ranks: of those among which this
        rank's state is sharded; by default its own alone. keep: published checkpoints to keep,
        >= 1. form: the framework's own, None for the core's. on_published: called on the one rank that published.
        on_error: called with what writing has raised (disk full, ...); training goes on, this checkpoint is lost.

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
        shape: ReplicaShape | None = None,
        model_ranks: tuple[int, ...] = (),
    ) -> None:
        self.directory = Path(directory)
        self._rank, self._shape, self._keep = rank, shape or ReplicaShape(world), keep
        self._form, self._model_ranks = form, model_ranks
        self._on_published = on_published
        self._on_error = on_error
        self._background = Background("flashrecovery-checkpoint")
        self._announcement = Announcement()
        self._launch = ""
        self._written: deque[int] = deque(maxlen=_MAY_BE_SLOW)
        self.oldest = 0
        """No version before this one is gone back to any more."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".probe-{rank}"
            probe.touch()
            bring_back(self.directory)
            probe.unlink(missing_ok=True)  # two that come into an elastic job may be this rank for now
        except OSError as e:
            raise ConfigError(f"checkpoint.dir = {str(directory)!r} cannot be written: {e.strerror}") from e

    def announce(self, version: int, generation: int, launch: str = "") -> None:
        """Take a checkpoint when ``version`` is committed in ``generation``. Any thread. Too late is harmless: see
        :mod:`flashrecovery.plan.checkpoint_interval`. ``launch``: tells this job from all others that write into the
        directory.
        """
        self._launch = launch
        self._announcement.hear(version, generation)

    @property
    def announced(self) -> int | None:
        """The version of which the next checkpoint is to be; None if it has not been announced yet."""
        return self._announcement.version

    def resize(self, rank: int, shape: ReplicaShape) -> None:
        """From the next checkpoint on this is ``rank`` of a job of this shape."""
        self._rank, self._shape = rank, shape

    def withdraw(self, generation: int) -> None:
        """See :meth:`.announcement.Announcement.withdraw`."""
        self._announcement.withdraw(generation)

    def due(self, version: int) -> bool:
        """True if ``version`` is the announced one and no earlier checkpoint is still being written."""
        return self._announcement.take(version) and not self._background.busy

    def commit(
        self,
        version: int,
        shards: Sequence[Shard],
        *,
        local_state: bytes | None,
        common: bytes,
        generation: int,
        rules: tuple[TensorRule, ...] | None = None,
    ) -> float:
        """The live state is ``version``: copy this rank's part of it, and write it in the background.

        Returns k0, the seconds this took of training. The previous checkpoint must have been written
        (:meth:`due`). ``rules``: how what is sharded among the ranks is sharded in any number of them, and all else is
        the same on all ranks; None: that is not so.
        """
        began = time.monotonic()
        mine = [s for s in shards if writer_of(s) == self._rank]
        specs = {s.name: s.spec() for s in mine}
        copy = HostCopies()
        tensors = {tensor_key(s, key): copy(t) for s in mine for key, t in s.tensors().items()}
        write = None if self._form is None else self._form.capture(self.directory, step_name(version), copy)
        k0_s = time.monotonic() - began
        owned = [(s.name, len(s.holders) > 1, specs[s.name]) for s in mine]

        of = _Part(self._rank, self._shape, local_state, common, rules, self._model_ranks)
        attempt = self._attempt(generation)

        def job() -> None:
            self._write(version, attempt, owned, tensors, write, of, began, k0_s)

        self._submit(job)
        return k0_s

    def _attempt(self, generation: int) -> str:
        """Tells a checkpoint from all others of its version."""
        return f"{generation}-{self._launch}"

    def _submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the background; errors are passed to ``on_error``."""

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
        local_state: bytes,
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
            write = self._form.capture(self.directory, step_name(version), later)
            k0_s = time.monotonic() - began
        of = _Part(self._rank, self._shape, local_state, common, rules, self._model_ranks)
        attempt = self._attempt(generation)

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
                self._write(version, attempt, owned, tensors, write, of, began, k0_s)
            finally:
                release()

        self._submit(job)

    def write_now(
        self, parts: Sequence[LastPart], version: int, attempt: str, rules: tuple[TensorRule, ...] | None
    ) -> None:
        """Write this rank's part and others', in the calling thread. ``attempt``: tells it from all other checkpoints
        of this version. ``rules``: see :meth:`commit`. Raises OSError, RuntimeError, FlashRecoveryError."""
        for part in parts:
            began = time.monotonic()
            copy = HostCopies()
            write = None if self._form is None else self._form.capture(self.directory, step_name(version), copy)
            tensors = {
                f"{tensor_prefix(source.name, shared, part.rank)}{key}": _on_host(tensor, copy)
                for source, shared in part.sources
                for key, tensor in zip(source.spec.tensors, source.tensors, strict=True)
            }
            owned = [(source.name, shared, source.spec) for source, shared in part.sources]
            of = _Part(part.rank, self._shape, part.local_state, part.common, rules, self._model_ranks)
            self._write(version, attempt, owned, tensors, write, of, began, 0.0)

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
        attempt: str,
        owned: list[tuple[str, bool, ShardSpec]],
        tensors: dict[str, torch.Tensor],
        write: Callable[[Path], None] | None,
        of: _Part,
        began: float,
        k0_s: float,
    ) -> None:
        rules = of.rules if write is None else None  # a framework's format is sharded in its own way
        sharded = shards_at(rules or (), of.sharing.place(of.rank), of.sharing.size)
        entries = {}
        for name, shared, spec in owned:
            prefix = tensor_prefix(name, shared, of.rank)
            digest = shard_digest([tensors[f"{prefix}{key}"] for key in spec.tensors], spec)
            of_blocks = {}
            for key in spec.tensors if name in sharded else ():
                tensors[f"{prefix}{key}"] = tensors[f"{prefix}{key}"].contiguous()  # as it will lie in the file
                of_blocks[key] = blocks.digests(tensors[f"{prefix}{key}"])
            entries[name] = ShardEntry(shared, encode_spec(spec), digest, of_blocks)
        form = ("", "") if self._form is None else (self._form.name, self._form.layout())
        manifest = Manifest(
            version, of.world, entries, of.local_state, of.common, *form, rules, of.shape, of.model_ranks
        )
        pending = self.directory / f".pending-{version}.{attempt}"
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
            path = self.directory / step_name(version)
            self._on_published(Published(version, path, time.monotonic() - began, k0_s))
        self._written.append(version)
        self.oldest = min(*versions_in(self.directory), *self._written, version)

    def _publish(self, pending: Path, version: int, world: int) -> bool:
        """True if this rank published; two may find all parts durable at once."""
        try:
            os.close(os.open(pending / "publisher", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except (FileExistsError, FileNotFoundError):  # not there: it has been published already
            return False
        ranks = {str(r) for r in range(world)}  # no leftover of a larger world
        found = sorted(p.parent.name for p in pending.glob("*/.metadata"))
        join_parts(pending, [name for name in found if name.rpartition("-")[2] in ranks])
        write_durably(pending / INDEX_DIGEST, index_digest(pending))
        final = self.directory / step_name(version)
        # There may be one: the same step again after a recovery, or another run's leftover.
        put_folder_in_place(pending, final, pending.with_name(f"{pending.name}{REPLACED}"))
        write_durably(self.directory / LATEST, final.name.encode())
        self._sweep(version)
        return True

    def _sweep(self, version: int) -> None:
        """Delete checkpoints older than the newest ``keep``, and incomplete ones. Later versions in the directory
        belong to another run and are left alone. Each is removed atomically: no reader finds half of it."""
        for replaced in self.directory.glob(f".pending-*{REPLACED}"):  # no reader brings it back from now on
            with suppress(FileNotFoundError):
                os.rename(replaced, replaced.with_suffix(".swept"))
        older = sorted(v for v in versions_in(self.directory) if v <= version)
        for old in older[: -self._keep]:
            with suppress(FileNotFoundError):
                os.rename(self.directory / step_name(old), self.directory / f".pending-{old}.swept")
        for pending in self.directory.glob(".pending-*"):
            number = pending.name.removeprefix(".pending-").split(".")[0]
            if number.isdigit() and int(number) <= version:
                shutil.rmtree(pending, ignore_errors=True)


def _on_host(tensor: torch.Tensor, copy: HostCopies) -> torch.Tensor:
    return tensor.detach() if tensor.device.type == "cpu" else copy(tensor)

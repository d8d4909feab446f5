"""What of a job's state is on disk, and whether it is still what was written: without a job, and without its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashrecovery.errors import DamagedCheckpointError, RestoreError
from flashrecovery.redundancy.checkpoint.dcp import read_into
from flashrecovery.redundancy.checkpoint.keys import tensor_prefix
from flashrecovery.redundancy.checkpoint.manifest import UNREADABLE, manifests_of
from flashrecovery.redundancy.checkpoint.published import published
from flashrecovery.snapshot.files import FOLDER, SavedMemory, damaged, listed
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.spec import decode_spec


@dataclass(frozen=True)
class SavedVersion:
    """One version on disk.

    Attributes:
        kind: ``checkpoint`` or ``snapshots``.
        path: directory.
        ranks: how many ranks the job had.
        form: the checkpoint's format; "" for the core's.
        nbytes: of all files.
        wrong: what is missing or is not what was written; empty: a job can go on from here.
    """

    kind: str
    version: int
    path: Path
    ranks: int
    form: str
    nbytes: int
    wrong: tuple[str, ...]


def checkpoints_in(directory: Path) -> Iterator[SavedVersion]:
    """The complete checkpoints in ``directory``, the oldest first. Reads all of them. One that a running job removes
    meanwhile is left out."""
    for version, path in published(directory):
        try:
            found = _saved(version, path)
        except FileNotFoundError:
            if path.exists():
                raise
            continue
        if not found.wrong or path.exists():
            yield found


def _saved(version: int, path: Path) -> SavedVersion:
    nbytes = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    try:
        first = manifests_of(path, [0])[0]
        ranks, form = first.ranks, first.form
        wrong = tuple(_wrong_shards(path, range(ranks), in_core_format=not form))
    except RestoreError as e:
        ranks, form, wrong = 0, "", (str(e),)
    return SavedVersion("checkpoint", version, path, ranks, form, nbytes, wrong)


def _wrong_shards(path: Path, ranks: Sequence[int], *, in_core_format: bool) -> Iterator[str]:
    """Shards that do not have their digests. A framework's format can be read by the framework only; of it, the
    manifests are looked at."""
    for rank in ranks:
        manifest = manifests_of(path, [rank])[rank]
        for name, entry in manifest.entries.items() if in_core_format else ():
            spec = decode_spec(entry.spec)
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in spec.tensors.values()]
            prefix = tensor_prefix(name, entry.shared, rank)
            try:
                read_into(dict(zip((f"{prefix}{key}" for key in spec.tensors), tensors, strict=True)), path)
            except UNREADABLE as e:
                raise DamagedCheckpointError(f"{name!r} of rank {rank} cannot be read: {e}") from e
            if shard_digest(tensors, spec) != entry.digest:
                yield f"{name!r} of rank {rank} does not have its digest"


def snapshots_in(run_dir: Path) -> Iterator[SavedVersion]:
    """The versions of which ``run_dir`` has snapshots, those of all its nodes taken together, the oldest first."""
    folders = [run_dir / FOLDER, *sorted(run_dir.glob(f"nodes/*/{FOLDER}"))]
    found = [(folder, saved) for folder in folders for saved in listed(folder)]
    own = [(folder, saved) for folder, saved in found if saved.name.startswith("own-")]
    for version in sorted({saved.version for _, saved in own}):
        files = [(folder, saved) for folder, saved in own if saved.version == version]
        ranks = max(_ranks_of(saved) for _, saved in files)
        missing = sorted({*range(ranks)} - {saved.rank for _, saved in files})
        wrong = [f"rank {rank} has nothing of it" for rank in missing]
        wrong += [text for folder, saved in files if (text := damaged(folder, saved))]
        nbytes = sum(nbytes for _, saved in files for _, nbytes in saved.parts)
        yield SavedVersion("snapshots", version, files[0][0], ranks, "", nbytes, tuple(wrong))


def _ranks_of(saved: SavedMemory) -> int:
    return int(saved.name.rpartition("-")[2])

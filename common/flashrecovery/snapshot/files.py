"""Snapshots on disk: a folder with one file for each memory, and a list of them with their digests.

The folder gets its name when everything in it is durable, so there is never half a snapshot under it. What has been
damaged since is found by its digest when it is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from flashrecovery.runtime.durable import put_folder_in_place, sync_folder, write_durably
from flashrecovery.snapshot.memory import SharedMemory

FOLDER = "snapshots"
PARTIAL = "snapshots.partial"
"""What is not known to be a whole version, where the folder of that name has something already. Nothing reads it."""
LAST_CHECKPOINT = "last-checkpoint"
"""In the run directory: what a job with several sizes or layouts leaves, if it has no directory for checkpoints."""
LAST, OF_PAGE = "own-last", "own-page"
"""Memories that are kept when a job ends: of a rank, and in the place of one that is gone, what its page had."""
_LIST = "list.json"
_PIECE = 16 << 20


def memory_name(name: str, ranks: int) -> str:
    """The name of a memory in a job of that many ranks: with another number, state is sharded differently."""
    return f"{name}-of-{ranks}"


@dataclass(frozen=True)
class SavedMemory:
    """One memory on disk. ``parts``: (beginning in the memory, bytes) of what the file has, one after another; ``size``
    of the whole memory; ``digest``: xxh3-128 of the file, hex."""

    rank: int
    name: str
    version: int
    file: str
    size: int
    parts: tuple[tuple[int, int], ...]
    digest: str


def save(folder: Path, memories: Iterable[tuple[int, str, SharedMemory]]) -> list[SavedMemory]:
    """Write the complete ones of (rank, name, memory) to ``folder``, in place of its old contents. The memories must
    not be written meanwhile. Raises OSError; then the old contents are still there."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        found = [_save_one(temporary, rank, name, memory) for rank, name, memory in memories if memory.version >= 0]
        saved = [one for one in found if one is not None]
        write_durably(temporary / _LIST, json.dumps([asdict(one) for one in saved], indent=1).encode())
        before = _before(folder)
        replaced = put_folder_in_place(temporary, folder, before)
        for old in (before, replaced):
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        sync_folder(folder.parent)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return saved


def _before(folder: Path) -> Path:
    """Where what was in ``folder`` is for the moment between two renames."""
    return folder.with_name(f".{folder.name}.before")


def _save_one(folder: Path, rank: int, name: str, memory: SharedMemory) -> SavedMemory | None:
    """Save one memory. Returns None if it was written meanwhile."""
    version = memory.version
    file = f"rank{rank}-{name}"
    hasher = xxhash.xxh3_128()
    with open(folder / file, "wb") as f, memoryview(memory.map) as content:
        for begin, nbytes in memory.parts():
            for at in range(begin, begin + nbytes, _PIECE):
                piece = content[at : min(at + _PIECE, begin + nbytes)]
                hasher.update(piece)
                f.write(piece)
                piece.release()
        f.flush()
        os.fsync(f.fileno())
    if memory.version != version:
        (folder / file).unlink()
        return None
    return SavedMemory(rank, name, version, file, memory.address.size, memory.parts(), hasher.hexdigest())


def listed(folder: Path) -> list[SavedMemory]:
    """What ``folder`` says that it has; nothing if it is not there or its list cannot be read."""
    if not folder.exists() and _before(folder).exists():
        _before(folder).rename(folder)  # it was being replaced when the writer was killed
    try:
        raw = json.loads((folder / _LIST).read_text())
        return [SavedMemory(**{**one, "parts": tuple(tuple(p) for p in one["parts"])}) for one in raw]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def damaged(folder: Path, saved: SavedMemory) -> str:
    """What is wrong with one file; "" if it is what was written."""
    hasher = xxhash.xxh3_128()
    try:
        for piece in _pieces(folder / saved.file):
            hasher.update(piece)
    except OSError as e:
        return f"{saved.file}: {e.strerror}"
    return "" if hasher.hexdigest() == saved.digest else f"{saved.file} is not what was written (its digest differs)"


def load(folder: Path, saved: SavedMemory) -> SharedMemory | None:
    """The memory that was saved; None if the file is damaged. Raises OSError if there is no room for it."""
    fd = os.memfd_create("flashrecovery-copy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, saved.size)
        whole = _read_into(fd, folder / saved.file, saved)
    except BaseException:
        os.close(fd)
        raise
    if not whole:
        os.close(fd)
        return None
    return SharedMemory.of(fd)


def _read_into(fd: int, path: Path, saved: SavedMemory) -> bool:
    """Put the file's content into its places; False if it is not what was written."""
    hasher = xxhash.xxh3_128()
    parts = iter([part for part in saved.parts if part[1]])
    at, left = next(parts, (0, 0))
    try:
        for piece in _pieces(path):
            hasher.update(piece)
            while piece:
                if not left:
                    at, left = next(parts, (0, 0))
                    if not left:
                        return False  # it is longer than what was written
                count = os.pwrite(fd, piece[:left], at)
                at, left, piece = at + count, left - count, piece[count:]
    except FileNotFoundError:
        return False
    return not left and next(parts, None) is None and hasher.hexdigest() == saved.digest


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as f:
        while piece := f.read(_PIECE):
            yield piece

"""The few calls of torch.distributed.checkpoint (DCP) that the fallback needs, without collectives.

DCP takes half a second to import, so it is imported at the first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flashrecovery.state.exact import copied_as_bytes, exact


def write_part(tensors: Mapping[str, Any], directory: Path, planner: Any = None) -> None:
    """One rank's tensors as a DCP checkpoint in ``directory``, durable when this returns. ``planner``: DCP's, for
    tensors of which this rank has pieces."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1)
    with _own_errors():
        save(_exact(tensors), storage_writer=writer, planner=planner, no_dist=True)


def join_parts(directory: Path, parts: Sequence[str]) -> None:
    """Make ``directory`` one DCP checkpoint of the given subdirectories. Only metadata is written.

    A tensor of which several have pieces consists of them all.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.storage import WriteResult

    joined = Metadata(state_dict_metadata={}, planner_data={})
    results = []
    for part in parts:
        metadata = FileSystemReader(directory / part).read_metadata()
        for key, entry in metadata.state_dict_metadata.items():
            known = joined.state_dict_metadata.setdefault(key, entry)
            if known is not entry and isinstance(known, TensorStorageMetadata):
                assert isinstance(entry, TensorStorageMetadata)
                known.chunks.extend(entry.chunks)
        joined.planner_data.update(metadata.planner_data or {})
        for index, info in (metadata.storage_data or {}).items():
            moved = replace(info, relative_path=f"{part}/{info.relative_path}")
            results.append(WriteResult(index=index, size_in_bytes=info.length, storage_data=moved))
    FileSystemWriter(directory, sync_files=True).finish(joined, [results])


@dataclass(frozen=True)
class CheckpointIndex:
    """DCP's index of a checkpoint: which tensors there are, and where in which file. ``metadata``: DCP's."""

    directory: Path
    metadata: Any

    @staticmethod
    def read(directory: Path) -> CheckpointIndex:
        """Raises what reading files that are damaged or missing can raise."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return CheckpointIndex(directory, FileSystemReader(directory).read_metadata())


@lru_cache(maxsize=1)
def _reader_class() -> type[Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class IndexedReader(FileSystemReader):
        """Reads tensors of which the index has been read."""

        def __init__(self, index: CheckpointIndex) -> None:
            super().__init__(index.directory)
            self._index = index

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return self._index.metadata

    return IndexedReader


def read_into(tensors: Mapping[str, Any], source: Path | CheckpointIndex, planner: Any = None) -> None:
    """Fill ``tensors`` in place. Raises RuntimeError or KeyError for what the checkpoint does not have."""
    from torch.distributed.checkpoint.state_dict_loader import load

    if tensors:
        index = CheckpointIndex.read(source) if isinstance(source, Path) else source
        with _own_errors():
            load(_exact(tensors), storage_reader=_reader_class()(index), planner=planner, no_dist=True)


def read_whole(keys: Sequence[str], source: Path | CheckpointIndex) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint in the shape in which they were written. Raises KeyError, OSError."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = CheckpointIndex.read(source) if isinstance(source, Path) else source
    stored = index.metadata.state_dict_metadata
    tensors = {}
    for key in keys:
        entry = stored[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{key} is not a tensor")
        tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_into(tensors, index)
    return tensors


def unreadable(keys: Sequence[str], directory: Path, errors: tuple[type[Exception], ...]) -> str:
    """Which of these tensors cannot be read, and its file: ``'x' in FILE: ``, for a message; "" if that is unknown.
    ``errors``: what reading raises then."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        stored = FileSystemReader(directory).read_metadata().storage_data or {}
    except errors:
        return ""
    files = {index.fqn: directory / info.relative_path for index, info in stored.items()}
    for key in keys:
        if key in files:
            try:
                read_whole([key], directory)
            except errors:
                return f"{key!r} in {files[key]}: "
    return ""


def _exact(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """DCP copies what it writes and reads."""
    return {key: exact(t) if type(t) is torch.Tensor and copied_as_bytes(t.dtype) else t for key, t in tensors.items()}


@contextmanager
def _own_errors() -> Iterator[None]:
    """DCP wraps errors in its own BaseException; raise the original error."""
    from torch.distributed.checkpoint.api import CheckpointException

    # That every rank reads and writes for itself is meant here; DCP warns about it. Not at import, because a standby
    # imports with warnings that are put back afterwards.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as e:
        for error, _ in e.failures.values():
            raise error from None
        raise

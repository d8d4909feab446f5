"""The fallback checkpoint in DeepSpeed's own format, written by ``engine.save_checkpoint``, read by
``engine.load_checkpoint``: ``zero_to_fp32.py`` and the universal checkpoint's tools read it, too.

``save_checkpoint`` holds training up until all files are written, and synchronises the ranks. Here it only collects
what it would write, in host memory and without communication; the files are written beside training.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashrecovery.adapter import CheckpointFormat, is_communication_error
from flashrecovery.errors import RestoreError

_UNREADABLE = (OSError, RuntimeError, KeyError, ValueError, AssertionError, EOFError, pickle.UnpicklingError)
"""What DeepSpeed raises for files that are damaged, missing or of another job."""

Copy = Callable[[torch.Tensor], torch.Tensor]


class EngineCheckpoint(CheckpointFormat):
    """The fallback checkpoint of one engine. ``loaded``: called after a load, which makes new parameter groups."""

    name = "deepspeed"

    def __init__(self, engine: Any, loaded: Callable[[], None]) -> None:
        self._engine = engine
        self._loaded = loaded

    def capture(self, directory: Path, tag: str, copy: Copy) -> Callable[[Path], None]:
        from deepspeed.runtime import engine as module

        files = _Files(directory / tag, copy, _partitioned(self._engine))
        collect = {
            "checkpoint_engine": files,
            # ZeRO-3 would release its whole parameters and gather them again.
            "_optimizer_has_ckpt_event_prologue": lambda: False,
            "_optimizer_has_ckpt_event_epilogue": lambda: False,
        }
        with _attributes(module, dist=_Silent(module.dist)), _attributes(self._engine, **collect):
            type(self._engine).save_checkpoint(self._engine, str(directory), tag=tag, save_latest=False)
        return files.write

    def load(self, directory: Path, tag: str) -> None:
        try:
            path, _ = type(self._engine).load_checkpoint(self._engine, str(directory), tag=tag)
        except _UNREADABLE as e:
            if is_communication_error(e):
                raise
            raise RestoreError(f"checkpoint {directory / tag} cannot be loaded: {type(e).__name__}: {e}") from e
        if path is None:
            raise RestoreError(f"checkpoint {directory / tag} is not one of DeepSpeed's")
        self._loaded()


class _Files:
    """Takes the place of DeepSpeed's checkpoint engine, and keeps what it is asked to save.

    Args:
        root: the checkpoint's directory, of which every path that is to be saved is a part.
        copy: to host memory.
        partitioned: names of ZeRO-3's parameters, of which the module's state has only placeholders.
    """

    def __init__(self, root: Path, copy: Copy, partitioned: frozenset[str]) -> None:
        self._root = root
        self._copy = copy
        self._partitioned = partitioned
        self._files: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        state = _on_host(state_dict, self._copy)
        module = (state.get("module") if isinstance(state, dict) else None) or {}
        for name in self._partitioned.intersection(module):
            module[name] = torch.empty(0, dtype=module[name].dtype)
        self._files[os.path.relpath(path, self._root)] = state

    def write(self, directory: Path) -> None:
        """Write all files, durably."""
        for name, state in self._files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
        self._files.clear()

    # The rest of what DeepSpeed asks of a checkpoint engine.

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories are made when the files are written."""

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return False  # tensors are copied one by one


class _Silent:
    """``deepspeed.comm`` for a rank that saves for itself: the directory exists, and all ranks have the same tag."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Does not wait for the other ranks."""

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: only the tag is compared between ranks, and all have the same one."""


@contextmanager
def _attributes(thing: Any, **values: Any) -> Iterator[None]:
    """``thing`` with other attributes for a while."""
    before = {name: vars(thing)[name] for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(thing, name, before[name])
            else:
                delattr(thing, name)


def _partitioned(engine: Any) -> frozenset[str]:
    return frozenset(name for name, p in engine.module.named_parameters() if hasattr(p, "ds_id"))


def _on_host(value: Any, to_host: Copy) -> Any:
    """A copy of a state dict that does not change any more."""
    if isinstance(value, torch.Tensor):
        return to_host(value)
    if isinstance(value, dict):
        return type(value)((k, _on_host(v, to_host)) for k, v in value.items())
    if type(value) in (list, tuple):  # not torch.Size
        return type(value)(_on_host(v, to_host) for v in value)
    return copy.deepcopy(value)

"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, in whatever number of replicas: losses of each iteration
as exact numbers, and digests of the whole state, gathered, with what depends on the size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from followed_megatron_lm import follow  # first: it brings the stand-ins

# isort: split

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args
from megatron_whole_state import State


class InSize:
    """A :class:`followed_megatron_lm.Watched`."""

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        self._state = State(chunks, optimizer, scheduler)

    def place(self) -> str:
        assert get_args().data_parallel_size == parallel_state.get_data_parallel_world_size()
        return f"size={dist.get_world_size()}"

    def digest(self) -> str:
        return self._state.digest()

    def save(self, version: int, folder: Path) -> None:
        self._state.save(version, str(folder / f"{version}.pt"))

    def load(self, path: Path) -> int:
        return self._state.load(str(path))


follow(InSize)

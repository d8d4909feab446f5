"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, in whatever layout: losses of each iteration as exact
numbers, and digests of the whole state, which do not depend on the layout.

With ``--save-to`` it writes the state of each iteration down with megatron-core's own ``dist_checkpointing.save``; with
``--start-from`` it begins with what megatron-core's own ``load`` reads there (the name is the iteration).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from followed_megatron_lm import follow  # first: it brings the stand-ins

# isort: split

from logical_values import begin_with, digest, save
from megatron.core import parallel_state
from megatron.training import get_args
from megatron_whole_state import State


class InLayout:
    """A :class:`followed_megatron_lm.Watched`."""

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        self._trained = chunks, optimizer, scheduler
        self._noted = State(chunks, optimizer, scheduler)

    def place(self) -> str:
        """What Megatron's groups are; its arguments, and what it has noted of the groups, say the same."""
        args = get_args()
        sizes = {
            "tp": (parallel_state.get_tensor_model_parallel_world_size(), args.tensor_model_parallel_size),
            "pp": (parallel_state.get_pipeline_model_parallel_world_size(), args.pipeline_model_parallel_size),
            "cp": (parallel_state.get_context_parallel_world_size(), args.context_parallel_size),
            "ep": (parallel_state.get_expert_model_parallel_world_size(), args.expert_model_parallel_size),
            "dp": (parallel_state.get_data_parallel_world_size(), args.data_parallel_size),
        }
        odd = {name: found for name, found in sizes.items() if found[0] != found[1]}
        assert not odd, odd
        self._noted.check_place()
        shown = {name: size for name, (size, _) in sizes.items() if size > 1 or name not in ("cp", "ep")}
        return "layout=" + ",".join(f"{name}={size}" for name, size in shown.items())

    def digest(self) -> str:
        return digest(*self._trained)

    def save(self, version: int, folder: Path) -> None:
        save(*self._trained, folder / str(version))

    def load(self, path: Path) -> int:
        return begin_with(*self._trained, path)


follow(InLayout, begins=True)

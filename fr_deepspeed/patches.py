"""What is changed inside DeepSpeed at run time. Imports deepspeed only when a patch is applied.

``patches/deepspeed/README.md`` tells these apart from the patch that is meant for DeepSpeed itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashrecovery.capabilities.patches import Patch, PatchTable
from fr_deepspeed.capabilities import SHARED_MEMORY


def _without_shared_memory_op() -> Callable[[], None]:
    # Not `from deepspeed.comm import torch`: that name is PyTorch itself there.
    backend: Any = importlib.import_module("deepspeed.comm.torch")

    original = backend.build_shm_op
    backend.build_shm_op = lambda: None

    def take_back() -> None:
        backend.build_shm_op = original

    return take_back


PATCHES = PatchTable(
    "deepspeed",
    [
        Patch(
            name="no-shared-memory-op",
            changed=SHARED_MEMORY,
            reason="the op is compiled when process groups are made, and its segments are named by the first launch: a "
            "replacement waits in C++ for ever for segments that no survivor makes again; only inference uses it",
            apply=_without_shared_memory_op,
        )
    ],
)

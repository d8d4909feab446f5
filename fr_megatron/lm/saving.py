"""Which non-persistent checkpoints Megatron-LM removes before it writes another one.

Megatron keeps the one with the greatest iteration. Where one is written again (a rank has died in it, or the job
has fallen back to a time before it) that is the one which is about to be written, and the one that its tracker names,
which is whole, would go: if the job died as a whole meanwhile, none would be left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fr_megatron.lm.loading import newest

_PREFIX = "iter_"


def keeping_the_whole_one(cleanup: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``cleanup_old_non_persistent_checkpoint``, which leaves what the tracker names, and what is newer."""

    @functools.wraps(cleanup)
    def keeping(save_dir: str | Path, leave_ckpt_num: int = 1, *rest: Any, **kwargs: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() != 0:  # it removes none, and what the first one does is in flux
            return cleanup(save_dir, leave_ckpt_num, *rest, **kwargs)
        return cleanup(save_dir, max(leave_ckpt_num, _from_the_whole_one(Path(save_dir))), *rest, **kwargs)

    return keeping


def _from_the_whole_one(folder: Path) -> int:
    """How many there are from that on which the tracker names."""
    named = newest(folder)
    if not named.isdecimal():
        return 0
    there = [int(path.name.removeprefix(_PREFIX)) for path in folder.rglob(f"{_PREFIX}*")]
    return sum(number >= int(named) for number in there)

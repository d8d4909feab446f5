"""The megatron-core example, which sets gradients to zero at the end of a step in place of its beginning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import pretrain_gpt

first = pretrain_gpt.train_step


def train_step(args: Any, chunks: list[Any], *rest: Any) -> Any:
    """As the example's."""
    for chunk in chunks:
        chunk.zero_grad_buffer = lambda: None
    loss = first(args, chunks, *rest)
    for chunk in chunks:
        type(chunk).zero_grad_buffer(chunk)
    return loss


if __name__ == "__main__":
    pretrain_gpt.train_step = train_step
    pretrain_gpt.main()

"""DeepSpeed's activation checkpointing: the module-level buffers that an interrupted step leaves behind."""

from __future__ import annotations


def reset_checkpointing() -> None:
    """Drop what an interrupted forward or backward pass has put aside."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.reset()
    checkpointing.timers = None

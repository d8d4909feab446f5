"""DeepSpeed's activation checkpointing: module-level buffers, and the random streams of its tracker.

Recomputing a layer sets all random streams back to its forward pass, and forward again at its end: an interruption
leaves them anywhere. The core restores the process's own streams; the tracker's (``get_cuda_rng_tracker()``, on a CPU
too) belong to this rank's capsule.
"""

from __future__ import annotations

from typing import Any


def reset_checkpointing() -> None:
    """Drop what an interrupted forward or backward pass has put aside."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.reset()
    checkpointing.timers = None


def capture_tracker() -> dict[str, Any]:
    """The tracked streams by name; empty if the script tracks none."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    states: dict[str, Any] = checkpointing.get_cuda_rng_tracker().get_states()
    return states


def restore_tracker(states: dict[str, Any]) -> None:
    """Set the tracked streams. The seeds that the tracker has seen stay as the script has given them."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.get_cuda_rng_tracker().set_states(dict(states))

"""The random streams that DeepSpeed's activation checkpointing tracks: each rank's own, part of its rank-local state.
And its buffers, which an interrupted step leaves behind.

Recomputing a layer sets all random streams back to its forward pass, and forward again at its end: an interruption
leaves them anywhere. The core restores the process's own streams; the tracker's (``get_cuda_rng_tracker()``, on a CPU
too) are restored here.
"""

from __future__ import annotations

from typing import Any


def capture_tracker() -> dict[str, Any]:
    """The tracked streams by name; empty if the script tracks none."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    states: dict[str, Any] = checkpointing.get_cuda_rng_tracker().get_states()
    return states


def restore_tracker(states: dict[str, Any]) -> None:
    """Set the tracked streams. The seeds that the tracker has seen stay as the script has given them."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.get_cuda_rng_tracker().set_states(dict(states))


def reset_checkpointing() -> None:
    """Drop what an interrupted forward or backward pass has put aside in activation checkpointing's own buffers."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    checkpointing.reset()
    checkpointing.timers = None

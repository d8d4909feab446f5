"""Megatron's tracked random streams (data-, model- and expert-parallel): each rank's own, part of its capsule."""

from __future__ import annotations

from typing import Any

_DEFAULT = "default-rng"
"""Megatron's name of the default stream, which it does not track."""


def capture_tracker() -> dict[str, Any]:
    """The tracked streams by name."""
    from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

    return {name: convert_cuda_rng_state(state) for name, state in get_cuda_rng_tracker().get_states().items()}


def restore_tracker(states: dict[str, Any]) -> None:
    """Set the tracked streams, and leave the one that an interrupted forward pass was in."""
    from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    graphable = bool(getattr(tracker, "use_cudagraphable_rng", False))
    tracker._current_state_name = _DEFAULT
    tracker.set_states({n: convert_cuda_rng_state(s.clone(), to_graphable=graphable) for n, s in states.items()})

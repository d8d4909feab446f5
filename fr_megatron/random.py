"""Megatron's tracked random streams (data-, model- and expert-parallel): each rank's own, part of its rank-local
state."""

from __future__ import annotations

from typing import Any

from fr_megatron.capabilities import STREAMS

_DEFAULT = "default-rng"
"""Megatron's name of the default stream, which it does not track."""


def capture_tracker() -> dict[str, Any]:
    """The tracked streams by name."""
    from megatron.core.tensor_parallel import random as module

    states = module.get_cuda_rng_tracker().get_states()
    if STREAMS.takes("named"):
        return {name: module.convert_cuda_rng_state(state) for name, state in states.items()}
    return dict(states)


def restore_tracker(states: dict[str, Any]) -> None:
    """Set the tracked streams, and leave the one that an interrupted forward pass was in."""
    from megatron.core.tensor_parallel import random as module

    tracker = module.get_cuda_rng_tracker()
    if STREAMS.takes("states"):
        tracker.set_states({name: state.clone() for name, state in states.items()})
        return
    graphable = bool(getattr(tracker, "use_cudagraphable_rng", False))
    tracker._current_state_name = _DEFAULT
    tracker.set_states({n: module.convert_cuda_rng_state(s.clone(), to_graphable=graphable) for n, s in states.items()})

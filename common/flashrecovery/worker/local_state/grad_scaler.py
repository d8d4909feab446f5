"""Gradient scalers of ``torch.amp``: what they know of a step in progress is not in their state.

``unscale_()``, which ``step()`` calls too, notes for each optimizer that its gradients are unscaled and whether they
are finite; ``update()`` forgets that. In an attempt that was cut short between the two the note stays. The same step,
done again, would not unscale its gradients, and would be left out or not for the reasons of the attempt before.

Private to torch is ``_per_optimizer_states``; tested with 2.13 and 2.14.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from flashrecovery.worker.local_state.generators import Stateful


class BetweenSteps:
    """A scaler whose restored state is one between two steps."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()
        self._scaler.load_state_dict(state)


def settled(thing: Stateful) -> Stateful:
    """``thing``, as something to register; a scaler with what is to be forgotten."""
    return BetweenSteps(thing) if isinstance(thing, GradScaler) else thing

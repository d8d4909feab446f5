"""How long a copy may be held back for training's communication, and how fast it goes if nothing holds it back.

FFTrainer gives the copies of training state what the network has left over. A copy may take its time until training
waits for it; what the last steps have shown says when that is. Held back for too long it would cost what it is to save,
so the estimate is careful: the shortest of the last times.
"""

from __future__ import annotations

from collections.abc import Sequence

STEPS_LOOKED_AT = 8


def window_s(seen: Sequence[float]) -> float:
    """Seconds from the start of a copy in which it is not needed; 0 while unknown. ``seen``: for earlier steps, seconds
    from the yield of the step to the moment when training waited for the copy."""
    return min(seen[-STEPS_LOOKED_AT:], default=0.0)


def rate(seen: Sequence[float]) -> float:
    """Bytes a second; 0 as long as nothing is known. ``seen``: what earlier copies have reached while they went."""
    return max(seen[-STEPS_LOOKED_AT:], default=0.0)

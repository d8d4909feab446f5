"""Ray's actors as the places of ranks: each actor keeps a guard, and the rank's process beside it may die.

::

    trainer = TorchTrainer(flashrecovery.ray.recoverable(train_loop_per_worker), scaling_config=ScalingConfig(4))
    flashrecovery.ray.run(["train.py", "--steps", "1000"], num_workers=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashrecovery.ray.actors import run
    from flashrecovery.ray.train import recoverable

__all__ = ["recoverable", "run"]


def __getattr__(name: str) -> Any:
    """Import lazily: a rank's process needs none of it."""
    if name == "run":
        from flashrecovery.ray.actors import run

        return run
    if name == "recoverable":
        from flashrecovery.ray.train import recoverable

        return recoverable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""FlashRecovery: a training job survives the death of a rank, in place and bit for bit.

A training script needs three lines::

    import flashrecovery
    recovery = flashrecovery.init()
    recovery.register(model=model, optimizer=optimizer)
    for step in recovery.steps(num_steps):
        with step:
            ...

Started by ``flashrecovery run``, the job recovers from failures; started by plain ``python`` or ``torchrun``, the same
script trains normally.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashrecovery._version import __version__

if TYPE_CHECKING:
    from flashrecovery.entry import init
    from flashrecovery.runtime.parallel_layout import ParallelLayout, layout
    from flashrecovery.worker.kept_attributes import KeptAttributes
    from flashrecovery.worker.recovery import Recovery

__all__ = ["KeptAttributes", "ParallelLayout", "Recovery", "__version__", "init", "layout"]


def __getattr__(name: str) -> Any:
    """Import lazily: the launcher must not import torch."""
    if name in ("init", "Recovery"):
        from flashrecovery import entry

        return getattr(entry, name)
    if name == "KeptAttributes":
        from flashrecovery.worker.kept_attributes import KeptAttributes

        return KeptAttributes
    if name in ("layout", "ParallelLayout"):
        from flashrecovery.runtime.parallel_layout import ParallelLayout, layout

        return {"layout": layout, "ParallelLayout": ParallelLayout}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

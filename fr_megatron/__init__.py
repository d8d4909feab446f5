"""FlashRecovery for Megatron: a rank's death is survived in place, in every parallel layout.

With megatron-core and a loop of one's own, in two lines::

    recovery = fr_megatron.attach(model, optimizer, scheduler)
    for step in recovery.steps(num_steps):
        with step:
            ...

=================  =====================================================================================
:mod:`.attach`     the way in for users of megatron-core
:mod:`.support`    which versions and settings are supported; everything else is refused at start, by name
:mod:`.layout`     Megatron's process groups as holders of shards
:mod:`.optimizers` what the optimizers step on, and who holds it
:mod:`.adapter`    the moments of a step, reset, capture, restore
:mod:`.buckets`    what an interrupted step leaves in the gradient buckets
:mod:`.random`     the tracked random streams
:mod:`.cpu`        stand-ins for a GPU, for development only (``FR_MEGATRON_CPU=1``)
=================  =====================================================================================
"""

from __future__ import annotations

from fr_megatron import cpu

if cpu.wanted():
    cpu.install()

from fr_megatron.attach import attach

__all__ = ["attach"]

"""FlashRecovery for Megatron: a rank's death is survived in place, in every parallel layout.

With megatron-core and your own loop, in two lines::

    recovery = fr_megatron.attach(model, optimizer, scheduler)
    for step in recovery.steps(num_steps):
        with step:
            ...

========================== =============================================================================================
:mod:`.attach`             the way in for users of megatron-core
:mod:`.pretrain`           the way in for scripts that call Megatron-LM's ``pretrain``
:mod:`.lm`                 Megatron-LM's training loop, and the flag
:mod:`.support`            which versions and settings are supported; everything else is refused at start, by name
:mod:`.layout`             Megatron's process groups as holders of shards
:mod:`.optimizers`         what the optimizers step on, and which rank holds it
:mod:`.adapter`            the moments of a step, reset, capture, restore; ``adapter_for`` makes it
:mod:`.wrapper`            what the class around the model chunks decides; one file each:
:mod:`.buckets`            DistributedDataParallel
:mod:`.fsdp2`              TorchFullyShardedDataParallel
:mod:`.megatron_fsdp`      FullyShardedDataParallel
:mod:`.random`             the tracked random streams
:mod:`.own_loop`           what a script's own loop uses besides
:mod:`.elastic`            another number of replicas: what cannot follow, and what Megatron has noted of the size
:mod:`.replicas`           which ranks make up a replica, and which divide state among themselves
:mod:`.shard_layout`       how the distributed optimizer divides its state, in any size
:mod:`.joint_shard_layout` that of dense parameters and of experts as one, which several ranks of a replica share
:mod:`.reform`             buffers and distributed optimizer are rebuilt, in the same objects
:mod:`.trackers`           what layers sum up for the log
:mod:`.checkpoint`         the fallback checkpoint in Megatron's own format
:mod:`.pieces`             state as boxes of whole tensors, of which that consists
:mod:`.logical`            the same of each shard, for a running job that changes its layout
:mod:`.stand_ins`          a CPU in place of a GPU, for development only (``FR_MEGATRON_CPU=1``); not in a wheel
========================== =============================================================================================
"""

from __future__ import annotations

from flashrecovery.capabilities.patches import looked_at
from fr_megatron import stand_ins

if stand_ins.wanted() and not looked_at():
    stand_ins.install()

from fr_megatron.attach import attach
from fr_megatron.pretrain import pretrain, protect_loop

__all__ = ["attach", "pretrain", "protect_loop"]

"""FlashRecovery for DeepSpeed: a rank's death is survived in place, switched on by one key of the DeepSpeed config.

``{"flash_recovery": {"enabled": true}}`` in the config, and the script started by ``flashrecovery run``::

    engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
    data = engine.recovery.data(loader)
    for step in engine.recovery.steps(num_steps):
        with step:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(next(data))
                engine.backward(loss)
                engine.step()

Under ``flashrecovery run`` this package wraps ``deepspeed.initialize`` as soon as deepspeed is imported. An explicit
``import fr_deepspeed`` does the same, so that ``engine.recovery`` exists under every launcher; without
``flashrecovery run`` it does nothing but count steps.

==================== ============================================================================================
:mod:`.hook`         wraps ``deepspeed.initialize``
:mod:`.attach`       gives an engine its ``recovery``
:mod:`.config`       the ``flash_recovery`` block
:mod:`.patches`      what is changed inside DeepSpeed at run time
:mod:`.support`      which versions and settings are supported; everything else is refused at start, by name
:mod:`.adapter`      which adapter protects an engine
:mod:`.engine`       what all stages have in common: the moments of a step, counters, scaler, reset of the engine
:mod:`.calls`        the pipeline engine's ``train_batch`` and ``eval_batch``, protected in the script's own loop
:mod:`.checkpoint`   the fallback checkpoint in DeepSpeed's own format
:mod:`.pipeline`     the pipeline engine's schedule
:mod:`.layout`       which ranks hold a parameter, an expert's or another one; how a partition is named
:mod:`.elastic`      another number of replicas: what is refused, and how an engine follows
:mod:`.shard_layout` how ZeRO-1 and 2 divide their state; :mod:`.reform` rebuilds their optimizer
:mod:`.slices`       how ZeRO-3 divides its state; :mod:`.reform3` rebuilds its slices
:mod:`.experts`      mixture of experts: what is refused, and what an interrupted step leaves
:mod:`.backward`     what an interrupted backward pass leaves behind (ZeRO 1 to 3)
:mod:`.offload`      the optimizer on the CPU
:mod:`.beta_powers`  what DeepSpeed's Adam keeps in C++ on the CPU
:mod:`.activation`   activation checkpointing: what an interrupted pass leaves in its buffers
:mod:`.random`       the tracked random streams
:mod:`.stage0`       ZeRO-0: replicated parameters, fp32 or with fp32 masters
:mod:`.stage12`      ZeRO-1 and 2: flat partitions
:mod:`.stage3`       ZeRO-3: per-parameter slices
==================== ============================================================================================
"""

from __future__ import annotations

from flashrecovery.util import import_hooks
from fr_deepspeed.attach import attach
from fr_deepspeed.hook import install

__all__ = ["attach"]

import_hooks.install({"deepspeed": install})

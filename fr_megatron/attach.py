"""For users of megatron-core with a loop of their own: two lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrecovery import Recovery, init
from fr_megatron.support import check, check_version


def attach(model: Any, optimizer: Any, scheduler: Any = None, **settings: Any) -> Recovery:
    """Protect a model of megatron-core::

        recovery = fr_megatron.attach(model, optimizer, scheduler)
        data = recovery.data(loader)
        for step in recovery.steps(num_steps):
            with step:
                ...  # zero_grad_buffer(), forward_backward_func(...), optimizer.step(), scheduler.step()

    Args:
        model: a model chunk in Megatron's DistributedDataParallel, or the list of them (virtual pipeline).
        optimizer: of ``get_megatron_optimizer``.
        scheduler: an ``OptimizerParamScheduler``.
        settings: as of :func:`flashrecovery.init`, e.g. ``redundancy="neighbor"``.

    Without ``flashrecovery run`` the result does nothing but count steps.

    Raises:
        ConfigError: a setting is wrong.
        UnsupportedError: a version or setting of Megatron that cannot be protected, by name.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    recovery = init(**settings)
    if not recovery.enabled:
        recovery.register(model=chunks[0])
        return recovery
    import megatron.core

    from fr_megatron.adapter import MegatronAdapter

    check_version(megatron.core.__version__)
    check(chunks, optimizer)
    recovery.register_adapter(MegatronAdapter(chunks, optimizer, scheduler))
    return recovery

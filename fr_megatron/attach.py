"""The call for scripts that use megatron-core with their own loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from flashrecovery import Recovery, init
from flashrecovery.adapter.elastic import Forwards
from flashrecovery.adapter.loop import check_equal
from fr_megatron.elastic import batch_of, membership
from fr_megatron.support import check_inside


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
        ConfigError: a setting is wrong, or one of Megatron's or ours differs between the ranks.
        UnsupportedError: a version or setting of Megatron that cannot be protected, by name.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    recovery = init(**settings)
    changes = recovery.elastic is not None or recovery.parallelism is not None
    forwards = Forwards(chunks) if changes else None
    recovery.take_framework_batch(partial(batch_of, chunks, forwards))
    if not recovery.enabled:
        recovery.register(model=chunks[0])
        return recovery
    import megatron.core

    from fr_megatron.adapter import adapter_for
    from fr_megatron.own_loop import OwnLoop

    check_inside(megatron.core.__version__)
    _check_equal(chunks, optimizer, settings)
    groups = membership(chunks, optimizer) if recovery.elastic is not None else None
    recovery.register_adapter(adapter_for(chunks, optimizer, scheduler, OwnLoop(chunks), groups))
    return recovery


def _check_equal(chunks: list[Any], optimizer: Any, settings: dict[str, Any]) -> None:
    """Raises ConfigError if the ranks have been set up in different ways.

    Their models may be different ones (an encoder and a decoder): only replicas must have one configuration.
    """
    common = {"chunks": len(chunks), **settings}
    for part in (getattr(chunks[0], "ddp_config", None), getattr(optimizer, "config", None)):
        common.update(_fields(part))
    check_equal("settings", common)
    if hasattr(chunks[0], "dp_cp_group"):
        replicas = dist.get_process_group_ranks(chunks[0].dp_cp_group)
        check_equal("configurations of the model", _fields(chunks[0].config), among=str(replicas))


def _fields(config: Any) -> dict[str, Any]:
    return {f"{type(config).__name__}.{name}": value for name, value in vars(config).items()} if config else {}

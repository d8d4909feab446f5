"""Wraps ``deepspeed.initialize``, so that the engine it returns is protected if its config says so."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashrecovery.errors import RegistrationError
from fr_deepspeed import config as flash_config

if TYPE_CHECKING:
    from flashrecovery import Recovery

_MARK = "__flashrecovery_wrapped__"


def install(deepspeed: ModuleType) -> None:
    """Wrap ``deepspeed.initialize``; called with the module as soon as it has been imported. Idempotent."""
    original = deepspeed.initialize
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        attach(result[0])
        return result

    setattr(initialize, _MARK, True)
    deepspeed.initialize = initialize  # type: ignore[attr-defined]
    _without_shared_memory_op()


def attach(engine: Any) -> Recovery:
    """Give ``engine`` its ``recovery``: live if its config enables it under ``flashrecovery run``, else inert.

    Raises:
        ConfigError: the ``flash_recovery`` block is wrong.
        UnsupportedError: a version or setting that cannot be protected, by name.
        RegistrationError: the engine has a recovery already.
    """
    if "recovery" in vars(engine):
        raise RegistrationError("this engine has its recovery already")
    from flashrecovery import Recovery, init

    block = flash_config.parse(engine.config)
    recovery = init(**block.overrides()) if block.enabled else Recovery(None)
    if recovery.enabled:
        from fr_deepspeed.adapter import adapter_for

        recovery.register_adapter(adapter_for(engine), **_objects(engine))
        if engine.pipeline_parallelism:
            from fr_deepspeed.calls import ProtectedCalls

            ProtectedCalls(engine, recovery)
    else:
        recovery.register(model=engine)
    engine.recovery = recovery
    return recovery


def _objects(engine: Any) -> dict[str, Any]:
    return {} if engine.lr_scheduler is None else {"lr_scheduler": engine.lr_scheduler}


def _without_shared_memory_op() -> None:
    """DeepSpeed's shared-memory op for CPU is compiled when groups are made, and its segments are named by the first
    launch: a replacement waits in C++ for ever for segments that no survivor makes again. Only inference uses it."""
    from deepspeed.comm import torch as backend

    backend.build_shm_op = lambda: None

"""Gives an engine its ``recovery``: ``deepspeed.initialize`` calls it (:mod:`.hook`), or the script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashrecovery.errors import RegistrationError
from fr_deepspeed import config as flash_config

if TYPE_CHECKING:
    from flashrecovery import Recovery
    from fr_deepspeed.own_loops import EngineSteps

_newest: EngineSteps | None = None
"""The newest of the protected engines."""


def attach(engine: Any) -> Recovery:
    """Give ``engine`` its ``recovery``: live if its config enables it under ``flashrecovery run``, else inert.

    ``deepspeed.initialize`` does it. Only an engine that was made before this package was imported, or without
    ``deepspeed.initialize``, needs it from the script. Of a second call for the same engine nothing follows.

    Raises:
        ConfigError: the ``flash_recovery`` block is wrong.
        UnsupportedError: a version or setting that cannot be protected, by name.
        RegistrationError: the engine has taken a step already, or has another attribute of this name.
    """
    global _newest
    from flashrecovery import Recovery, init
    from flashrecovery.adapter.elastic import Forwards
    from fr_deepspeed.elastic import batch_of

    known = vars(engine).get("recovery")
    if isinstance(known, Recovery):
        return known
    if known is not None:
        raise RegistrationError(f"this engine has an attribute 'recovery' of type {type(known).__name__} already")
    block = flash_config.parse(engine.config)
    recovery = init(**block.overrides()) if block.enabled else Recovery(None)
    forwards = Forwards([engine]) if recovery.elastic is not None else None
    recovery.take_framework_batch(lambda: batch_of(engine, forwards))
    if recovery.enabled:
        _check_untouched(engine)
        from fr_deepspeed.adapter import adapter_for
        from fr_deepspeed.own_loops import EngineSteps, of_accelerate

        steps = None if engine.pipeline_parallelism else EngineSteps(engine, _newest)
        number = 1 if steps is None else steps.number
        recovery.register_adapter(adapter_for(engine), **_objects(engine, number))
        if number == 1 and (objects := of_accelerate()):
            recovery.register(**objects)
        if block.sequence_length is not None:
            recovery.report(tokens_per_step=engine.train_batch_size() * block.sequence_length)
        if steps is None:
            from fr_deepspeed.calls import ProtectedCalls

            ProtectedCalls(engine, recovery)
        else:
            _newest = steps
            recovery.protect_own_loops(steps)
    else:
        recovery.register(model=engine)
    engine.recovery = recovery
    return recovery


def _check_untouched(engine: Any) -> None:
    """Raises RegistrationError if the engine has trained: a replacement would repeat that part of the script alone."""
    # micro_steps is not in a checkpoint, so a loaded one does not count; a pipeline keeps its last loss instead.
    if engine.micro_steps > 0 or getattr(engine, "agg_train_loss", None) is not None:
        raise RegistrationError(
            "fr_deepspeed.attach() comes too late: this engine has trained already, and a replacement could not repeat "
            "that without its peers; attach before the first step, or `import fr_deepspeed` before deepspeed.initialize"
        )


def _objects(engine: Any, number: int) -> dict[str, Any]:
    """``number``: of this engine among those of the process, from 1 on."""
    name = "lr_scheduler" if number == 1 else f"lr_scheduler_{number}"
    return {} if engine.lr_scheduler is None else {name: engine.lr_scheduler}

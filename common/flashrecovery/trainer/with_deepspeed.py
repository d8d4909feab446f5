"""A Trainer that trains by a DeepSpeed engine, which ends a step itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flashrecovery import Recovery, init
from flashrecovery.errors import RegistrationError
from flashrecovery.trainer.state import StepResults, TrainerLoop, TrainerLoopAdapter, refused
from fr_deepspeed import config as flash_config


class DeepSpeedTraining:
    """What is trained, and how a step ends."""

    def __init__(self, trainer: Any, loop: TrainerLoop) -> None:
        self._trainer, self._loop = trainer, loop

    skips_ahead = False
    """The loop asks the engine between two calls, and that says what is right when it has its state."""

    @staticmethod
    def enabled(trainer: Any) -> bool:
        """Whether the config enables recovery, and ``flashrecovery run`` has started the script. Raises ConfigError,
        and RegistrationError if the engine is there already."""
        block = flash_config.parse(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        if not (block.enabled and init(**block.overrides()).enabled):
            return False
        if trainer.deepspeed is not None:
            raise RegistrationError(
                "protect(trainer) comes too late: the trainer has made its engine; call it before train()"
            )
        return True

    @property
    def ready(self) -> bool:
        """Whether the Trainer has made its engine."""
        return self._trainer.deepspeed is not None

    @property
    def model(self) -> Any:
        return self._trainer.deepspeed

    def open(self) -> tuple[Recovery, TrainerLoopAdapter]:
        """Register what the engine has not; the loop is about to begin."""
        engine = self._trainer.deepspeed
        recovery: Recovery = engine.recovery
        scheduler = self._take_scheduler(engine)
        adapter = _EngineLoopAdapter(self._loop, engine)
        recovery.register_adapter(adapter, **scheduler)
        return recovery, adapter

    def _take_scheduler(self, engine: Any) -> dict[str, Any]:
        """A scheduler that the Trainer would step itself is given to the engine, so that it is stepped within the step.
        Returns what has to be registered for it.

        Raises:
            UnsupportedError: a scheduler that is stepped with a metric.
        """
        from accelerate.utils import DeepSpeedSchedulerWrapper

        trainer = self._trainer
        scheduler = trainer.lr_scheduler
        if isinstance(scheduler, DeepSpeedSchedulerWrapper):
            return {}
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            raise refused(f"the scheduler {type(scheduler).__name__}")
        engine.lr_scheduler = scheduler
        trainer.lr_scheduler = DeepSpeedSchedulerWrapper(scheduler, [trainer.optimizer])
        trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
        return {"lr_scheduler": scheduler}

    def synchronised(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The engine knows by itself."""
        return contextlib.nullcontext()

    def finish(self, step: StepResults) -> None:
        """The engine has done it."""


class _EngineLoopAdapter(TrainerLoopAdapter):
    """With the gradient norm that the loop logs."""

    def __init__(self, loop: TrainerLoop, engine: Any) -> None:
        super().__init__(loop)
        self._engine = engine

    def capture_common(self) -> dict[str, Any]:
        norm = self._engine.get_global_grad_norm()
        return {"grad_norm": float(norm) if norm is not None else None}

    def restore_common(self, state: dict[str, Any]) -> None:
        self._engine._global_grad_norm = state["grad_norm"]

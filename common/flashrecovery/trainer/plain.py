"""A Trainer that trains by PyTorch itself: DistributedDataParallel, or FSDP2 with ``fsdp_config={"version": 2}``.

What the Trainer's loop does after the last micro-batch of a step (clip the gradients, step optimizer and schedule) is
done at the end of the protected call instead. When the loop comes to it, these methods only give the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from flashrecovery import Recovery, init
from flashrecovery.capabilities.of_trainer import STEP_END
from flashrecovery.errors import UnsupportedError
from flashrecovery.trainer.state import StepResults, TrainerLoop, TrainerLoopAdapter, refused

_TRAINS = ("MULTI_CPU", "MULTI_GPU", "FSDP")
"""Values of accelerate's ``DistributedType``."""


class PlainTraining:
    """What is trained, and how a step ends. Changes the Trainer at once, and its optimizer when it has one."""

    def __init__(self, trainer: Any, loop: TrainerLoop) -> None:
        self._trainer, self._step = trainer, loop.step
        self._loop = loop
        self._clip = _clipping(trainer, loop.step)
        self._rate: Callable[..., Any] = trainer._get_learning_rate
        self._optimize: Callable[..., Any]
        self._scheduler: Any
        trainer._get_learning_rate = self._learning_rate

    skips_ahead = True
    """A process can skip calls before it has this rank's state."""

    @staticmethod
    def enabled(trainer: Any) -> bool:
        """Whether ``flashrecovery run`` has started the script. Raises UnsupportedError for other kinds of training."""
        if not init().enabled:
            return False
        kind = trainer.accelerator.distributed_type.value
        if kind not in _TRAINS:
            raise UnsupportedError(f"the Trainer trains by {kind}; allowed: DEEPSPEED, {', '.join(_TRAINS)}")
        return True

    @property
    def ready(self) -> bool:
        """Whether the Trainer has made what it trains."""
        from accelerate.optimizer import AcceleratedOptimizer

        return isinstance(self._trainer.optimizer, AcceleratedOptimizer)

    @property
    def model(self) -> Any:
        return self._trainer.model_wrapped

    def open(self) -> tuple[Recovery, TrainerLoopAdapter]:
        """Register everything; the loop is about to begin."""
        trainer, recovery = self._trainer, init()
        scheduler = trainer.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or isinstance(
            scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
        ):
            raise refused(f"the scheduler {type(scheduler).__name__}")
        # The Trainer sets accelerate's counters before each micro-batch, so they are none of the state.
        optimizer = trainer.optimizer.optimizer
        recovery.register(
            model=self.model, optimizer=optimizer, lr_scheduler=scheduler, scaler=trainer.accelerator.scaler
        )
        adapter = _PlainLoopAdapter(self._loop)
        recovery.register_adapter(adapter)
        self._scheduler, self._optimize = scheduler, trainer.optimizer.step
        trainer.optimizer.step = _done
        trainer.lr_scheduler = trainer.callback_handler.lr_scheduler = _Stepped(scheduler)
        return recovery, adapter

    def synchronised(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Stands around one micro-batch, as in the Trainer's loop. ``last``: of its step."""
        accelerator = self._trainer.accelerator
        each = STEP_END.takes("methods") and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if last or each:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = accelerator.no_sync(model=self.model)
        return context

    def finish(self, step: StepResults) -> None:
        """What follows the last micro-batch, in the order of the Trainer's loop."""
        trainer = self._trainer
        step.clipped(self._clip(self.model))
        self._optimize()
        step.optimized(self._rate())  # before the schedule goes on
        if not trainer.accelerator.optimizer_step_was_skipped:
            self._scheduler.step()
        self.model.zero_grad()

    def _learning_rate(self) -> float | None:
        """The learning rate of the loop's current step; outside of the loop, the Trainer's value."""
        known = self._step.learning_rate
        rate: float = self._rate() if known is None else known
        return rate


def _clipping(trainer: Any, step: StepResults) -> Callable[[torch.nn.Module], Any]:
    """What clips the gradients and gives their norm, as the Trainer's loop does it, which finds it done from now on."""
    limit = trainer.args.max_grad_norm
    if STEP_END.takes("methods"):
        clip, norm = trainer._clip_grad_norm, trainer._get_grad_norm
        trainer._clip_grad_norm = lambda model: step.grad_norm
        trainer._get_grad_norm = lambda model, grad_norm=None: step.grad_norm
        return lambda model: norm(model, grad_norm=clip(model) if limit > 0 else None)
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = lambda *_, **__: step.grad_norm
    return lambda model: clip(model.parameters(), limit) if limit is not None and limit > 0 else None


def _done(*_: object, **__: object) -> None:
    """In the place of ``optimizer.step`` in the Trainer's loop: the protected call has made the step."""


_done._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else torch's schedules warn


class _Stepped:
    """A schedule that was stepped in the protected call."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_: object, **__: object) -> None:
        """It was."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _PlainLoopAdapter(TrainerLoopAdapter):
    """With what the loop logs of a step, and is known only after this rank's own state has been sealed."""

    def __init__(self, loop: TrainerLoop) -> None:
        super().__init__(loop)
        self._step = loop.step

    def capture_common(self) -> dict[str, Any]:
        norm = self._step.grad_norm
        return {"grad_norm": None if norm is None else float(norm), "learning_rate": self._step.learning_rate}

    def restore_common(self, state: dict[str, Any]) -> None:
        self._step.clipped(state["grad_norm"])
        self._step.optimized(state["learning_rate"])

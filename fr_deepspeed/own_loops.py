"""What a script's own loop (``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``) does with its steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from flashrecovery.capabilities.of_trainer import ACCELERATE, STATE
from flashrecovery.errors import UnsupportedError

_TRAINER = "transformers.trainer"


class Schedules:
    """Those that an Accelerator steps for a script's own loop: not the engine's own."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [schedule.state_dict() for schedule in self._schedules()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule, saved in zip(self._schedules(), state["schedules"], strict=True):
            schedule.load_state_dict(saved)

    def _schedules(self) -> list[Any]:
        prepared = self._accelerator._schedulers
        return [s.scheduler for s in prepared if type(s).__name__ != "DeepSpeedSchedulerWrapper"]


def of_accelerate() -> dict[str, Any]:
    """What counts for the engine that is being made, to be registered: the Accelerator that makes it in the functions
    that are running, and its schedules. Nothing if there is none, or a Trainer drives it."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1) if accelerator is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRAINER:
            return {}
        if not found and isinstance(made_by := frame.f_locals.get("self"), accelerator):  # type: ignore[arg-type]
            ACCELERATE.require((STATE,))
            found = {"accelerate": made_by, "accelerate_schedules": Schedules(made_by)}
        frame = frame.f_back
    return found


class EngineSteps:
    """Tells the last call of ``engine.step()`` of an accumulation from those before.

    Args:
        other: of the engine that was made before this one; a step ends with the steps of both.

    Raises:
        UnsupportedError: the two accumulate gradients differently: what one of them has accumulated would belong to no
            step of the other.
    """

    by_hand = (
        "write the three lines by hand: recovery = engine.recovery; for step in recovery.steps(total): with step: (the "
        "calls of one step, with its data from recovery.data(loader))"
    )

    def __init__(self, engine: Any, other: EngineSteps | None = None) -> None:
        self._engine = engine
        self._other = other
        self.number: int = 1 if other is None else other.number + 1
        if other is not None and engine.gradient_accumulation_steps() != other.accumulation:
            raise UnsupportedError(
                f"two engines, with gradient_accumulation_steps of {other.accumulation} and "
                f"{engine.gradient_accumulation_steps()}: a step must be one of both; give them the same, or leave "
                '"flash_recovery" out of the config of one of them'
            )
        self._whole_at: int | None = None  # the engine's count behind the newest step that was whole
        self._check: Callable[[], None] | None = None
        step = engine.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            if self._check is not None:
                self._check()
            whole = bool(engine.is_gradient_accumulation_boundary())
            result = step(*args, **kwargs)
            self._whole_at = engine.micro_steps if whole else None
            return result

        engine.step = stepped

    @property
    def accumulation(self) -> int:
        return int(self._engine.gradient_accumulation_steps())

    def check_first(self, check: Callable[[], None]) -> None:
        self._check = check

    def is_whole(self) -> bool:
        """Whether the step is complete, for any of the engines that have been stepped."""
        others = self._other is not None and self._other.is_whole()
        return self._is_whole() or others

    def _is_whole(self) -> bool:
        """Asked once for each call in the script's text. accelerate makes the engine's call in ``backward()``, and only
        in an accumulation's last round; in between a step may be interrupted, and the engine's count goes back."""
        at, self._whole_at = self._whole_at, None
        return at is not None and at == self._engine.micro_steps

    def prepare(self, frame: FrameType, *, last: bool) -> None:
        """``deepspeed.initialize`` has registered what there is."""

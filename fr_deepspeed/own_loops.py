"""What a script's own loop (``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``) does with its steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from flashrecovery.worker.data.accelerate import Counters

_TRAINER = "transformers.trainer"


class AccelerateState:
    """What an Accelerator counts for a script's own loop, and the schedules that it steps there."""

    def __init__(self, accelerator: Any) -> None:
        self._counters = Counters(accelerator)
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"counters": self._counters.state_dict(), "schedules": [s.state_dict() for s in self._schedules()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counters.load_state_dict(state["counters"])
        for schedule, saved in zip(self._schedules(), state["schedules"], strict=True):
            schedule.load_state_dict(saved)

    def _schedules(self) -> list[Any]:
        """Those that are not the engine's own."""
        prepared = self._accelerator._schedulers
        return [s.scheduler for s in prepared if type(s).__name__ != "DeepSpeedSchedulerWrapper"]


def accelerate_state() -> AccelerateState | None:
    """Of the Accelerator that is making an engine in the functions that are running; None if there is none, or a
    Trainer drives it."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    found: AccelerateState | None = None
    frame: FrameType | None = sys._getframe(1) if accelerator is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRAINER:
            return None
        if found is None and isinstance(made_by := frame.f_locals.get("self"), accelerator):  # type: ignore[arg-type]
            found = AccelerateState(made_by)
        frame = frame.f_back
    return found


class EngineSteps:
    """Tells the last call of ``engine.step()`` of an accumulation from those before."""

    by_hand = (
        "write the three lines by hand: recovery = engine.recovery; for step in recovery.steps(total): with step: (the "
        "calls of one step, with its data from recovery.data(loader))"
    )

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._whole_at: int | None = None  # the engine's count behind the newest step that was whole
        self.before_step: Callable[[], None] | None = None
        step = engine.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            if self.before_step is not None:
                self.before_step()
            whole = bool(engine.is_gradient_accumulation_boundary())
            result = step(*args, **kwargs)
            self._whole_at = engine.micro_steps if whole else None
            return result

        engine.step = stepped

    def is_whole(self) -> bool:
        """Asked once for each call in the script's text. accelerate makes the engine's call in ``backward()``, and only
        in an accumulation's last round; in between a step may be interrupted, and the engine's count goes back."""
        at, self._whole_at = self._whole_at, None
        return at is not None and at == self._engine.micro_steps

    def prepare(self, frame: FrameType, *, last: bool) -> None:
        """``deepspeed.initialize`` has registered what there is."""

"""What a script's own loop (``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``) does with its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class EngineSteps:
    """Tells the last call of ``engine.step()`` of an accumulation from those before."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._whole = False
        self.before_step: Callable[[], None] | None = None
        step = engine.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            if self.before_step is not None:
                self.before_step()
            self._whole = bool(engine.is_gradient_accumulation_boundary())
            return step(*args, **kwargs)

        engine.step = stepped

    def is_whole(self) -> bool:
        return self._whole

    def rounds(self) -> int:
        return int(self._engine.gradient_accumulation_steps())

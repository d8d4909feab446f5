"""What a script's own loop (``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``) does with its steps."""

from __future__ import annotations

import functools
from typing import Any


class EngineSteps:
    """Tells the last call of ``engine.step()`` of an accumulation from those before."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._whole = False
        step = engine.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._whole = bool(engine.is_gradient_accumulation_boundary())
            return step(*args, **kwargs)

        engine.step = stepped

    def is_whole(self) -> bool:
        return self._whole

    def rounds(self) -> int:
        return int(self._engine.gradient_accumulation_steps())

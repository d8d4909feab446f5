"""Wraps ``deepspeed.initialize``, so that the engine it returns is protected if its config says so."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from flashrecovery.errors import RegistrationError
from fr_deepspeed.attach import attach
from fr_deepspeed.patches import PATCHES

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
    deepspeed.DeepSpeedEngine.recovery = _NotAttached()
    PATCHES.apply()


class _NotAttached:
    """Takes the place of ``engine.recovery`` on the class, until an engine has its own."""

    def __get__(self, engine: Any, owner: type) -> _NotAttached:
        """Raises RegistrationError if an engine is asked that was never attached."""
        if engine is None:
            return self
        raise RegistrationError(
            "this engine has no recovery: it was made before fr_deepspeed was imported, or without "
            "deepspeed.initialize(); call fr_deepspeed.attach(engine) before its first step"
        )

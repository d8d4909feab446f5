"""Hooks of ours on a module of the script's, which may be copied and saved like any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class OwnHook:
    """Calls ``function``. In a copy of the module that has it (``copy.deepcopy(model)``, ``torch.save(model)``) it is
    one that does nothing, and to load that no package of ours is needed: what the function knows of is the process's
    own, and could not be copied."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and returns None

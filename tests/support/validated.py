"""The controller's machine looks after each event whether what it knows contradicts itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from flashrecovery.controller.machine import Machine

EVENTS = [name for name in vars(Machine) if name.startswith("on_")] + ["replan", "resize"]
"""Methods by which events come in; one may call another."""
_amid: WeakKeyDictionary[Machine, int] = WeakKeyDictionary()


def _validated(event: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(event)
    def validated(self: Machine, *args: Any, **options: Any) -> Any:
        _amid[self] = _amid.get(self, 0) + 1
        try:
            result = event(self, *args, **options)
        finally:
            _amid[self] -= 1
        if not _amid[self]:
            self.validate()
        return result

    return validated


def install() -> None:
    """From now on, in this process."""
    for name in EVENTS:
        event = getattr(Machine, name)
        if not hasattr(event, "__wrapped__"):
            setattr(Machine, name, _validated(event))

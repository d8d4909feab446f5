"""Counters, flags and scales that a framework keeps as attributes of its own objects."""

from __future__ import annotations

from typing import Any

_PLAIN = (bool, int, float, str, type(None))


def plain_fields(thing: Any) -> dict[str, Any]:
    """The attributes of ``thing`` that are plain values; ``vars(thing).update(...)`` restores them."""
    return {name: value for name, value in vars(thing).items() if isinstance(value, _PLAIN)}

"""What a model of auto_loops.py counts by. That file has no ``nonlocal``: there, no patch would be printed."""

from __future__ import annotations

from collections.abc import Callable


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count

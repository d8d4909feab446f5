"""The clock by which controller and agents measure, as an argument: tests and simulations bring their own.

A clock is a function without arguments that returns seconds. It never goes back; where it begins means nothing, and no
two processes compare theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def awake() -> float:
    """CLOCK_BOOTTIME: also the time counts that the host has slept, or leases would outlive a suspended machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)

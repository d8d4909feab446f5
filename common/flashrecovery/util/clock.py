"""The clock of leases: by it, agents, workers, electors and controllers measure for how long a node may go on, or a
controller decide, without hearing from the others.

CLOCK_BOOTTIME also counts the time for which a host was suspended. CLOCK_MONOTONIC does not: a virtual machine that was
paused would find its lease as good as before, although its ranks have been given away meanwhile. So whatever decides
which process may change state, give ranks away or lead is measured here (:mod:`flashrecovery.plan.membership.leases`).
Time-outs that only
say how long to be patient are measured by CLOCK_MONOTONIC: no one has waited while the host was suspended.

Where the clock begins means nothing, and no two hosts compare theirs.
"""

from __future__ import annotations

import time


def lease_clock_ns() -> int:
    """Nanoseconds. No system call: the kernel's vDSO answers."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def lease_clock() -> float:
    """Seconds."""
    return lease_clock_ns() / 1e9

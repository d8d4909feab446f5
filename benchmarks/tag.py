"""What a healthy step pays in the worker: one step tag, and all of a step's stores together. No processes needed."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import harness
from flashrecovery.runtime.page import Page

GOAL_US = 1.0


def nanoseconds(action: Callable[[int], object], calls: int, repeats: int) -> list[float]:
    """Time of one call, less that of the empty loop, once a repeat."""
    results = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for i in range(calls):
            action(i)
        middle = time.perf_counter_ns()
        for i in range(calls):
            _nothing(i)
        end = time.perf_counter_ns()
        results.append(((middle - start) - (end - middle)) / calls)
    return results


def _nothing(_: int) -> None:
    pass


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="fewer calls")
    args = flags.parse_args()
    calls, repeats = (20_000, 5) if args.quick else (200_000, 15)
    page = Page.create("benchmark")
    local_state = bytes(6 << 10)

    def step(i: int) -> None:
        page.set_tag(i)
        page.set_tag(-1)
        page.set_committed(i + 1, 0)

    harness.begin()
    measured = {
        "one step tag": nanoseconds(page.set_tag, calls, repeats),
        "all tags of a step": nanoseconds(step, calls, repeats),
        "rank-local state of 6 KiB": nanoseconds(
            lambda i: page.write_local_state(i, local_state), calls // 10, repeats
        ),
    }
    page.close()
    rows = [(name, harness.spread(values, 1e-3, 3)) for name, values in measured.items()]
    harness.table(f"Cost in the worker, {calls} calls, n = repeats", ("what", "us"), rows)
    median = statistics.median(measured["one step tag"]) / 1e3
    met = median <= GOAL_US
    print(f"goal: one step tag <= {GOAL_US} us: {median:.3f} us, {'met' if met else 'NOT MET'}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()

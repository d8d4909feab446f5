"""The FSDP example, in which rank 0 dies before its last all-reduce of one step.

With HSDP on 2 x 2 ranks, ranks 1 and 3 can then end their gradient synchronisation and rank 2 cannot: it lacks rank
0's part. Counting has to be exact, so the all-reduces of a step are counted in the step before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import train_fsdp
import training
from flashrecovery import groups, init

COUNTED, FATAL = 3, 4
_counts = {COUNTED: 0, FATAL: 0}


def _at_operation(_group: str, operation: str) -> None:
    step = _Log.current
    if step not in _counts or "reduce" not in operation or "scatter" in operation:
        return
    _counts[step] += 1
    if step == FATAL and _counts[FATAL] == _counts[COUNTED]:
        time.sleep(0.3)  # the peers have received all that was sent before
        os.kill(os.getpid(), signal.SIGKILL)


class _Log(training.StepLog):
    """Called at the end of each step's body: knows which step comes next."""

    current = 0

    def step(self, index: int, *args: object, **kwargs: object) -> None:
        super().step(index, *args, **kwargs)  # type: ignore[arg-type]
        _Log.current = index + 1


def main() -> None:
    """As the example."""
    training.StepLog = _Log  # type: ignore[misc]
    if os.environ["RANK"] == "0" and init().generation == 0:
        groups.set_operation_hook(_at_operation)
    train_fsdp.main()


if __name__ == "__main__":
    main()

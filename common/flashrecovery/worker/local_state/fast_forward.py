"""Calls that a process skips before its first step.

Where steps are a framework's calls (:mod:`flashrecovery.worker.framework_calls`), a process that fills a rank runs the
script's loop from its first call on and skips the calls that the job has completed. In a long job this takes longer
than a pause may. A process that is started beside training has the time: it skips up to where the others were when it
was ordered, and only then reports that it is ready. It skips the calls made meanwhile during the pause.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.state.version import VERSIONS_KEPT

_LEFT = VERSIONS_KEPT + 1
"""Number of calls left for later: the ranks may go back by some versions before the new process gets its state, and the
last skipped call returns to the script what the previous process got there."""


@dataclass(frozen=True)
class Ahead:
    """What may be skipped: calls before ``reached``, until ``until`` (CLOCK_MONOTONIC)."""

    reached: int = 0
    until: float = 0.0

    @staticmethod
    def of(told: pb.Ahead) -> Ahead:
        """From now on."""
        return Ahead(told.reached, time.monotonic() + told.for_s)

    def skips(self, number: int) -> bool:
        """Whether the call of this number is skipped now."""
        return number < self.reached - _LEFT and time.monotonic() < self.until

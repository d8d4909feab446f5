"""Is an error in a step the script's own, or the consequence of a stop that has come or is about to come?"""

from __future__ import annotations

import time
from collections.abc import Callable

from flashrecovery import groups
from flashrecovery.worker.control.control_thread import Control
from flashrecovery.worker.control.gate import Gate

_LONGEST_PAUSE_S = 0.1
"""A thread that sleeps for a millisecond on a busy host is back by then."""


class InterruptionClassifier:
    """Distinguishes errors that follow from a stop from the script's own, in one worker.

    Args:
        patience_s: how long a stop is waited for (``timeouts.peer_error_wait_s``).
        told: whether this process, or one that its script needs, has been asked to end.
    """

    def __init__(self, gate: Gate, control: Control, patience_s: float, told: Callable[[], bool]) -> None:
        self._gate = gate
        self._told = told
        self._control = control
        self._patience_s = patience_s

    def explain(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a stop, or the first sign of one. May wait for it."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return False
        return self._gate.stopped or self._follows(error)

    def _follows(self, error: BaseException) -> bool:
        """A failed collective is mostly a dead peer's: the controller is about to say stop. So it is where a scheduler
        has signalled all processes."""
        return (groups.follows_communication_error(error) or self._told()) and self.wait()

    def wait(self) -> bool:
        """Whether the stop comes in time. The clock stands while the word cannot come: while the agent hears no
        controller, and while this process is halted with its whole node (which one long pause in here shows). It also
        stops once the controller has sent hold: the waits between hold and stop have their own deadlines."""
        left_s, last = self._patience_s, time.monotonic()
        while not self._gate.stopped and left_s > 0:
            time.sleep(0.001)
            now = time.monotonic()
            if self._control.controller_heard and not self._gate.held:
                left_s -= min(now - last, _LONGEST_PAUSE_S)
            last = now
        return self._gate.stopped

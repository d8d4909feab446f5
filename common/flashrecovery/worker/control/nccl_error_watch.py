"""NCCL's asynchronous errors: a connection that has broken, without any process having died.

gloo raises such an error in the thread that communicates. NCCL lets the kernel wait on the device, and tells only what
asks (ProcessGroupNCCL::getError); torch's own watchdog, which asks, would end the process. So a thread asks, and if the
controller says nothing either for the time in which it would have noticed a death, gives up all communication. From
there on it is as with gloo: the training thread raises, and the process is replaced if it still hears of no stop.
"""

from __future__ import annotations

import threading
import time

from flashrecovery import groups
from flashrecovery.worker.control.gate import Gate

_PERIOD_S = 0.5


class NcclErrorWatch:
    """Watches for errors that NCCL reports, in one worker.

    Args:
        patience_s: how long a stop is waited for (``timeouts.peer_error_wait_s``).
        period_s: from one question to the next.
    """

    def __init__(self, gate: Gate, patience_s: float, period_s: float = _PERIOD_S) -> None:
        self._gate = gate
        self._patience_s = patience_s
        self._period_s = period_s
        self._thread = threading.Thread(target=self._run, name="flashrecovery-nccl-errors", daemon=True)
        self._seen_at: float | None = None

    def start(self) -> None:
        """Start asking, if there are NCCL groups."""
        if any(g.request.kind == "nccl" and g.size > 1 for g in groups.groups()):
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(self._period_s)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """``now``: seconds on the monotonic clock."""
        failed = [] if self._gate.stopped else groups.reported_errors()
        if not failed:
            self._seen_at = None
        elif self._seen_at is None:
            self._seen_at = now
        elif now - self._seen_at >= self._patience_s and not self._gate.stopped:
            groups.abandon(f"NCCL reports an error of the process groups {failed}, and no rank has died")
            self._seen_at = None

"""The worker's part of a quiet abort; the order is that of :mod:`flashrecovery.plan.quiet_abort`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flashrecovery.groups.accelerator import accelerator
from flashrecovery.plan.quiet_abort import AGREE_S, TRANSFER_S, Communicators
from flashrecovery.runtime.page import Page

_LOOK_S = 0.0005
_ABORTED_S = 30.0  # an abort that takes longer is reported by groups.drain()


class QuietAbort:
    """Says in the page how far this process is with its communicators, and waits for the others' word there.

    A ``groups.AbortOrder``."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._device = accelerator().current()

    def opened(self, generation: int) -> None:
        """Communicators have been made, by the calling thread."""
        # Of the thread that trains: the one that aborts may have another one.
        self._device = accelerator().current()
        self._page.set_communicators(Communicators.OPEN, generation)

    def before_aborts(self) -> None:
        """Nothing is launched any more. Returns when this process may abort."""
        page = self._page
        if page.communicators[0] is not Communicators.OPEN:
            return
        page.move_communicators(Communicators.OPEN, Communicators.STILL)
        drained = self._drained(TRANSFER_S)
        page.move_communicators(Communicators.STILL, Communicators.QUIET)
        deadline = time.monotonic() + AGREE_S
        while not drained and not page.may_abort and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def begun(self, aborting: Callable[[], bool]) -> None:
        """The aborts have begun; says so in the page when they are over."""

        def watch() -> None:
            deadline = time.monotonic() + _ABORTED_S
            while aborting() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if not aborting():
                self._page.move_communicators(Communicators.QUIET, Communicators.NONE)

        threading.Thread(target=watch, name="flashrecovery-aborts", daemon=True).start()

    def _drained(self, within_s: float) -> bool:
        """Whether everything queued on the device has happened. An event of each stream cannot be asked: NCCL's streams
        are its own."""
        if not accelerator().in_use():
            return True
        over = threading.Event()

        def synchronize() -> None:
            try:
                accelerator().synchronize(self._device)
            except RuntimeError:  # a device that fails runs nothing
                pass
            over.set()

        threading.Thread(target=synchronize, name="flashrecovery-drain", daemon=True).start()
        return over.wait(within_s)

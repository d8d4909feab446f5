"""A scheduler that ends a job signals all of its processes, in any order: ranks and the workers of their data loaders,
perhaps before the launcher. The state of the ranks can be saved only if they live until the launcher ends them.

So SIGTERM, if the script has no handler of its own for it, is noted in the page (``native/termination.h``), where the
agent sees it. And an error that follows from the death of a data loader's worker by SIGTERM does not end a rank before
that has been waited for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from flashrecovery.groups.native_build import loaded
from flashrecovery.runtime.page import TERMINATIONS_WORD, Page
from flashrecovery.worker.data.step_data import StepData
from flashrecovery.worker.exit.undisturbed import Outside


class LeavingNotice:
    """Has a notice of preemption come, to this node or to this process? For scripts that ask.

    From the first time on that it is asked, SIGUSR1 and SIGUSR2 are noted in place of ending the process, also in
    processes that it forks later (workers of data loaders), unless the script has its own handlers for them.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._asked = False

    @property
    def has_come(self) -> bool:
        """Two looks at memory."""
        if not self._asked:
            self._begin()
        return self._page.leaving

    def _begin(self) -> None:
        self._asked = True
        self._page.set_asks_leaving()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._page.set_leaving()


class Termination:
    """The signal handling of this process. ``streams``: what is read through ``recovery.data()``."""

    def __init__(self, page: Page, streams: Callable[[], Sequence[StepData]]) -> None:
        self._page, self._streams = page, streams
        module = loaded()
        self._notes: Callable[[], bool] | None = None
        if module is not None and module.note_termination(page.fd, TERMINATIONS_WORD):
            self._notes = module.notes_termination
            page.set_notes_terminations(True)

    def look(self) -> None:
        """Called at each commit: has the script, or torch's data loader, set its own handler since?"""
        if self._notes is not None:
            self._page.set_notes_terminations(self._notes())
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, Outside):
            signal.signal(signal.SIGCHLD, Outside(handler, self._script_sees_to_it))

    def _script_sees_to_it(self) -> bool:
        """A script that asks for notices can do so in the rest of its step when a worker of its loader gets SIGTERM."""
        return self._page.asks_leaving and self.has_come

    @property
    def has_come(self) -> bool:
        """This process, or a worker of one of its data loaders, got a signal to end."""
        return self._page.terminations > 0 or any(
            code == -signal.SIGTERM for stream in self._streams() for code in stream.exit_codes()
        )

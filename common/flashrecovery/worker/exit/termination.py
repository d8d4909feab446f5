"""A scheduler that ends a job signals all of its processes, in any order: ranks and the workers of their data loaders,
perhaps before the launcher. What the ranks hold can be kept only if they live until the launcher says so.

So SIGTERM, if the script has no handler of its own for it, is noted in the page (``native/termination.h``), where the
agent sees it. And an error that follows from the death of a data loader's worker by SIGTERM does not end a rank before
that has been waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from flashrecovery.groups.native_build import loaded
from flashrecovery.runtime.page import TERMINATIONS_WORD, Page
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.exit.undisturbed import Outside


class Termination:
    """Of this process. ``streams``: what is read through ``recovery.data()``."""

    def __init__(self, page: Page, streams: Callable[[], Sequence[DataStream]]) -> None:
        self._page, self._streams = page, streams
        module = loaded()
        self._notes: Callable[[], bool] | None = None
        if module is not None and module.note_termination(page.fd, TERMINATIONS_WORD):
            self._notes = module.notes_termination
            page.set_notes_terminations(True)

    def look(self) -> None:
        """Called at each commit: has the script, or torch's data loader, set a handler of its own since?"""
        if self._notes is not None:
            self._page.set_notes_terminations(self._notes())
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, Outside):
            signal.signal(signal.SIGCHLD, Outside(handler))

    @property
    def has_come(self) -> bool:
        """This process, or a worker of one of its data loaders, was told to end."""
        return self._page.terminations > 0 or any(
            code == -signal.SIGTERM for stream in self._streams() for code in stream.exit_codes()
        )

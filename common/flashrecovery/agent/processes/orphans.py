"""Processes that dead workers leave behind, such as those of their data loaders, and that became the agent's children.

An agent that has zygotes adopts them (``adopt_orphans``). They are killed with their worker's session, but keep their
entries in the kernel's table until their parent has asked for their end.
"""

from __future__ import annotations

import os


class Orphans:
    """Of workers whose sessions have been killed. A process group keeps its number for as long as anything is left of
    it, so a number is nobody else's before the group is empty."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def expect(self, group: int) -> None:
        """The worker that led this group is over."""
        self._groups.add(group)

    def reap(self) -> None:
        """Those that have ended by now. Never waits."""
        for group in list(self._groups):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._groups.discard(group)  # nothing of it is a child of this process

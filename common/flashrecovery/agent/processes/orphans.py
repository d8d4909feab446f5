"""Processes that dead workers leave behind, such as those of their data loaders, and that became the agent's children.

An agent that has zygotes adopts them (``adopt_orphans``). They are killed with their worker's session, but keep their
entries in the kernel's table until their parent has asked for their end.
"""

from __future__ import annotations

import os


class Orphans:
    """Processes left over from workers whose sessions were killed. A process group keeps its number until its last
    process is gone, so the number cannot be reused before the group is empty."""

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

"""The log of node failures: reads it at the start, and adds each failure of a node, on a separate thread,
because the file may be on a slow network file system. Without a file it does nothing.

A failure is written down a little later. Who ends a job tells all of its nodes, one after the other, and the first ones
to end look as if they had failed: so entries that are very new when the controller is asked to end are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from flashrecovery.controller.state.outbox import Blame
from flashrecovery.controller.storage.node_failure_file import Marks, add_marks, read_marks
from flashrecovery.plan.membership.node_failures import NodeMark, Rating, ratings

_SETTLE_S = 10.0
"""A scheduler that ends a job has told all nodes within this time."""


class NodeFailureLog:
    """The node failure log of one controller.

    Args:
        path: of the file; None: nothing is remembered.
        job: the job's name in the file.
        rated: called with the ratings of the nodes, at the start and after each mark.
        trouble: called with a text if the file is damaged, or cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        job: str,
        rated: Callable[[Mapping[str, Rating]], None],
        trouble: Callable[[str], None],
    ) -> None:
        self._path, self._job = path, job
        self._rated, self._trouble = rated, trouble
        self._pending: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None

    async def begin(self) -> None:
        """Read the file. A damaged one is set aside."""
        if self._path is None:
            return
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="node-memory")
        path = self._path

        def read() -> Marks:
            found = read_marks(path)
            return add_marks(path, ()) if found.damage else found

        await self._take(read)

    def remember(self, blame: Blame) -> None:
        """A node has failed."""
        if self._path is None or self._thread is None:
            return
        mark = NodeMark(time.time(), blame.node, blame.kind, self._job, blame.generation, blame.detail)
        task = asyncio.create_task(self._add(self._path, mark))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def told_to_end(self) -> None:
        """The job is being ended: what looks like a failure from now on may be none."""
        for task in self._pending:
            task.cancel()

    async def _add(self, path: Path, mark: NodeMark) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ending.wait(), _SETTLE_S)
        await self._take(lambda: add_marks(path, (mark,)))

    async def _take(self, work: Callable[[], Marks]) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as e:
            self._trouble(f"failures of nodes are not remembered: {self._path}: {e.strerror or e}")
            return
        if found.damage:
            self._trouble(found.damage)
        self._rated(ratings(found.marks, time.time()))

    async def end(self, timeout_s: float) -> None:
        """The job is over: write down what has not been, and wait for that."""
        self._ending.set()
        if self._pending:
            await asyncio.wait(self._pending, timeout=timeout_s)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

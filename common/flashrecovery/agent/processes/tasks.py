"""The agent's background tasks. None fails unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """``on_error`` gets what the first task that fails has raised, and what others raise after it."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run ``coroutine`` in the background, to its end or to :meth:`cancel`."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """Watch a task that other code has started, and ends."""
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    def cancel(self) -> None:
        """All but the one that calls this."""
        for task in self._running:
            if task is not asyncio.current_task():
                task.cancel()

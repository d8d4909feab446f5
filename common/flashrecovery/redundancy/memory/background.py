"""One thread that runs one job at a time beside training."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_EXIT_S = 2.0
"""Seconds that process exit waits for a job if this was not closed, because the script ended within a step."""


class Background:
    """A daemon thread, started with the first job. An error of a job is kept until it is taken; none is lost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` next. The previous one must have ended (see :meth:`wait`)."""
        with self._changed:
            if self._busy or self._closed:
                raise RuntimeError(f"{self._name}: {'closed' if self._closed else 'the previous job is still running'}")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            self._job = job
            self._busy = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True as soon as no job is running, False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def error(self) -> BaseException | None:
        """What the last job raised."""
        return self._error

    def clear_error(self) -> None:
        self._error = None

    def close(self, timeout_s: float) -> bool:
        """End the thread after its job. False if that takes longer than ``timeout_s``; it dies with the
        process.
        """
        atexit.unregister(self._at_exit)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    def _at_exit(self) -> None:
        # In a forked child it is not alive, and may hold the lock for ever.
        if self._thread is not None and self._thread.is_alive():
            self.close(_EXIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                job, self._job = self._job, None
            if job is None:
                return
            error: BaseException | None = None
            try:
                job()
            except BaseException as e:  # noqa: BLE001 - kept for the thread that asked for the job
                error = e
            del job
            with self._changed:
                self._error = error if error is not None else self._error
                self._busy = False
                self._changed.notify_all()

"""Step tags must follow the device, not the host that runs ahead of it.

On CUDA the host queues kernels and collectives and goes on. If a collective is aborted, the kernels queued behind it
run all the same, with garbage. So the host waits for the device where a tag says something about the state: right
before the first mutation (the point of FlashRecovery's barrier: the gradients are whole), and before the commit of a
step that has communicated after it (an all-gather of updated parameters: they are whole). A stop waits for the device
before it says which version is live. Nothing of this costs anything on CPU.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashrecovery import groups
from flashrecovery.errors import DrainError
from flashrecovery.groups.accelerator import accelerator


class DeviceClock:
    """Synchronises with this process's accelerator, if it uses one."""

    def __init__(self) -> None:
        self._waits_since: float | None = None

    @property
    def runs_behind(self) -> bool:
        """Whether the host runs ahead of the device: then a collective may be aborted without an error in the
        script."""
        return accelerator().in_use()

    def before_mutation(self) -> None:
        """Waits until everything queued so far has happened, the gradient synchronisation included."""
        if self.runs_behind:
            with self._waiting():
                accelerator().synchronize_stream()

    def until(self, wait: Callable[[], None]) -> None:
        """Waits for the device by ``wait``."""
        with self._waiting():
            wait()

    def before_commit(self) -> None:
        """Waits until everything queued so far, on whatever stream, has happened: what was communicated after the
        mutation, too."""
        if self.runs_behind:
            with self._waiting():
                accelerator().synchronize()

    @property
    def blocked_s(self) -> float:
        """Seconds for which the training thread has been waiting for the device here; 0 if it is not."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def settle(self, deadline_s: float) -> None:
        """Waits until everything queued on the device has happened; called when a stopped step has unwound and its
        collectives have been aborted. Raises DrainError after ``deadline_s`` seconds: something on the device waits for
        ever."""
        if not self.runs_behind:
            return
        device = accelerator().current()
        failures: list[BaseException] = []

        def synchronize() -> None:
            try:
                accelerator().synchronize(device)
            except RuntimeError as error:  # an error of the device is raised here, whichever kernel has made it
                failures.append(error)

        waiter = threading.Thread(target=synchronize, name="flashrecovery-settle", daemon=True)
        waiter.start()
        waiter.join(deadline_s)
        if waiter.is_alive():
            raise DrainError(f"the device was not idle {deadline_s:g} s after the abort (timeouts.drain_s)")
        if failures:
            raise DrainError(f"the device cannot go on: {failures[0]}") from failures[0]

    def make_room(self) -> None:
        """If little memory is left on the device, give back what torch has free but keeps for itself: the buffers of
        new communicators are not taken from torch's."""
        if self.runs_behind and accelerator().free_bytes() < groups.ENOUGH_FREE_BYTES:
            gc.collect()  # what only cycles hold (an exception and its frames)
            accelerator().empty_cache()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

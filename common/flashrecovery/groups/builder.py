"""Connects groups on a separate thread, so that the thread that waits for them can be stopped.

Connecting blocks until every peer takes part; a peer that dies meanwhile would block it until a time-out.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrecovery.groups.inner import Inners, make_inners
from flashrecovery.groups.state import STATE
from flashrecovery.groups.torch_private import GroupRequest, Store

_LOOK_S = 0.05  # a wake-up that was missed is noticed after this time


@dataclass(frozen=True)
class Part:
    """A group to connect. ``store``: gets its store, which may mean to connect to a server first; ``timeout``: of its
    operations; ``device``: see :func:`~.inner.make_inners`."""

    request: GroupRequest
    store: Callable[[], Store]
    timeout: datetime.timedelta
    device: torch.device | None = None


class Builder(threading.Thread):
    """Makes the inner backends of ``parts``, one after the other."""

    def __init__(self, native: Any, parts: Sequence[Part], deadline: float) -> None:
        """``deadline`` is on the monotonic clock, seconds."""
        super().__init__(name="flashrecovery-connect", daemon=True)
        self.seconds: dict[str, float] = {}
        self.current = parts[0].request.name if parts else ""
        self.error: Exception | None = None
        self.late = False
        """The error came when the time was up: most likely it is a wait that has ended with it."""
        self.finished = False
        self._native, self._parts, self._deadline = native, parts, deadline
        self._built: dict[str, Inners] = {}
        self._given_up = False
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            for part in self._parts:
                if self._given_up:
                    return
                began = time.monotonic()
                request = part.request
                self.current = request.name
                store = part.store()
                left = datetime.timedelta(seconds=max(self._deadline - began, 0.05))
                self._keep(request.name, make_inners(self._native, request, store, part.timeout, left, part.device))
                self.seconds[request.name] = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            self.error, self.late = error, time.monotonic() >= self._deadline - _LOOK_S
        self.finished = True
        STATE.changed.set()

    def wait(self, epoch: int) -> None:
        """Wait until the thread has finished, the deadline has passed, or ``STATE.abandonments`` is no longer
        ``epoch``."""
        while not self.finished and STATE.abandonments == epoch and time.monotonic() < self._deadline:
            STATE.changed.wait(timeout=_LOOK_S)
            STATE.changed.clear()

    def take(self, name: str) -> Inners:
        """What was built for group ``name``; the caller owns it."""
        with self._lock:
            return self._built.pop(name)

    def give_up(self) -> None:
        """End as soon as possible, and drop what was made and what still comes."""
        with self._lock:
            self._given_up = True
        self._drop_all()

    def _keep(self, name: str, inners: Inners) -> None:
        with self._lock:
            self._built[name] = inners
        if self._given_up:
            self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            built, self._built = self._built, {}
        for inners in built.values():
            while inners.backends:
                self._native.discard(inners.backends.pop()[1])

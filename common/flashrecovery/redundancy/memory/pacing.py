"""How much time and network this rank's copies have, as the last copies have shown.

:mod:`flashrecovery.plan.pacing` decides what follows from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from flashrecovery.plan import pacing


class Network(Protocol):
    """What holds messages back. Messages with tags from ``first_tag`` on are. A protocol, as process groups lie in
    another folder of the same layer (:class:`flashrecovery.groups.pace.PacedNetwork`)."""

    first_tag: int

    def begin(self, nbytes: int, window_s: float, rate: float) -> None:
        """A copy begins, which is not needed for ``window_s`` seconds; ``rate`` in bytes a second, 0 if unknown."""

    def hurry(self) -> None:
        """The copy is needed now."""

    def held_s(self) -> float:
        """Seconds for which the last copy has been held back; the sum over its streams."""


class Pacing:
    """Decides how fast one rank's copies go. ``committed`` and ``needed`` belong to the training thread, ``sending`` to
    the one that copies."""

    def __init__(self, network: Network, clock: Callable[[], float] = time.monotonic) -> None:
        self.first_tag = network.first_tag
        self._network = network
        self._clock = clock
        self._began = clock()
        self._needed = True
        self._windows: deque[float] = deque(maxlen=pacing.STEPS_LOOKED_AT)
        self._rates: deque[float] = deque(maxlen=pacing.STEPS_LOOKED_AT)

    def committed(self) -> None:
        """A version has been yielded, and its copy begins."""
        self._began, self._needed = self._clock(), False

    def needed(self) -> None:
        """Training waits for the copy of the last version."""
        if self._needed:
            return
        self._needed = True
        self._windows.append(self._clock() - self._began)
        self._network.hurry()

    @contextmanager
    def sending(self, nbytes: int, streams: int) -> Iterator[None]:
        """Times the sending of the last version's copy: ``nbytes`` on that many streams. An exception teaches
        nothing."""
        since = self._clock()
        window = pacing.window_s(list(self._windows)) - (since - self._began)
        self._network.begin(nbytes, max(window, 0.0), pacing.rate(list(self._rates)))
        if self._needed:  # meanwhile
            self._network.hurry()
        yield
        taken = self._clock() - since - self._network.held_s() / streams
        if taken > 0:
            self._rates.append(nbytes / taken)

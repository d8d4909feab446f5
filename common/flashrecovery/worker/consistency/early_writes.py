"""Whether a script changes tensors of the shards between the yield of a step and its mutation.

Then an interrupted step leaves a state that is no version, although its optimizer has not begun.
"""

from __future__ import annotations

from typing import Any

from flashrecovery.contract import roles
from flashrecovery.groups.accelerator import on_device
from flashrecovery.state.digest import shard_digests
from flashrecovery.worker.registry import Registry

COMPARED_BYTES = 4 << 30
"""Up to so much state is compared by content in the first step."""


class EarlyWriteDetector:
    """Watches one rank's tensors, from the last :meth:`begin` on."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._marks: list[Any] = []

    def begin(self) -> None:
        """A step is yielded."""
        self._marks = self._look()

    def seen(self) -> bool:
        """Whether the tensors have been changed since :meth:`begin`."""
        return self._marks != self._look()

    def _look(self) -> list[Any]:
        marks = [roles.touch_mark(a) for a in self._registry.adapters]
        if not self._registry.habits.known:
            # Once also by content: what a script writes through `.data` moves no version counter.
            tensors = [t for shard in self._registry.tensor_shards() for t in shard.tensors().values()]
            if sum(t.nbytes for t in tensors) <= COMPARED_BYTES:
                marks.append(shard_digests({"all": (tensors, None)}, on_device))
        return marks

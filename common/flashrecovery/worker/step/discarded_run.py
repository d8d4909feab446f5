"""What a script does below the ``with step:`` block of a discarded attempt, and how it is taken back.

A step that is stopped unwinds to the end of its block, where the recovery takes place; but nothing can keep the script
from running on to its next step. All that it changes there belongs to no version. So from the end of the block to the
next yield its collectives are answered locally (its peers do not make them, or make them later), its data is what it
was given before, and then everything is brought back to what it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashrecovery import groups
from flashrecovery.errors import RestoreError
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.state.shard import Shard
from flashrecovery.worker.data.step_data import StepData
from flashrecovery.worker.local_state.version_counters import glance_at_tensors

COPIED_BYTES = 4 << 30
"""Up to so much state is copied; of more it is only seen whether it has been changed."""


class DiscardedRun:
    """Begins when it is made, with the state that has just been restored as ``version``.

    Args:
        shards: all of this rank's that consist of tensors.
        streams: the script's data.
    """

    def __init__(self, shards: Sequence[Shard], streams: Sequence[StepData], version: int) -> None:
        self._shards = shards
        self._streams = streams
        self._version = version
        self._seen = self._look()
        self._copy: PreStepCopy | None = None
        if sum(t.nbytes for t in self._tensors()) <= COPIED_BYTES:
            self._copy = PreStepCopy(shards, brief=True)
            self._copy.hold(version)
        groups.stand_in(True)
        self._void(True)

    def _void(self, void: bool) -> None:
        for stream in self._streams:
            stream.set_void(void)

    def take_back(self) -> None:
        """Bring the tensors back. Raises RestoreError if they have been changed and were too large to be copied."""
        if self._copy is not None:
            for shard in self._shards:
                self._copy.restore(self._version, shard)
            self._copy.close()
        elif self._look() != self._seen:
            raise RestoreError(
                "the script has changed registered parameters below the `with step:` block of an attempt that did "
                f"not count, and at most {COPIED_BYTES >> 30} GiB of them are copied to bring them back; change them "
                "inside of the block"
            )

    def end(self) -> None:
        """From now on the groups answer again, and data is data."""
        groups.stand_in(False)
        self._void(False)

    def _tensors(self) -> list[torch.Tensor]:
        return [t for shard in self._shards for t in shard.tensors().values()]

    def _look(self) -> int:
        return glance_at_tensors(self._tensors(), 0)

"""How a framework writes its state into a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch


class CheckpointFormat(ABC):
    """A framework's own checkpoint format, in which the fallback checkpoints are then written, for its users' tools.

    Attributes:
        name: of the format; a checkpoint is only loaded by the format that wrote it.
    """

    name: str

    def layout(self) -> str:
        """How the state is sharded among the ranks, equal on all of them. What ranks of another layout have
        written is loaded, too, without what is a rank's own (random numbers, data position). "": it is not."""
        return ""

    @abstractmethod
    def capture(
        self, directory: Path, tag: str, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[Path], None]:
        """Copies this rank's part of the live state, at a step boundary, without communication.

        Args:
            directory, tag: the checkpoint will be found in ``directory/tag``.
            copy: gives the copy in host memory of a live tensor.

        Returns:
            What writes the part into a directory, which will be moved there when all ranks have done so. Another thread
            calls it. What it has written is durable when it returns. DCP checkpoints in subdirectories
            ``<name>-<rank>`` (not ``part-``) become parts of the one in the directory.
        """

    @abstractmethod
    def load(self, directory: Path, tag: str) -> None:
        """Make ``directory/tag`` the live state. All ranks call it at the same time, with groups that work.

        Raises:
            RestoreError: it cannot be read.
        """

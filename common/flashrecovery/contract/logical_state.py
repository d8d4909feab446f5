"""A framework's state in any parallel layout: the contract of re-planning for adapters.

An adapter that implements :class:`LogicalState` says of each of its shards of which logical tensors it is
(:mod:`flashrecovery.plan.reshard.logical`), and brings a process of another layout to that state. The core does the
rest: which rank writes what, where it is kept while the workers are re-created, and which boxes each of them reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flashrecovery.plan.reshard.logical import Description, ShardParts
from flashrecovery.redundancy.memory.staged_files import StagedFiles

__all__ = ["LogicalState"]


class LogicalState(ABC):
    """The state of one adapter's model and optimizer. Abstract, as the frameworks' adapters lie above."""

    @abstractmethod
    def describe(self) -> Description:
        """The logical tensors that each of this rank's shards belongs to. Without communication, before the first step.

        Raises UnsupportedError, which names what cannot be described.
        """

    def sharded(self) -> Mapping[str, ShardParts]:
        """The logical tensors, without that sharding, of each tensor that the replicas divide among themselves
        (:class:`~.shard_layout.ShardLayout`), what is no optimizer state: by the tensors' names. Without
        communication, before the first step."""
        return {}

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """The layout that this job has, and what the model allows: the fields of
        :class:`~flashrecovery.plan.strategy.relayout.LayoutFacts`, but for the batch. The same on all ranks."""

    def check_common(self, common: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """``common``: what the adapter has captured that is the same on all ranks, about to be written for another
        layout. Raises RestoreError if something of it could not be everybody's there."""

    @abstractmethod
    def read(self, staging: StagedFiles) -> int:
        """Bring all shards of this rank to what another layout's ranks have written. Returns how many bytes were read.

        Raises RestoreError.
        """

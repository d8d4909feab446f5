"""Where this node keeps state while the job changes its layout: its memory, and what comes from other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from flashrecovery.agent.peers.staging_transfer import StagingTransfer
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.agent.stores.staging_memory import StagingMemory
from flashrecovery.config import RunConfig
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access


class StagingArea:
    """The staging area of one agent. Empty, and of no effect, where the layout of the job does not change.

    Attributes:
        kept: which state is there; a controller that comes while the ranks of another layout start hears of it.
    """

    def __init__(self, config: RunConfig, access: Access, tasks: Tasks, *, own_processes: bool) -> None:
        """``own_processes``: the agent starts the ranks itself. Raises ConfigError."""
        self._tasks = tasks
        self.kept: pb.StagingKept | None = None
        self._memory: StagingMemory | None = None
        self._transfer: StagingTransfer | None = None
        if config.parallelism is None:
            return
        if not own_processes:
            raise ConfigError(
                "parallelism where a launcher has started the ranks (adopt, Ray): ranks that `flashrecovery run` "
                "starts itself are allowed"
            )
        self._memory = StagingMemory()
        self._transfer = StagingTransfer(self._memory.path, access)

    @property
    def path(self) -> Path | None:
        """Its directory; None: there is none."""
        return None if self._memory is None else self._memory.path

    def env(self) -> Mapping[str, str]:
        """For the workers."""
        return {} if self._memory is None else self._memory.env()

    async def bring(self, wanted: pb.StagingWanted) -> pb.StagingThere | None:
        """Get what a worker of the new layout needs from where the old one's ranks have written it."""
        if self._transfer is None:
            return None
        return pb.StagingThere(number=wanted.number, error=await self._transfer.bring(wanted))

    def start_again(self) -> None:
        """All ranks start again: a source that sent damaged data is not used again."""
        if self._transfer is not None:
            self._transfer.forget()

    def remember_kept(self, kept: pb.StagingKept) -> None:
        """Which state is there, as the controller says."""
        self.kept = kept

    def drop(self) -> None:
        """What is there is of no use any more."""
        self.kept = None
        if self._memory is not None and self._transfer is not None:
            give_back = self._memory.drop()
            self._transfer.dropped()
            # Beside the loop: heartbeats and leases wait for nothing.
            self._tasks.start(asyncio.to_thread(give_back))

    def close(self) -> None:
        """The agent ends."""
        if self._memory is not None:
            self._memory.close()

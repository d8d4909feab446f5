"""Each rank's set-up log on a second node, for when its own is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from flashrecovery.access import Access
from flashrecovery.agent.peers import NOT_HANDED_OVER, fetch_from, keep_there, said_by
from flashrecovery.agent.process import WorkerProcess
from flashrecovery.proto import flashrecovery_pb2 as pb

log = logging.getLogger("flashrecovery")


class SetupLogs:
    """Remembers which set-up log was given to which node."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._kept: dict[int, tuple[int, str]] = {}  # rank -> (pid whose log it is, keeper)
        self._lock = asyncio.Lock()

    async def spread(self, table: pb.RankTable, processes: Mapping[int, WorkerProcess], here: str) -> None:
        """Give the log of each rank of this node to the agent of its neighbour, unless that has it already.

        A keeper that cannot be reached is about to be found lost; the next table names another one.
        """
        entries = {e.rank: e for e in table.ranks}
        if not entries:
            return
        async with self._lock:
            for rank, process in list(processes.items()):
                keeper = entries.get((rank + table.stride) % table.world_size)
                if keeper is None or not keeper.peer or keeper.node == here:
                    continue
                data = process.page.read_setup_log() if not process.dead else None
                if data is None or self._kept.get(rank) == (process.pid, keeper.peer):
                    continue
                try:
                    await keep_there(keeper.peer, self._access, rank, data)
                except NOT_HANDED_OVER as e:
                    log.warning("the set-up log of rank %d is not kept at %s: %s", rank, keeper.peer, said_by(e))
                    continue
                self._kept[rank] = (process.pid, keeper.peer)

    async def fetch(self, keeper: str, rank: int) -> bytes:
        """Raises as :func:`fetch_from`."""
        return await fetch_from(keeper, self._access, rank)

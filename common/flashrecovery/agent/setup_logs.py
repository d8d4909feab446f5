"""Each rank's set-up log on other nodes, for when its own is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from flashrecovery.access import Access
from flashrecovery.agent.peers import NOT_HANDED_OVER, fetch_from, keep_there, said_by
from flashrecovery.agent.process import WorkerProcess
from flashrecovery.plan.placement import setup_log_keepers_among
from flashrecovery.proto import flashrecovery_pb2 as pb

log = logging.getLogger("flashrecovery")


class SetupLogs:
    """Remembers which set-up log was given to which node."""

    def __init__(self, access: Access, kept: dict[int, bytes] | None = None) -> None:
        """``kept``: the logs that this agent gives to others."""
        self._access = access
        self.kept = {} if kept is None else kept
        self._kept: dict[tuple[int, str], int] = {}  # (rank, keeper) -> pid whose log it is
        self._lock = asyncio.Lock()

    async def spread(self, table: pb.RankTable, processes: Mapping[int, WorkerProcess], here: str) -> None:
        """Give the log of each rank of this node to the agents that keep it, unless they have it already.

        A keeper that cannot be reached is about to be found lost; the next table names another one.
        """
        entries = {e.rank: e for e in table.ranks}
        if not entries:
            return
        nodes = {e.rank: e.node for e in table.ranks}  # also the ranks' that keep them
        async with self._lock:
            for rank, process in list(processes.items()):
                keepers = setup_log_keepers_among(rank, table.stride, table.world_size, {**nodes, rank: here})
                peers = dict.fromkeys(entries[k].peer for k in keepers if entries[k].peer)
                wanting = [peer for peer in peers if self._kept.get((rank, peer)) != process.pid]
                data = process.page.read_setup_log() if wanting and not process.dead else None
                if data is not None:
                    for peer in wanting:
                        await self._give(peer, rank, data, process.pid)

    async def _give(self, peer: str, rank: int, data: bytes, pid: int) -> None:
        try:
            await keep_there(peer, self._access, rank, data)
        except NOT_HANDED_OVER as e:
            log.warning("the set-up log of rank %d is not kept at %s: %s", rank, peer, said_by(e))
        else:
            self._kept[rank, peer] = pid

    def keep(self, rank: int, log: bytes) -> None:
        """The rank leaves the job; when it comes back, here or on another node, it needs its log."""
        self.kept[rank] = log

    async def fetch(self, keepers: Sequence[str], rank: int) -> bytes | str:
        """The log of ``rank``, from the first of these agents that has it; in words why none has given it."""
        said = []
        for keeper in keepers:
            try:
                return await fetch_from(keeper, self._access, rank)
            except NOT_HANDED_OVER as e:
                said.append(f"{keeper} was to have them: {said_by(e)}")
        return "; ".join(said)

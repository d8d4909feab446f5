"""Each rank's set-up log on other nodes, for when its own is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from flashrecovery.agent.peers.client import NOT_HANDED_OVER, KeptLog, fetch_from, keep_there, said_by
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.plan.membership.placement import setup_log_keepers_among
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.rpc.channel import Access

log = logging.getLogger("flashrecovery")


class SetupLogs:
    """Keeps set-up logs for others, and remembers which one was given to which node."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._kept: dict[int, KeptLog] = {}  # by rank
        self._given: dict[tuple[int, str], tuple[int, int]] = {}  # (rank, keeper) -> attempt, pid whose log it is
        self._lock = asyncio.Lock()

    async def spread(
        self, table: pb.RankTable, processes: Mapping[int, WorkerProcess], here: str, members: Collection[int] = ()
    ) -> None:
        """Send the log of each rank of this node to the agents that keep it, unless they have it already. A rank that
        has left the job (it is not among the ``members``) has no node: an agent that keeps its log sends it on.

        A keeper that cannot be reached is about to be found lost; the next table names another one.
        """
        entries = {e.rank: e for e in table.ranks}
        if not entries:
            return
        nodes = {e.rank: e.node for e in table.ranks}  # also the ranks' that keep them

        def peers_of(rank: int) -> list[str]:
            keepers = setup_log_keepers_among(rank, table.stride, table.world_size, {**nodes, rank: here})
            return list(dict.fromkeys(entries[k].peer for k in keepers if entries[k].peer))

        async with self._lock:
            for rank, process in list(processes.items()):
                whose = process.attempt, process.pid
                wanting = [peer for peer in peers_of(rank) if self._given.get((rank, peer)) != whose]
                data = process.page.read_setup_log() if wanting and not process.dead else None
                if data is not None:
                    for peer in wanting:
                        await self._give(peer, rank, data, whose)
            left = [] if not members else [rank for rank in self._kept if rank not in {*members, *processes}]
            for rank in left:
                kept = self._kept[rank]
                for peer in peers_of(rank):
                    if self._given.get((rank, peer), (-1, 0))[0] < kept.attempt:
                        await self._give(peer, rank, kept.data, (kept.attempt, 0))

    async def _give(self, peer: str, rank: int, data: bytes, whose: tuple[int, int]) -> None:
        try:
            await keep_there(peer, self._access, rank, data, whose[0])
        except NOT_HANDED_OVER as e:
            log.warning("the set-up log of rank %d is not kept at %s: %s", rank, peer, said_by(e))
        else:
            self._given[rank, peer] = whose

    def keep(self, rank: int, log: bytes, attempt: int) -> None:
        """For another node, or for a rank that leaves the job: when it comes back, anywhere, it needs its log."""
        kept = self._kept.get(rank)
        if kept is None or attempt >= kept.attempt:  # else its number is another one's in a newer start
            self._kept[rank] = KeptLog(attempt, log)

    def forget(self, *, but: int) -> None:
        """Forget the logs of all starts except this attempt. A node without a rank of a new layout may keep that one's
        already."""
        for rank in [rank for rank, log in self._kept.items() if log.attempt != but]:
            del self._kept[rank]

    def own(self, rank: int, attempt: int, living: Collection[WorkerProcess] = ()) -> bytes | None:
        """The log of ``rank`` that this agent keeps, of this start of the job; also that of a rank that lives here: one
        that no launch has had needs it. ``living``: the processes that fill ranks here, whose pages can be read."""
        process = next((p for p in living if p.place == rank and p.attempt == attempt), None)
        found = None if process is None else process.page.read_setup_log()
        if found is not None:
            return found
        kept = self._kept.get(rank)
        return kept.data if kept is not None and kept.attempt == attempt else None

    async def fetch(self, keepers: Sequence[str], rank: int, attempt: int) -> bytes | str:
        """The log of ``rank``, from the first of these agents that has it; if none has it, the reason as text."""
        said = []
        for keeper in keepers:
            try:
                return await fetch_from(keeper, self._access, rank, attempt)
            except NOT_HANDED_OVER as e:
                said.append(f"{keeper} was to have them: {said_by(e)}")
        return "; ".join(said)

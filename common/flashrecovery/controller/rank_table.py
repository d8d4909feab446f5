"""Who fills which rank: as a file for everybody, and for each agent the few entries that it needs. Pure."""

from __future__ import annotations

import bisect
from typing import Any

from flashrecovery.proto import flashrecovery_pb2 as pb

_COLUMNS = ("rank", "host", "pid", "node", "joined_generation")
RING = 2
"""Nodes after one in the ring, which its agent asks when it does not hear the controller."""


def rows(table: pb.RankTable) -> list[dict[str, Any]]:
    """The rows of ``ranktable.json``."""
    return [{c: getattr(e, c) for c in _COLUMNS} for e in table.ranks]


class Parts:
    """One table, cut up for the agents; made once for all of them, so that the whole costs no more than the table."""

    def __init__(self, table: pb.RankTable) -> None:
        self._table = table
        self._of: dict[str, list[pb.RankEntry]] = {}
        for entry in table.ranks:
            self._of.setdefault(entry.node, []).append(entry)
        self._by_rank = {e.rank: e for e in table.ranks}
        self._ring = sorted(self._of)

    def part_for(self, node: str) -> pb.RankTable:
        """What the agent of ``node`` needs to know: its own ranks, the ranks that keep their copies, and one rank of
        each of the next nodes in the ring."""
        table = self._table
        wanted = {e.rank: e for e in self._of.get(node, ())}
        keepers = [self._by_rank[(rank + table.stride) % table.world_size] for rank in wanted]
        wanted.update({e.rank: e for e in keepers})
        start = bisect.bisect_right(self._ring, node)
        near = [self._ring[(start + i) % len(self._ring)] for i in range(min(RING, len(self._ring)))]
        wanted.update({self._of[n][0].rank: self._of[n][0] for n in near if n != node})
        part = pb.RankTable(stride=table.stride, world_size=table.world_size)
        part.ranks.extend(wanted.values())
        return part

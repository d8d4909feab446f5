"""Who fills which rank: as a file for everybody, and for each agent the few entries that it needs. Pure."""

from __future__ import annotations

import itertools
from typing import Any

from flashrecovery.plan.ring import OBSERVERS, following, preceding
from flashrecovery.proto import flashrecovery_pb2 as pb

_COLUMNS = ("rank", "host", "pid", "node", "joined_generation")


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

    def concerned_by(self, rank: int) -> set[str]:
        """The nodes whose part has the entry of ``rank``, or may have it."""
        world = self._table.world_size
        node, owner = self._by_rank[rank].node, self._by_rank[(rank - self._table.stride) % world].node
        return {node, owner, *itertools.islice(preceding(node, self._ring), OBSERVERS)}

    def part_for(self, node: str) -> pb.RankTable:
        """What the agent of ``node`` needs to know: its own ranks, the ranks that keep their copies, and one rank of
        each of the next nodes in the ring."""
        table = self._table
        wanted = {e.rank: e for e in self._of.get(node, ())}
        keepers = [self._by_rank[(rank + table.stride) % table.world_size] for rank in wanted]
        wanted.update({e.rank: e for e in keepers})
        near = [self._of[n][0] for n in itertools.islice(following(node, self._ring), OBSERVERS)]
        wanted.update({e.rank: e for e in near})
        part = pb.RankTable(stride=table.stride, world_size=table.world_size)
        part.ranks.extend(wanted.values())
        return part

    def has_ranks(self, node: str) -> bool:
        return node in self._of

    def changed_since(self, old: Parts) -> list[int]:
        """The ranks whose entry is another one."""
        return [rank for rank, entry in self._by_rank.items() if old._by_rank.get(rank) != entry]

    def same_shape(self, old: Parts) -> bool:
        """Whether nothing but its entries can make a part differ."""
        mine, other = self._table, old._table
        return (mine.stride, mine.world_size) == (other.stride, other.world_size)


def affected(old: Parts, new: Parts) -> set[str]:
    """The nodes with ranks whose part of the table is another one than before. Never too few."""
    if not new.same_shape(old):
        return set(new._of) | set(old._of)
    found: set[str] = set()
    for rank in new.changed_since(old):
        found |= old.concerned_by(rank) | new.concerned_by(rank)
    return found

"""Which process fills which rank: as a file for everybody, and for each agent the few entries that it needs. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from flashrecovery.plan.membership.placement import setup_log_keepers, setup_log_keepers_among
from flashrecovery.plan.membership.ring import OBSERVERS, following, preceding
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class RankTable:
    """Every rank's entry, in order of ranks. One that has not changed since the table before is the same object there.

    ``stride``: how far away the rank is that keeps a rank's copies. ``others``: Peer services of the living nodes
    without ranks, by name. ``launched``: how many ranks the job was launched with, 0: as many as there are; of an
    elastic one some may have left. ``launch``: tells this job from another one of the same nodes. ``beyond``: there are
    ranks that the launch has not had, and they count as launched.
    """

    entries: tuple[pb.RankEntry, ...]
    stride: int
    others: tuple[tuple[str, str], ...] = ()
    launched: int = 0
    launch: str = ""
    beyond: bool = False

    @property
    def world(self) -> int:
        """By which ranks are counted."""
        return self.launched or len(self.entries)


def row(entry: pb.RankEntry) -> dict[str, Any]:
    """The entry in ``ranktable.json``."""
    return {
        "rank": entry.rank,
        "host": entry.host,
        "pid": entry.pid,
        "node": entry.node,
        "joined_generation": entry.joined_generation,
    }


class Parts:
    """One table, cut up for the agents; made once for all of them, so that the whole costs no more than the table."""

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._entries = {entry.rank: entry for entry in table.entries}
        self._nodes = {} if self.whole else {entry.rank: entry.node for entry in table.entries}
        self._of: dict[str, list[pb.RankEntry]] = {}
        for entry in table.entries:
            self._of.setdefault(entry.node, []).append(entry)
        self._ring = sorted(self._of)
        # Of a node that shares the ranks with others, these know best whether it is cut off.
        self._others = dict(table.others) if len(self._ring) == 1 else {}

    def concerned_by(self, rank: int) -> set[str]:
        """The nodes whose part has the entry of ``rank``, or may have it."""
        entries, stride = self._entries, self._table.stride
        node = entries[rank].node
        owners = {entries[r].node for r in setup_log_keepers(rank, -stride, self._table.world) if r in entries}
        return {node, *owners, *itertools.islice(preceding(node, self._ring), OBSERVERS)}

    def part_for(self, node: str) -> pb.RankTable:
        """What the agent of ``node`` needs to know: its own ranks, those that keep something for them, and one rank of
        each of the next nodes in the ring; if it has all ranks, the next ones that have none."""
        entries, stride = self._entries, self._table.stride
        wanted = {e.rank: e for e in self._of.get(node, ())}
        keepers = [k for rank in wanted for k in self._keepers(rank)]
        wanted.update({rank: entries[rank] for rank in keepers if rank in entries})
        near = [self._of[n][0] for n in itertools.islice(following(node, self._ring), OBSERVERS)]
        wanted.update({e.rank: e for e in near})
        others = itertools.islice(following(node, sorted(self._others)), OBSERVERS)
        peers = [self._others[n] for n in others]
        return pb.RankTable(
            ranks=wanted.values(), stride=stride, world_size=self._table.world, others=peers, launch=self._table.launch
        )

    def _keepers(self, rank: int) -> tuple[int, ...]:
        """The ranks whose agents keep the set-up log of this one."""
        stride, world = self._table.stride, self._table.world
        if self.whole:
            return setup_log_keepers(rank, stride, world)
        return setup_log_keepers_among(rank, stride, world, self._nodes)

    @property
    def whole(self) -> bool:
        """Whether no rank of the launch has left, and there are no others."""
        return len(self._entries) == self._table.world and not self._table.beyond

    def has_ranks(self, node: str) -> bool:
        return node in self._of

    def changed_since(self, old: Parts) -> list[int]:
        """The ranks whose entry is another one."""
        pairs = zip(self._table.entries, old._table.entries, strict=True)
        return [mine.rank for mine, its in pairs if mine is not its and mine != its]

    def same_shape(self, old: Parts) -> bool:
        """Whether nothing but its entries can make a part differ."""
        mine, other = self._table, old._table
        same_ranks = self._entries.keys() == old._entries.keys()
        same = mine.stride == other.stride and mine.launch == other.launch
        return same_ranks and same and self._others == old._others


def affected(old: Parts, new: Parts) -> set[str]:
    """The nodes with ranks whose part of the table is another one than before. Never too few."""
    if not new.same_shape(old) or not new.whole:
        return set(new._of) | set(old._of)
    found: set[str] = set()
    for rank in new.changed_since(old):
        found |= old.concerned_by(rank) | new.concerned_by(rank)
    return found

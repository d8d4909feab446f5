"""The state that the ranks of another layout begin with: where it is, and what of it is still there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass(frozen=True)
class SavedState:
    """State that is to be read by the ranks of the next layout: in the nodes' memory, or (``checkpoint``) on disk.

    Attributes:
        place: where, with the ranks that have written it.
        written: bytes.
        writers: of each shard.
        homes: of each rank that has written, its node, and that node's incarnation.
    """

    version: int
    place: pb.StagingPlace
    checkpoint: str = ""
    written: int = 0
    writers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    homes: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(
        version: int,
        directory: str,
        orders: Mapping[int, list[pb.StagingItem]],
        records: Mapping[int, RankRecord],
        nodes: Mapping[str, NodeRecord],
    ) -> SavedState:
        """What is about to be written."""
        writers: dict[str, tuple[int, ...]] = {}
        for rank, items in orders.items():
            for item in items:
                writers[item.shard] = (*writers.get(item.shard, ()), rank)
        homes = {rank: (name, nodes[name].incarnation) for rank in orders if (name := records[rank].home) in nodes}
        place = pb.StagingPlace(directory=directory, ranks=sorted(orders))
        return SavedState(version, place, writers=writers, homes=homes)

    def now(self, nodes: Mapping[str, NodeRecord]) -> SavedState | None:
        """What of it can be read now, and from which agents; None if that is not everything."""
        if self.checkpoint:
            return self
        there = {rank: nodes[home[0]] for rank, home in self.homes.items() if _is_there(home, nodes)}
        if not there or any(not there.keys() & ranks for ranks in self.writers.values()):
            return None
        place = pb.StagingPlace(directory=self.place.directory, ranks=sorted(there))
        if len(nodes) > 1:
            place.sources.extend(pb.StagingSource(rank=rank, peer=node.peer) for rank, node in sorted(there.items()))
        return replace(self, place=place)

    def lost_with(self, nodes: Mapping[str, NodeRecord]) -> str:
        """Why it cannot be read."""
        gone = {home[0] for home in self.homes.values() if not _is_there(home, nodes)}
        return f"what the ranks have written for the next layout was in the memory of {', '.join(sorted(gone))} alone"


def _is_there(home: tuple[str, str], nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether a node (its name and incarnation) lives, with the memory that it had then."""
    name, incarnation = home
    return name in nodes and nodes[name].alive and nodes[name].incarnation == incarnation

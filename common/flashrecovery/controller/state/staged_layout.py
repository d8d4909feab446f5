"""The state that the ranks of another layout begin with: where it is, and what of it is still there. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import ProtocolError
from flashrecovery.plan.strategy.relayout import LayoutFacts, StayingFacts
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_sizes

_FORMAT = 1


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
        """In words, why it cannot be read."""
        gone = {home[0] for home in self.homes.values() if not _is_there(home, nodes)}
        return f"what the ranks have written for the next layout was in the memory of {', '.join(sorted(gone))} alone"


def _is_there(home: tuple[str, str], nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether a node (its name and incarnation) lives, with the memory that it had then."""
    name, incarnation = home
    return name in nodes and nodes[name].alive and nodes[name].incarnation == incarnation


@dataclass(frozen=True)
class StagedLayout:
    """What the processes of another layout begin with. Agents keep it as text, for the next controller.

    Attributes:
        kept: the state that they read.
        staying: what the job was before its layout changed, and has to stay.
        before: the layout that the job had, as text.
        attempt: the number of the start with it.
    """

    kept: SavedState
    staying: StayingFacts
    before: str
    attempt: int

    @property
    def layout_before(self) -> Strategy:
        """With as many replicas as were left of it: perhaps not one in which a job can begin."""
        return Strategy(**layout_sizes(self.before), micro_batch=self.staying.facts.micro_batch)

    def text(self) -> str:
        kept = self.kept
        return json.dumps(
            {
                "format": _FORMAT,
                "version": kept.version,
                "directory": kept.place.directory,
                "ranks": list(kept.place.ranks),
                "checkpoint": kept.checkpoint,
                "written": kept.written,
                "writers": {shard: list(ranks) for shard, ranks in kept.writers.items()},
                "homes": {str(rank): list(home) for rank, home in kept.homes.items()},
                "facts": self.staying.facts.text(),
                "batches": self.staying.batches,
                "steps": self.staying.steps,
                "before": self.before,
                "attempt": self.attempt,
            }
        )

    @staticmethod
    def parse(text: str) -> StagedLayout:
        """Raises ProtocolError if it is not what :meth:`text` gives."""
        try:
            said = json.loads(text)
            if said["format"] != _FORMAT:
                raise ProtocolError(f"where state is kept for another layout, in format {said['format']}")
            place = pb.StagingPlace(directory=said["directory"], ranks=said["ranks"])
            kept = SavedState(
                said["version"],
                place,
                said["checkpoint"],
                said["written"],
                {shard: tuple(ranks) for shard, ranks in said["writers"].items()},
                {int(rank): (home[0], home[1]) for rank, home in said["homes"].items()},
            )
            staying = StayingFacts(LayoutFacts.parse(said["facts"]), said["batches"], said["steps"])
            words = StagedLayout(kept, staying, said["before"], said["attempt"])
            _ = words.layout_before  # it is one
            return words
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ProtocolError(
                f"where state is kept for another layout cannot be read: {type(e).__name__}: {e}"
            ) from e

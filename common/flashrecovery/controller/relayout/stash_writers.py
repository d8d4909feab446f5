"""Who writes which shard into the nodes' memory for another layout, and what of it is still there. Pure.

Agents keep that as text, for the next controller (:func:`kept_text`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from flashrecovery.controller.state.custody import left_behind
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.rank_record import RankRecord, capsule_name
from flashrecovery.errors import JobFailedError, ProtocolError
from flashrecovery.plan import Kind
from flashrecovery.plan.strategy.relayout import LayoutFacts, StayingFacts
from flashrecovery.plan.strategy.stash_room import COPIES
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_sizes

COMMON = "common"
"""The shard that every rank has, of state that is no tensor; each index has it besides."""
_PREFERRED = (Kind.LIVE, Kind.UNDO, Kind.COPY)


def assigned(
    records: Mapping[int, RankRecord],
    departed: Mapping[int, Mapping[str, int]],
    version: int,
    domains: Mapping[str, str] = MappingProxyType({}),
) -> dict[int, list[pb.StashItem]]:
    """Who writes which shard at ``version``, and from what it has of it: of those who have it for themselves, or else
    keep copies of it, whoever writes the least so far; and where somebody on another node has it, too, one of these
    besides, in another failure domain (``domains``: of the nodes) if there is one. All shards that the ranks need, and
    that those have needed who have left; no rank's own plain state.

    Raises JobFailedError if somebody has said that it has a shard, and nobody has.
    """
    capsules = {capsule_name(rank) for rank in (*records, *departed)}
    sizes = {name: nbytes for record in records.values() for name, nbytes in record.needs.items()}
    sizes |= {need.shard: need.nbytes for need in left_behind(departed, records.values())}
    names = {name for name in sizes if name not in capsules and name != COMMON}
    holders: dict[str, dict[int, Kind]] = {name: {} for name in names}
    for record in records.values():
        found = [*record.live_at(version, names), *record.copies_at(version, names)]
        for holding in sorted(found, key=lambda h: _PREFERRED.index(h.kind) if h.kind in _PREFERRED else 9):
            if holding.kind in _PREFERRED:
                holders[holding.shard].setdefault(record.rank, holding.kind)
    load: Counter[int] = Counter()
    # Who has anything writes, if only what all should have alike: so it is compared.
    orders: dict[int, list[pb.StashItem]] = {rank: [] for rank, record in records.items() if record.newest >= 0}
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        if not holders[name]:
            raise JobFailedError(f"nobody has shard {name!r} at version {version}")
        left, used = dict(holders[name]), set[str]()
        for _ in range(COPIES):
            if left:
                near = {rank: domains.get(records[rank].home) in used for rank in left}
                rank = min(left, key=lambda rank: (near[rank], left[rank] is Kind.COPY, load[rank], rank))
                used.add(domains.get(records[rank].home, ""))
                load[rank] += sizes[name]
                orders.setdefault(rank, []).append(pb.StashItem(shard=name, kind=left[rank].value))
                left = {other: kind for other, kind in left.items() if records[other].home != records[rank].home}
    return orders


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
    place: pb.StashPlace
    checkpoint: str = ""
    written: int = 0
    writers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    homes: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(
        version: int,
        directory: str,
        orders: Mapping[int, list[pb.StashItem]],
        records: Mapping[int, RankRecord],
        nodes: Mapping[str, NodeRecord],
    ) -> SavedState:
        """What is about to be written."""
        writers: dict[str, tuple[int, ...]] = {}
        for rank, items in orders.items():
            for item in items:
                writers[item.shard] = (*writers.get(item.shard, ()), rank)
        homes = {rank: (name, nodes[name].incarnation) for rank in orders if (name := records[rank].home) in nodes}
        place = pb.StashPlace(directory=directory, ranks=sorted(orders))
        return SavedState(version, place, writers=writers, homes=homes)

    def now(self, nodes: Mapping[str, NodeRecord]) -> SavedState | None:
        """What of it can be read now, and from which agents; None if that is not everything."""
        if self.checkpoint:
            return self
        there = {rank: nodes[home[0]] for rank, home in self.homes.items() if _is_there(home, nodes)}
        if not there or any(not there.keys() & ranks for ranks in self.writers.values()):
            return None
        place = pb.StashPlace(directory=self.place.directory, ranks=sorted(there))
        if len(nodes) > 1:
            place.sources.extend(pb.StashSource(rank=rank, peer=node.peer) for rank, node in sorted(there.items()))
        return replace(self, place=place)

    def lost_with(self, nodes: Mapping[str, NodeRecord]) -> str:
        """In words, why it cannot be read."""
        gone = {home[0] for home in self.homes.values() if not _is_there(home, nodes)}
        return f"what the ranks have written for the next layout was in the memory of {', '.join(sorted(gone))} alone"


def _is_there(home: tuple[str, str], nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether a node (its name and incarnation) lives, with the memory that it had then."""
    name, incarnation = home
    return name in nodes and nodes[name].alive and nodes[name].incarnation == incarnation


_FORMAT = 1


@dataclass(frozen=True)
class SavedStateCodec:
    """``attempt``: of the processes that are started with it. ``before``: the layout that the job had, as text."""

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
    def parse(text: str) -> SavedStateCodec:
        """Raises ProtocolError if it is not what :meth:`text` gives."""
        try:
            said = json.loads(text)
            if said["format"] != _FORMAT:
                raise ProtocolError(f"where state is kept for another layout, in format {said['format']}")
            place = pb.StashPlace(directory=said["directory"], ranks=said["ranks"])
            kept = SavedState(
                said["version"],
                place,
                said["checkpoint"],
                said["written"],
                {shard: tuple(ranks) for shard, ranks in said["writers"].items()},
                {int(rank): (home[0], home[1]) for rank, home in said["homes"].items()},
            )
            staying = StayingFacts(LayoutFacts.parse(said["facts"]), said["batches"], said["steps"])
            words = SavedStateCodec(kept, staying, said["before"], said["attempt"])
            _ = words.layout_before  # it is one
            return words
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ProtocolError(
                f"where state is kept for another layout cannot be read: {type(e).__name__}: {e}"
            ) from e

"""State that is sharded among the ranks of an elastic job, and what becomes of the parts of ranks that leave.

A rank that leaves has needed shards that no other rank needs. At the version that the others resume from, one of them
must have copies of these. It serves them when the state is resharded among the ranks that stay
(:mod:`flashrecovery.contract.shard_layout`). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.plan import Kind, Need
from flashrecovery.plan.elastic.replicas import ReplicaShape, singles
from flashrecovery.proto import flashrecovery_pb2 as pb


def sharded(records: Collection[RankRecord]) -> bool:
    """Whether ranks have parts of state that is sharded among them, in their own words. One that has just come in has
    none yet; and a single rank has all parts."""
    return any(record.inventory.sharded for record in records)


def of_their_own(records: Collection[RankRecord]) -> bool:
    """Whether ranks have shards that others do not have, besides what each of them has for itself: parts of sharded
    state, or their places' in replicas of several ranks. One that has just come in has said nothing yet."""
    names = [
        record.inventory.needs.keys() - {local_state_name(record.rank)} for record in records if record.inventory.needs
    ]
    return sharded(records) or any(other != names[0] for other in names[1:])


def sharding_of(records: Collection[RankRecord]) -> tuple[int, ...]:
    """The ranks among which state is sharded, as these ranks report it: the newest sharding that a rank has switched
    to; the others are ready for it then. () if no rank has reported one."""
    said = Counter(record.inventory.layout for record in records if record.inventory.layout)
    newer = [layout for layout in said if any(record.inventory.ready == layout for record in records)]
    return max(newer or said, key=lambda layout: said[layout], default=())


def left_behind(removed: Mapping[int, Mapping[str, int]], records: Collection[RankRecord]) -> list[Need]:
    """The shards that departed ranks needed and no remaining rank needs. ``removed``: their names and sizes, by rank;
    {}: this controller has never heard of them. If state is sharded and nothing is known of a departed rank, its
    rank-local state, which no rank has, stands for its part."""
    if not removed:
        return []
    staying = set[str]().union(*(record.inventory.needs for record in records))
    found: dict[str, Need] = {}
    for rank, needs in removed.items():
        known = needs or kept_for(rank, records)
        if not known and sharded(records):
            found[local_state_name(rank)] = Need(rank, local_state_name(rank), 0)
        for shard, nbytes in known.items():
            if shard not in staying and shard != local_state_name(rank):
                found.setdefault(shard, Need(rank, shard, nbytes))
    return list(found.values())


def kept_for(rank: int, records: Collection[RankRecord]) -> dict[str, int]:
    """The copies kept for a rank that died before this controller started. A peer that keeps its rank-local state keeps
    all that it had."""
    for record in records:
        copies = record.inventory.copies()
        if local_state_name(rank) in copies:
            return copies
    return {}


def ready_for(records: Collection[RankRecord]) -> tuple[int, ...]:
    """The ranks for which all that have a part of what is sharded have made it ready, as they have said; () if they
    have not."""
    said = {record.inventory.ready for record in records if record.inventory.layout}
    return said.pop() if len(said) == 1 else ()


def take_on_parts(records: Collection[RankRecord], layout: Collection[int]) -> None:
    """Correct the needs of ranks that have just joined and reported what they needed at launch: they need what is kept
    for them, the only record of what they had. If nothing is kept, their report stays, and no rank has that. Ranks
    outside the ``layout`` need no part yet."""
    members = [record for record in records if record.rank in layout]
    for record in records:
        if record.inventory.as_launched and record.rank not in layout:
            record.inventory.need_no_part()
        kept = kept_for(record.rank, members) if record.inventory.as_launched and record.inventory.sharded else {}
        if kept:
            record.inventory.need_part(kept)


def custody(wanted: Sequence[Need], records: Collection[RankRecord], version: int) -> list[pb.Custody] | None:
    """Which rank serves each of these shards at ``version``: among those with a copy, the one that serves the least.
    None if a shard has no copy."""
    names = {need.shard for need in wanted}
    holders: dict[str, list[int]] = {shard: [] for shard in names}
    for record in records:
        for holding in record.inventory.copies_at(version, names):
            if holding.kind is Kind.COPY:
                holders[holding.shard].append(record.rank)
    load: Counter[int] = Counter()
    found = []
    for need in sorted(wanted, key=lambda need: (need.rank, need.shard)):
        if not holders[need.shard]:
            return None
        holder = min(holders[need.shard], key=lambda rank: (load[rank], rank))
        load[holder] += need.nbytes
        found.append(pb.Custody(shard=need.shard, owner=need.rank, holder=holder, kind=Kind.COPY.value))
    return found


def have(records: Collection[RankRecord], version: int) -> bool:
    """Whether these ranks together have what each of them needs at ``version``. Ranks that were just filled again have
    nothing, and the ranks with the same state may be about to leave."""
    held: set[str] = set()
    for record in records:
        held.update(
            record.inventory.kept_at(version), record.inventory.needs if record.inventory.live == version else ()
        )
    lending = {record.model_rank for record in records if record.inventory.has_local_state(version)}
    # of an elastic job, that of any rank with the same model rank serves
    held.update(local_state_name(record.rank) for record in records if record.model_rank in lending)
    return all(held.issuperset(record.inventory.needs) for record in records)


def choose_leaving(
    records: Mapping[int, RankRecord],
    removed: Mapping[int, Mapping[str, int]],
    count: int,
    version: int,
    named: Sequence[int] = (),
    *,
    shape: ReplicaShape | None = None,
    on_disk: bool = False,
) -> list[int] | None:
    """The ranks of this many replicas that can leave at ``version``.

    A replica can leave if other ranks have copies of what only it needs, and the ranks that stay have what they need
    themselves (``on_disk``: all of it is read from disk). The replicas of the ``named`` ranks are chosen first, then
    the last ones. ``shape`` None: each rank is a replica. Returns None if there are too few, or a named one is not
    among them."""
    chosen: list[int] = []
    shape, found = shape or singles(records), 0
    by_replica = shape.by_replica(records)
    first = list(dict.fromkeys(shape.replica(rank) for rank in named))
    for replica in (*first, *(other for other in reversed(by_replica) if other not in first)):
        if found == count:
            break
        leaving = [*chosen, *by_replica[replica]]
        staying = [record for other, record in records.items() if other not in leaving]
        gone = {**removed, **{other: records[other].inventory.needs for other in leaving}}
        if custody(left_behind(gone, staying), staying, version) is not None and (on_disk or have(staying, version)):
            chosen, found = leaving, found + 1
    return sorted(chosen) if found == count and set(named) <= set(chosen) else None

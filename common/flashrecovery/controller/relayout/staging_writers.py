"""Which rank writes which shard into the nodes' memory for another layout. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from flashrecovery.controller.state.custody import left_behind
from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import Kind
from flashrecovery.plan.strategy.staging_room import COPIES
from flashrecovery.proto import flashrecovery_pb2 as pb

COMMON = "common"
"""The shard that every rank has, of state that is no tensor; each index has it besides."""
_PREFERRED = (Kind.LIVE, Kind.UNDO, Kind.COPY)


def assigned(
    records: Mapping[int, RankRecord],
    removed: Mapping[int, Mapping[str, int]],
    version: int,
    domains: Mapping[str, str] = MappingProxyType({}),
) -> dict[int, list[pb.StagingItem]]:
    """Which rank writes which shard at ``version``, and from which of its tensors or copies.

    A shard is written by an owner, or else by a rank that keeps a copy: the one that writes the least so far. If ranks
    on other nodes have it as well, one of them also writes it, in another failure domain if there is one (``domains``:
    of the nodes). All shards are written that the ranks need or that departed ranks needed; rank-local state is not.

    Raises JobFailedError if no rank has one of these shards.
    """
    local_states = {local_state_name(rank) for rank in (*records, *removed)}
    sizes = {name: nbytes for record in records.values() for name, nbytes in record.inventory.needs.items()}
    sizes |= {need.shard: need.nbytes for need in left_behind(removed, records.values())}
    names = {name for name in sizes if name not in local_states and name != COMMON}
    holders: dict[str, dict[int, Kind]] = {name: {} for name in names}
    for record in records.values():
        found = [*record.inventory.live_at(version, names), *record.inventory.copies_at(version, names)]
        for holding in sorted(found, key=lambda h: _PREFERRED.index(h.kind) if h.kind in _PREFERRED else 9):
            if holding.kind in _PREFERRED:
                holders[holding.shard].setdefault(record.rank, holding.kind)
    load: Counter[int] = Counter()
    # A rank that has anything writes, if only what all should have alike: so it is compared.
    orders: dict[int, list[pb.StagingItem]] = {
        rank: [] for rank, record in records.items() if record.inventory.newest >= 0
    }
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        if not holders[name]:
            raise JobFailedError(f"no rank has shard {name!r} at version {version}")
        left, used = dict(holders[name]), set[str]()
        for _ in range(COPIES):
            if left:
                near = {rank: domains.get(records[rank].home) in used for rank in left}
                rank = min(left, key=lambda rank: (near[rank], left[rank] is Kind.COPY, load[rank], rank))
                used.add(domains.get(records[rank].home, ""))
                load[rank] += sizes[name]
                orders.setdefault(rank, []).append(pb.StagingItem(shard=name, kind=left[rank].value))
                left = {other: kind for other, kind in left.items() if records[other].home != records[rank].home}
    return orders

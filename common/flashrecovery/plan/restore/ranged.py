"""Which shards come from several hosts at once, and from which ranks.

A shard comes from a rank on the same host if one holds it: that memory is read directly. What only other hosts hold
comes in ranges of bytes from several of them, and each sends as many as its link carries
(:mod:`flashrecovery.worker.transfer.ranges`). So the links count, not the ranks: holders are on different hosts, and
those hosts come first that have the least to send so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrecovery.plan.restore.types import Kind, RangedTransfer

MOST_HOLDERS = 4
"""Of one ranged transfer."""
LEAST_BYTES = 8 << 20
"""What is smaller is there before a second host could help."""
_KINDS = (Kind.LIVE, Kind.UNDO, Kind.COPY)


@dataclass(frozen=True, slots=True)
class Lacking:
    """``dest`` lacks ``shard`` (``nbytes`` bytes), of which each of ``sources`` has a ``kind``, preferred first."""

    dest: int
    shard: str
    nbytes: int
    sources: tuple[int, ...]
    kind: Kind


def near(dest: int, sources: tuple[int, ...], hosts: Mapping[int, str]) -> tuple[int, ...]:
    """Those of ``sources`` on the host of ``dest``; all, if none is. ``hosts``: by rank, those that are known."""
    host = hosts.get(dest)
    return tuple(s for s in sources if host is not None and hosts.get(s) == host) or sources


def ranged_transfers(lacking: Sequence[Lacking], hosts: Mapping[int, str]) -> tuple[RangedTransfer, ...]:
    """Those shards that come from other hosts, together where the same ranks hold them. Deterministic.

    Args:
        hosts: by rank. What lacks a host, or has a source without one, does not come in ranges.
    """
    together: dict[tuple[int, tuple[int, ...], Kind], list[Lacking]] = defaultdict(list)
    for one in lacking:
        known = one.dest in hosts and all(s in hosts and hosts[s] != hosts[one.dest] for s in one.sources)
        if known and one.kind in _KINDS:
            together[one.dest, one.sources, one.kind].append(one)
    of_rank: dict[int, float] = defaultdict(float)
    of_host: dict[str, float] = defaultdict(float)
    numbers: dict[int, int] = defaultdict(int)
    found = []
    for (dest, sources, kind), shards in sorted(together.items()):
        nbytes = sum(one.nbytes for one in shards)
        if nbytes < LEAST_BYTES:
            continue
        holders: list[int] = []
        preferred = sorted((of_host[hosts[rank]], of_rank[rank], place, rank) for place, rank in enumerate(sources))
        for *_, rank in preferred:
            if len(holders) < MOST_HOLDERS and hosts[rank] not in {hosts[h] for h in holders}:
                holders.append(rank)
        for rank in holders:
            of_rank[rank] += nbytes / len(holders)
            of_host[hosts[rank]] += nbytes / len(holders)
        names = tuple(sorted(one.shard for one in shards))
        found.append(RangedTransfer(dest, numbers[dest], tuple(sorted(holders)), kind, names))
        numbers[dest] += 1
    return tuple(found)

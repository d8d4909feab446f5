"""Which rank sends which shard to which: all ranks reach one version with the least traffic, evenly spread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flashrecovery.plan.restore.balance import Choice, balance
from flashrecovery.plan.restore.ranged import Lacking, near, ranged_transfers
from flashrecovery.plan.restore.types import Holding, Kind, LocalRestore, Need, NoSourceError, RestorePlan, Transfer
from flashrecovery.plan.words import missing_text, ranks_text


def plan_restore(
    needs: Collection[Need],
    holdings: Collection[Holding],
    version: int,
    excluded: frozenset[tuple[str, int]] = frozenset(),
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> RestorePlan:
    """Bring every need to ``version``. Deterministic; independent of the order of its arguments.

    For each (rank, shard): live at ``version``: nothing. An own copy in memory: restored locally. Otherwise
    one transfer from a holder in memory, such that the busiest sender sends as few bytes as possible (optimal
    for small plans, with a certified bound for large ones, see :mod:`.balance`), live holders before copies
    where that makes no difference. Only shards that no memory holds are decoded, by the rank that had a part in
    their parity, which then gives them to others; only what cannot be decoded is read from checkpoints, a rank's own
    first.

    Args:
        excluded: (shard, rank) pairs that must not be used as a source, because their digest did not match. A
            shard that is live in place is no source, and stays.
        hosts: of the ranks, where that matters: what a rank on the same host holds comes from there, everything else
            in ranges from several hosts (see :mod:`.ranged`).

    Raises:
        NoSourceError: some shards have no source (left); it names all of them.
    """
    live = {(h.rank, h.shard) for h in holdings if h.version == version and h.kind is Kind.LIVE}
    lacking = {(n.rank, n.shard): n.nbytes for n in needs if (n.rank, n.shard) not in live}
    found = _find_sources({shard for _, shard in lacking}, holdings, version, excluded)
    local: list[LocalRestore] = []
    choices: list[Choice] = []
    missing: list[tuple[int, str]] = []
    for (rank, shard), nbytes in sorted(lacking.items()):
        sources = found[shard]
        own = sources.kinds.get(rank)
        if own is not None and _effort(own) == sources.effort:
            local.append(LocalRestore(rank, shard, version, own))
        elif sources.ranks:
            choices.append(Choice(rank, shard, sources.nbytes or nbytes, near(rank, sources.ranks, hosts)))
        else:
            missing.append((rank, shard))
    if missing:
        raise NoSourceError(
            f"version {version} cannot be restored: no source is left for {missing_text(missing)}",
            tuple(missing),
        )

    ranged = ranged_transfers([_lacking(c, found[c.shard].kinds) for c in choices], hosts)
    holders = {(one.dest, shard): one.holders for one in ranged for shard in one.shards}
    choices = [replace(c, sources=holders.get((c.dest, c.shard), c.sources)) for c in choices]
    balanced = balance(choices)
    transfers = tuple(
        Transfer(c.shard, version, source, c.dest, found[c.shard].kinds[source], c.nbytes)
        for c, source in zip(choices, balanced.sources, strict=True)
    )
    on_wire = sum(t.nbytes for t in transfers)
    return RestorePlan(
        version=version,
        transfers=transfers,
        local=tuple(local),
        bytes_on_wire=on_wire,
        reason=_reason(transfers, local, on_wire, balanced.busiest),
        busiest_sender_bytes=balanced.busiest,
        lower_bound_bytes=balanced.lower_bound,
        ranged=ranged,
    )


def _lacking(choice: Choice, kinds: Mapping[int, Kind]) -> Lacking:
    """With those of its sources that have the preferred kind."""
    kind = kinds[choice.sources[0]]
    alike = tuple(source for source in choice.sources if kinds[source] is kind)
    return Lacking(choice.dest, choice.shard, choice.nbytes, alike, kind)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The holders of one shard at one version: the best kind by rank, the ranks to take it from (preferred
    first), and what effort these have."""

    kinds: dict[int, Kind]
    ranks: tuple[int, ...]
    effort: int
    nbytes: int


def _effort(kind: Kind) -> int:
    """What is in memory comes before what has to be decoded, and that before what has to be read."""
    return {Kind.PARITY: 1, Kind.CHECKPOINT: 2}.get(kind, 0)


def _find_sources(
    shards: set[str], holdings: Collection[Holding], version: int, excluded: frozenset[tuple[str, int]]
) -> dict[str, _Sources]:
    kinds: dict[str, dict[int, Kind]] = {shard: {} for shard in shards}
    sizes: dict[str, int] = dict.fromkeys(shards, 0)
    for held in holdings:
        if held.version != version or held.shard not in shards:
            continue
        sizes[held.shard] = max(sizes[held.shard], held.nbytes)
        if (held.shard, held.rank) not in excluded:
            known = kinds[held.shard].get(held.rank)
            if known is None or held.kind.order < known.order:
                kinds[held.shard][held.rank] = held.kind
    found = {}
    for shard in shards:
        by_rank = kinds[shard]
        effort = min(map(_effort, by_rank.values()), default=0)
        ranked = sorted((kind.order, rank) for rank, kind in by_rank.items() if _effort(kind) == effort)
        found[shard] = _Sources(by_rank, tuple(rank for _, rank in ranked), effort, sizes[shard])
    return found


def _reason(transfers: tuple[Transfer, ...], local: list[LocalRestore], on_wire: int, busiest: int) -> str:
    parts = []
    if transfers:
        parts.append(
            f"{ranks_text(t.dest for t in transfers)} get {len(transfers):,} shards ({on_wire:,} bytes) from "
            f"{ranks_text(t.source for t in transfers)}, at most {busiest:,} bytes from one rank"
        )
    if local:
        parts.append(f"{ranks_text(i.rank for i in local)} restore {len(local):,} shards from their own copies")
    return "; ".join(parts) or "every rank holds everything live"

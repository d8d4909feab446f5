"""The newest consistent cut: the newest version that exists for every shard of every rank, and why it is not
newer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from flashrecovery.plan.restore.types import Cut, Holding, Need, NoCut
from flashrecovery.plan.words import join, missing_text, ranks_text, shard_text

_EXPLAINED_VERSIONS = 3


def newest_cut(needs: Collection[Need], holdings: Collection[Holding]) -> Cut | NoCut:
    """The newest version k such that for every needed shard some living holder has (shard, k).

    Linear in the number of needs and holdings; the order of neither matters.
    """
    shards = {need.shard for need in needs}
    if not shards:
        return NoCut("no rank has registered any state", (), None)
    versions: dict[str, set[int]] = {shard: set() for shard in shards}
    for held in holdings:
        if held.version >= 0 and held.shard in versions:
            versions[held.shard].add(held.version)
    common = set.intersection(*versions.values())
    if common:
        version = max(common)
        return Cut(version, _why_not_newer(version, versions, needs, holdings))
    return _no_cut(versions, needs)


def plain_reason(version: int) -> str:
    """Where nothing is held at a newer version."""
    return f"every shard exists at {version}, and none at a newer version"


def _why_not_newer(
    version: int, versions: dict[str, set[int]], needs: Iterable[Need], holdings: Iterable[Holding]
) -> str:
    newer = sorted({v for held in versions.values() for v in held if v > version}, reverse=True)
    if not newer:
        return plain_reason(version)
    # One witness for each newer version: a shard that does not exist there. Few versions can have many
    # witnesses, so take the alphabetically first; the same shard mostly explains all of them.
    witnesses: dict[str, str] = {}
    for candidate in newer[:_EXPLAINED_VERSIONS]:
        if not any(candidate not in versions[name] for name in witnesses):
            lacking = [s for s, held in versions.items() if candidate not in held]
            others = len(lacking) - 1
            also = f", and {others:,} other {'shards are' if others > 1 else 'shard is'} not at {candidate} either"
            witnesses[min(lacking)] = also if others else ""
    owners: dict[str, set[int]] = {name: set() for name in witnesses}
    for need in needs:
        if need.shard in owners:
            owners[need.shard].add(need.rank)
    places: dict[str, dict[str, set[int]]] = {name: defaultdict(set) for name in witnesses}
    for held in holdings:
        if held.version == version and held.shard in places:
            places[held.shard][held.kind.words].add(held.rank)
    parts = []
    for name, also in witnesses.items():
        where = join([f"on {ranks_text(ranks)} ({words})" for words, ranks in sorted(places[name].items())])
        parts.append(f"{shard_text(name, owners[name])} exists only {_until(version, versions[name])}, {where}{also}")
    return "; ".join(parts)


def _until(version: int, held: set[int]) -> str:
    if max(held) == version and len(held) > 1:
        return f"up to {version}"
    return f"at {_versions_text(held)}"


def _no_cut(versions: dict[str, set[int]], needs: Collection[Need]) -> NoCut:
    wanted = Counter(need.shard for need in needs)
    present: Counter[int] = Counter()
    for shard, held in versions.items():
        for version in held:
            present[version] += wanted[shard]
    best = max(present, key=lambda v: (present[v], v)) if present else None
    missing = sorted({(need.rank, need.shard) for need in needs if best not in versions[need.shard]})
    nowhere = [(rank, shard) for rank, shard in missing if not versions[shard]]
    elsewhere = [(rank, shard) for rank, shard in missing if versions[shard]]
    parts = []
    if nowhere:
        parts.append(f"{_count(nowhere)} held by no living process or copy at any version ({missing_text(nowhere)})")
    if elsewhere:
        found = sorted({v for _, shard in elsewhere for v in versions[shard]})
        parts.append(
            f"{_count(elsewhere)} held only at {_versions_text(found)}, not at {best} like the rest "
            f"({missing_text(elsewhere)})"
        )
    return NoCut("no version exists for every shard: " + "; ".join(parts), tuple(missing), best)


def _count(missing: Collection[tuple[int, str]]) -> str:
    shards = len({shard for _, shard in missing})
    return "1 shard is" if shards == 1 else f"{shards:,} shards are"


def _versions_text(versions: Iterable[int]) -> str:
    """All versions, or the newest few when a shard has many."""
    ordered = sorted(versions)
    if len(ordered) > _EXPLAINED_VERSIONS:
        return f"{ordered[0]} ... {ordered[-1]} ({len(ordered)} versions)"
    return join([str(v) for v in ordered])

"""From what the ranks hold to one restore command a rank, and back from their digests to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from flashrecovery.controller.state.custody import custody, left_behind
from flashrecovery.controller.state.parity import can_be_decoded, decode_messages, orders_for, why_not_decoded
from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import (
    Cut,
    Holding,
    Kind,
    Need,
    NoCut,
    RestorePlan,
    Transfer,
    newest_cut,
    plain_reason,
    plan_restore,
)
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb

if TYPE_CHECKING:
    from flashrecovery.plan.parity.decodable import Decodable, DecodeOrder, ParityHeld

_SPARE_SOURCES = 256
"""Holders of a shard's live state, besides two for each rank that lacks it, among which the sources are chosen."""


@dataclass
class RestoreRound:
    """One execution of a plan: which ranks take part, what they reported. ``needs``, ``holdings``: what the plan is
    about. ``decodes``: what is decoded before, group by group. ``reshape``: how state is sharded otherwise afterwards;
    all ranks take part in it. ``staging``: where all ranks read everything, which others have left there."""

    version: int
    reason: str
    plan: RestorePlan
    ranks: tuple[int, ...]
    needs: list[Need] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    excluded: frozenset[tuple[str, int]] = frozenset()
    decodes: tuple[DecodeOrder, ...] = ()
    reshape: pb.Reshape | None = None
    staging: pb.StagingPlace | None = None
    reports: dict[int, pb.Reply] = field(default_factory=dict)

    @staticmethod
    def from_checkpoint(
        version: int, records: Mapping[int, RankRecord], reason: str = "", staging: pb.StagingPlace | None = None
    ) -> RestoreRound:
        plan = RestorePlan(version=version, transfers=(), local=(), bytes_on_wire=0, reason=reason)
        return RestoreRound(version, reason, plan, tuple(records), staging=staging)

    @property
    def busy(self) -> set[int]:
        """The ranks that have shards to send, to receive, to decode or to take from what they hold themselves."""
        transfers, local = self._items
        return transfers.keys() | local.keys() | self._decodes.keys() | self._ranged.keys()

    def command(self, rank: int | None, checkpoint: str, deadline_s: float) -> pb.Restore:
        """The command for ``rank``; None: the same as for the others."""
        transfers, local = self._items
        return pb.Restore(
            version=self.version,
            transfers=transfers.get(rank, ()) if rank is not None else (),
            local=local.get(rank, ()) if rank is not None else (),
            decode=self._decodes.get(rank) if rank is not None else None,
            checkpoint=checkpoint,
            deadline_s=deadline_s,
            reshape=self.reshape,
            staging=self.staging,
            ranged=self._ranged.get(rank, ()) if rank is not None else (),
        )

    @cached_property
    def _decodes(self) -> Mapping[int, pb.Decode]:
        """By the ranks that take part."""
        return decode_messages(self.decodes)

    @cached_property
    def _items(self) -> tuple[dict[int, list[pb.TransferItem]], dict[int, list[str]]]:
        """Transfers and local restores by the ranks that have to do with them."""
        transfers: dict[int, list[pb.TransferItem]] = {}
        for t in self.plan.transfers:
            if (t.dest, t.shard) in self._holders:
                continue
            item = pb.TransferItem(shard=t.shard, source=t.source, dest=t.dest, kind=t.kind.value)
            for rank in {t.source, t.dest}:
                transfers.setdefault(rank, []).append(item)
        local: dict[int, list[str]] = {}
        for i in self.plan.local:
            local.setdefault(i.rank, []).append(i.shard)
        return transfers, local

    def senders(self, transfer: Transfer) -> tuple[int, ...]:
        """The ranks that send the shard, or ranges of it."""
        return self._holders.get((transfer.dest, transfer.shard), (transfer.source,))

    @cached_property
    def _holders(self) -> Mapping[tuple[int, str], tuple[int, ...]]:
        """The ranks that send ranges of a shard, by destination and shard."""
        return {(one.dest, shard): one.holders for one in self.plan.ranged for shard in one.shards}

    @cached_property
    def _ranged(self) -> Mapping[int, list[pb.RangedTransfer]]:
        """What comes in ranges, by the ranks that have to do with it."""
        found: dict[int, list[pb.RangedTransfer]] = {}
        for one in self.plan.ranged:
            message = pb.RangedTransfer(
                dest=one.dest, number=one.number, holders=one.holders, kind=one.kind.value, shards=one.shards
            )
            for rank in (one.dest, *one.holders):
                found.setdefault(rank, []).append(message)
        return found

    def report(self, rank: int, reply: pb.Reply) -> None:
        """What ``rank`` says of its transfers."""
        if reply.sent_digests or reply.received_digests or reply.bytes_received or reply.next_needs:
            self.reports[rank] = reply

    def bytes_received(self) -> int:
        return sum(r.bytes_received for r in self.reports.values())

    def bytes_on_device(self) -> int:
        """The bytes of these that went from device to device."""
        return sum(r.bytes_on_device for r in self.reports.values())

    def mismatches(self) -> list[tuple[str, int]]:
        """(shard, source) of every transfer whose digest at the destination is not the source's. Of a shard that came
        in ranges, all its holders must have the same digest."""
        wrong, silent = [], pb.Reply()
        for t in self.plan.transfers:
            received = self.reports.get(t.dest, silent).received_digests.get(t.shard)
            for source in self.senders(t):
                sent = self.reports.get(source, silent).sent_digests.get(t.shard)
                if sent is None or sent != received:
                    wrong.append((t.shard, source))
        return wrong

    def retry(self, wrong: list[tuple[str, int]]) -> RestoreRound:
        """The same round again, for the wrong shards only, each whole from one source. It is another source, except
        where several had sent ranges: which of them was wrong is not known. Raises if one has none left."""
        shards = {shard for shard, _ in wrong}
        dests = {(t.dest, t.shard) for t in self.plan.transfers if t.shard in shards}
        mixed = {shard for dest, shard in dests if len(self._holders.get((dest, shard), ())) > 1}
        excluded = self.excluded | {(shard, source) for shard, source in wrong if shard not in mixed}
        needs = [n for n in self.needs if (n.rank, n.shard) in dests]
        plan = plan_restore(needs, self.holdings, self.version, excluded=excluded)
        return replace(self, plan=plan, excluded=excluded, decodes=(), reports={})

    def next_needs(self) -> dict[int, Collection[pb.ShardNeed]]:
        """What each rank needs once state is sharded otherwise."""
        return {rank: r.next_needs for rank, r in self.reports.items() if r.next_needs}


@dataclass(frozen=True)
class Decision:
    """The version to resume from; ``checkpoint`` is a directory when nothing in memory will do."""

    round: RestoreRound
    checkpoint: str = ""

    @staticmethod
    def from_checkpoint(checkpoint: tuple[int, str], records: Mapping[int, RankRecord], reason: str) -> Decision:
        """``checkpoint`` is (version, directory)."""
        version, path = checkpoint
        return Decision(RestoreRound.from_checkpoint(version, records, reason), path)


@dataclass(frozen=True)
class NothingLeft:
    """Neither memory nor a checkpoint has a version for all ranks."""

    reason: str


def decide(
    records: Mapping[int, RankRecord],
    checkpoint: tuple[int, str] | None,
    layout: Sequence[int] = (),
    removed: Mapping[int, Mapping[str, int]] = MappingProxyType({}),
) -> Decision:
    """Which version all ranks go to, and from which ranks they get it.

    Args:
        layout: of an elastic job, the ranks among which state is sharded now.
        removed: what those of them need that have left.

    Raises JobFailedError if neither a cut nor a checkpoint exists.
    """
    forgotten = _forget_early(records.values())
    parity = _decodable(records)
    left = left_behind(removed, records.values())
    cut = _plain_cut(records, parity, left) or _any_cut(records, parity, left)
    alike = bool(layout) and isinstance(cut, NoCut)
    if alike:  # in an elastic job what a lost rank had for itself is as good as equal to another rank's
        cut = _any_cut(records, parity, left, alike=True)
    if isinstance(cut, NoCut):
        because = why_not_decoded(_parity_held(records))
        reason = cut.reason + forgotten + (f"; {because}" if because else "")
        if checkpoint is None:
            raise JobFailedError(f"the job cannot be recovered: {reason}; and there is no checkpoint")
        return Decision.from_checkpoint(checkpoint, records, reason)
    if checkpoint is not None and checkpoint[0] > cut.version + 1:  # no rank lives, and snapshots are taken seldom
        reason = f"what is left in memory is of version {cut.version}"
        return Decision.from_checkpoint(checkpoint, records, reason)
    decision = _from_memory(cut, records, parity, alike=alike)
    if layout and sorted(layout) != sorted(records):
        serving = custody(left, records.values(), cut.version)
        if serving is None:
            reason = (
                f"the job cannot go on without ranks {sorted(removed)}: no rank keeps copies of what they had at "
                f"version {cut.version}"
            )
            if checkpoint is None:
                raise JobFailedError(reason)
            return Decision.from_checkpoint(checkpoint, records, reason)
        reshape = pb.Reshape(before=layout, after=_counted(records), custody=serving)
        return replace(decision, round=replace(decision.round, reshape=reshape))
    return decision


def _counted(records: Mapping[int, RankRecord]) -> list[int]:
    """The ranks as they are counted in process groups of all of them."""
    shape = next((record.shape for record in records.values() if record.shape is not None), None)
    return sorted(records) if shape is None else shape.in_order(records)


def _decodable(records: Mapping[int, RankRecord]) -> list[Decodable]:
    """What parity can give back."""
    return can_be_decoded(_parity_held(records))


def _parity_held(records: Mapping[int, RankRecord]) -> list[ParityHeld]:
    return [record.inventory.parity for record in records.values() if record.inventory.parity is not None]


def _from_memory(
    cut: Cut, records: Mapping[int, RankRecord], parity: Collection[Decodable], *, alike: bool = False
) -> Decision:
    # Ranks that are live at the version need nothing: usually all but a few.
    needs = [n for r in records.values() if r.inventory.live != cut.version for n in r.inventory.need_list()]
    holdings = list(_sources(records.values(), cut.version, Counter(n.shard for n in needs)))
    holdings += [h for one in parity if one.order.version == cut.version for h in one.holdings]
    holdings += _lent(records.values(), [cut.version], alike=alike)
    concerned = {need.rank for need in needs} | {holding.rank for holding in holdings}
    plan = plan_restore(needs, holdings, cut.version, hosts=_hosts(records, concerned & records.keys()))
    decoded = {(i.rank, i.shard) for i in plan.local if i.kind is Kind.PARITY}
    decoded |= {(t.source, t.shard) for t in plan.transfers if t.kind is Kind.PARITY}
    orders = orders_for(parity, cut.version, decoded)
    return Decision(RestoreRound(cut.version, cut.reason, plan, tuple(records), needs, holdings, decodes=orders))


def _hosts(records: Mapping[int, RankRecord], concerned: Iterable[int]) -> dict[int, str]:
    """Of these ranks, as far as it matters: between accelerators, what is restored does not go in ranges."""
    if any(record.inventory.uses_device for record in records.values()):
        return {}
    return {rank: records[rank].process.host for rank in concerned if records[rank].process.host}


def from_snapshots(records: Mapping[int, RankRecord]) -> Decision | NoCut | None:
    """Before the first step: what all ranks have found of an earlier launch. None if they have found nothing, NoCut if
    that is not one whole version."""
    if all(record.inventory.newest <= 0 for record in records.values()):
        return None
    parity = _decodable(records)
    cut = _any_cut(records, parity)
    return cut if isinstance(cut, NoCut) else _from_memory(cut, records, parity)


def _forget_early(records: Collection[RankRecord]) -> str:
    """Rank-local state that was sealed early counts unless a living rank says that the step before its version was
    late. Returns whose rank-local states do not count."""
    late = frozenset[int]().union(*(record.inventory.late for record in records))
    if not late:
        return ""
    ranks = [record.rank for record in records if record.inventory.forget_early(late)]
    if not ranks:
        return ""
    return (
        f" (what {ranks_text(ranks)} had sealed early for version {max(late)} does not count: that step has drawn "
        "random numbers or data, or changed other state of its own rank, late on a rank that lives)"
    )


def _sources(records: Iterable[RankRecord], version: int, lacking: Mapping[str, int]) -> Iterator[Holding]:
    """The ranks that have what is ``lacking`` (a number of ranks by shard) at this version. Where thousands hold the
    same, no more of them are written down than can make a difference."""
    wanted = {shard: 2 * ranks + _SPARE_SOURCES for shard, ranks in lacking.items()}
    of_any, short = lacking.keys(), set(lacking)
    for record in records:
        for holding in record.inventory.live_at(version, short):
            wanted[holding.shard] -= 1
            if wanted[holding.shard] == 0:
                short.discard(holding.shard)
            yield holding
        yield from record.inventory.copies_at(version, of_any)


def _lent(records: Iterable[RankRecord], versions: Iterable[int], *, alike: bool = False) -> list[Holding]:
    """A rank that has come into an elastic job has no rank-local state anywhere. What each rank has for itself there is
    as good as equal on all that have its model rank (docs/elastic.md), so that the state of any of these serves.
    ``alike``: so it does for all ranks."""
    records = list(records)
    new = [record for record in records if record.new or alike]
    if not new:
        return []
    own: dict[int, list[tuple[int, int]]] = {}
    for version in versions:
        for record in records:
            if record.inventory.has_local_state(version):
                own.setdefault(record.model_rank, []).append((record.rank, version))
    return [
        Holding(rank, local_state_name(record.rank), version, Kind.LENT, 0)
        for record in new
        for rank, version in own.get(record.model_rank, ())
    ]


def _any_cut(
    records: Mapping[int, RankRecord], parity: Iterable[Decodable], left: Sequence[Need] = (), *, alike: bool = False
) -> Cut | NoCut:
    needs = [n for r in records.values() for n in r.inventory.need_list()] + list(left)
    holdings = [h for r in records.values() for h in r.inventory.holdings()]
    holdings += [h for one in parity for h in one.holdings]
    holdings += _lent(records.values(), {h.version for h in holdings}, alike=alike)
    return newest_cut(needs, holdings)


def _plain_cut(records: Mapping[int, RankRecord], parity: Iterable[Decodable], left: Sequence[Need] = ()) -> Cut | None:
    """The usual case, found without writing down which rank holds what: everything exists at one version, and nothing
    at a newer one. None in every other case."""
    newest = max((r.inventory.newest for r in records.values()), default=-1)
    others = [r for r in records.values() if r.inventory.live != newest]
    if newest < 0 or not any(r.inventory.needs for r in records.values()):
        return None
    lacking = {shard for r in others for shard in r.inventory.needs}  # what the ranks that are live need, they have
    lacking.update(need.shard for need in left)
    for one in parity:
        if one.order.version == newest:
            lacking.difference_update(h.shard for h in one.holdings)
    for record in records.values():
        if not lacking:
            break
        if record.inventory.live == newest:
            lacking.difference_update(record.inventory.needs)
        lacking.difference_update(record.inventory.kept_at(newest))
    lacking.difference_update(h.shard for h in _lent(records.values(), [newest]))
    return None if lacking else Cut(newest, plain_reason(newest))

"""The controller's short way to the version and the sources is the long one's: random worlds, both asked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flashrecovery.controller.state.rank_inventory import local_state_name
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.controller.state.restore_plan import decide
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import Kind, NoCut, newest_cut, plan_restore
from flashrecovery.plan.parity.decodable import EncodingHeld
from flashrecovery.proto import flashrecovery_pb2 as pb


def some_world(pick: random.Random) -> dict[int, RankRecord]:
    """Replicas, rank-local states, neighbour copies, undo copies; a few ranks dead, torn or behind."""
    world = pick.randrange(2, 9)
    records = {}
    for rank in range(world):
        record = records[rank] = RankRecord(rank)
        record.inventory.needs = {f"model/{rank % 3}": 100, "common": 10, local_state_name(rank): 5}
        record.inventory.live = pick.choice([7, 7, 7, 7, 6, 8, -1])
        record.inventory.local_states = tuple(v for v in (5, 6, 7, 8) if pick.random() < 0.6)
        held = []
        for name in ("common", f"model/{rank % 3}", local_state_name((rank - 1) % world), "no one needs it"):
            if pick.random() < 0.4:
                kind = Kind.COPY if name.startswith("local_state") else Kind.UNDO
                version = pick.choice([6, 7, 7, 8])
                held.append(pb.Held(kind=kind.value, version=version, shards=[name], nbytes=[5]))
        record.inventory.take(record.inventory.live, held)
    return records


def test_the_short_way_is_the_long_one() -> None:
    pick = random.Random(3)
    plain = 0
    for _ in range(2000):
        records = some_world(pick)
        needs = [n for r in records.values() for n in r.inventory.need_list()]
        holdings = [h for r in records.values() for h in r.inventory.holdings()]
        cut = newest_cut(needs, holdings)
        if isinstance(cut, NoCut):
            with pytest.raises(JobFailedError):
                decide(records, None)
            continue
        found = decide(records, None).round
        plain += "none at a newer" in cut.reason
        assert (found.version, found.reason) == (cut.version, cut.reason)
        assert found.plan == plan_restore(needs, holdings, cut.version)
    assert plain > 30


def test_of_thousands_of_equal_holders_as_many_are_looked_at_as_can_make_a_difference() -> None:
    world, lost = 3000, {700, 701}
    records = {}
    for rank in range(world):
        record = records[rank] = RankRecord(rank)
        record.inventory.needs = {f"model/{rank % 1000}": 100, "common": 10, local_state_name(rank): 5}
        kept = local_state_name((rank - 8) % world)
        held = [] if rank in lost else [pb.Held(kind="copy", version=7, shards=[kept], nbytes=[5])]
        record.inventory.take(-1 if rank in lost else 7, held)
    found = decide(records, None).round
    assert found.version == 7 and len(found.holdings) < 300
    sources = {(t.dest, t.shard): t.source for t in found.plan.transfers}
    assert sources[700, "model/700"] in (1700, 2700) and sources[701, "model/701"] in (1701, 2701)
    assert sources[700, local_state_name(700)] == 708 and sources[700, "common"] not in lost
    assert len(sources) == 6


# -- parity ---------------------------------------------------------------------------------------

SHARD = 512


def protected(world: int, losses: int, newest: int = 7) -> dict[int, RankRecord]:
    """Each rank has its own shard; all are live at ``newest``; parity is whole there and one version before."""
    ranks, versions = range(world), [newest - 1, newest]
    records = {}
    for rank in ranks:
        record = records[rank] = RankRecord(rank)
        record.inventory.needs = {f"own#{rank}": SHARD, "common": 10, local_state_name(rank): 5}
        before = [(rank - step) % world for step in range(1, losses + 1)]
        kept = [
            pb.Held(kind="copy", version=v, shards=[local_state_name(r)], nbytes=[5]) for r in before for v in versions
        ]
        kept += [pb.Held(kind="undo", version=newest - 1, shards=[f"own#{rank}", "common", local_state_name(rank)])]
        encoding = pb.Encoding(key=3, sizes=[SHARD] * world, losses=losses, bucket=64, p=versions)
        encoding.q.extend(versions if losses == 2 else [])
        parity = pb.Parity(
            ranks=ranks,
            losses=losses,
            max_size=8,
            own=[pb.OwnBytes(version=v, nbytes=SHARD) for v in versions],
            encodings=[encoding],
            told=[pb.Told(owner=r, version=v, shards=[f"own#{r}"], nbytes=[SHARD]) for r in before for v in versions],
        )
        record.inventory.take(newest, kept, parity)
    return records


@pytest.mark.parametrize(("losses", "lost"), [(1, [2]), (2, [2]), (2, [1, 2])])
def test_what_only_lost_ranks_had_is_decoded_where_it_is_needed(losses: int, lost: list[int]) -> None:
    records = protected(4, losses)
    for rank in lost:
        records[rank].forget_process()
    found = decide(records, None).round
    assert found.version == 7
    (order,) = found.decodes
    assert [order.ranks[m] for m in order.lost] == lost and found.busy == {0, 1, 2, 3}
    assert {(i.rank, i.shard) for i in found.plan.local if i.kind is Kind.PARITY} == {(r, f"own#{r}") for r in lost}
    assert {(t.dest, t.shard) for t in found.plan.transfers} == {
        (r, name) for r in lost for name in ("common", local_state_name(r))
    }
    assert all(found.command(rank, "", 1.0).HasField("decode") for rank in records)
    assert not found.retry([("common", 0)]).decodes, "what has been decoded stays"


def test_a_version_that_some_have_not_made_parity_of_yet_is_not_gone_to() -> None:
    """Rank 0 is live at 7, and the others were still in the exchange of its parity: all go back to 6."""
    records = protected(4, 1)
    records[2].forget_process()
    for rank in (0, 1, 3):
        parity = records[rank].inventory.parity
        assert parity is not None
        old = [EncodingHeld(3, (SHARD,) * 4, 1, 64, frozenset({6}), frozenset()) for _ in parity.encodings]
        records[rank].inventory.parity = replace(parity, encodings=tuple(old))
    found = decide(records, None).round
    assert found.version == 6 and [o.version for o in found.decodes] == [6]


def test_more_than_parity_covers_says_so() -> None:
    records = protected(4, 1)
    for rank in (1, 3):
        records[rank].forget_process()
    with pytest.raises(JobFailedError, match=r"no version exists .* the parity group of ranks 0, 1, 2 and 3"):
        decide(records, None)


def test_where_nothing_is_lost_nothing_is_decoded() -> None:
    assert decide(protected(4, 1), None).round.decodes == ()


# -- snapshots that are taken seldom --------------------------------------------------------------


def left_by_all(version: int) -> dict[int, RankRecord]:
    """All ranks have died, and have left a snapshot of this version."""
    records = {}
    for rank in range(2):
        record = records[rank] = RankRecord(rank)
        record.inventory.needs = {"model": 100, local_state_name(rank): 5}
        record.inventory.local_states = (version,)
        record.inventory.take(-1, [pb.Held(kind=Kind.UNDO.value, version=version, shards=["model"])])
    return records


@pytest.mark.parametrize(("saved", "taken"), [(63, ""), (64, ""), (65, ""), (66, "checkpoint")])
def test_a_checkpoint_that_is_newer_than_a_snapshot_is_taken(saved: int, taken: str) -> None:
    """One step is done again rather than that the storage is read."""
    decision = decide(left_by_all(64), (saved, "checkpoint"))
    assert (decision.checkpoint, decision.round.version) == (taken, saved if taken else 64)

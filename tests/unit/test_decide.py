"""The controller's short way to the version and the sources is the long one's: random worlds, both asked."""

from __future__ import annotations

import random

import pytest

from flashrecovery.controller.records import RankRecord, capsule_name
from flashrecovery.controller.restore import decide
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import Kind, NoCut, newest_cut, plan_restore
from flashrecovery.proto import flashrecovery_pb2 as pb


def some_world(pick: random.Random) -> dict[int, RankRecord]:
    """Replicas, capsules, neighbour copies, undo copies; a few ranks dead, torn or behind."""
    world = pick.randrange(2, 9)
    records = {}
    for rank in range(world):
        record = records[rank] = RankRecord(rank)
        record.needs = {f"model/{rank % 3}": 100, "common": 10, capsule_name(rank): 5}
        record.live = pick.choice([7, 7, 7, 7, 6, 8, -1])
        record.capsules = tuple(v for v in (5, 6, 7, 8) if pick.random() < 0.6)
        held = []
        for name in ("common", f"model/{rank % 3}", capsule_name((rank - 1) % world), "nobody needs it"):
            if pick.random() < 0.4:
                kind = Kind.COPY if name.startswith("capsule") else Kind.UNDO
                version = pick.choice([6, 7, 7, 8])
                held.append(pb.Held(kind=kind.value, version=version, shards=[name], nbytes=[5]))
        record.take_inventory(record.live, held)
    return records


def test_the_short_way_is_the_long_one() -> None:
    pick = random.Random(3)
    plain = 0
    for _ in range(2000):
        records = some_world(pick)
        needs = [n for r in records.values() for n in r.need_list()]
        holdings = [h for r in records.values() for h in r.holdings()]
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
        record.needs = {f"model/{rank % 1000}": 100, "common": 10, capsule_name(rank): 5}
        kept = capsule_name((rank - 8) % world)
        held = [] if rank in lost else [pb.Held(kind="copy", version=7, shards=[kept], nbytes=[5])]
        record.take_inventory(-1 if rank in lost else 7, held)
    found = decide(records, None).round
    assert found.version == 7 and len(found.holdings) < 300
    sources = {(t.dest, t.shard): t.source for t in found.plan.transfers}
    assert sources[700, "model/700"] in (1700, 2700) and sources[701, "model/701"] in (1701, 2701)
    assert sources[700, capsule_name(700)] == 708 and sources[700, "common"] not in lost
    assert len(sources) == 6

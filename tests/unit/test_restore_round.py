"""One execution of a restore plan: whose bytes were wrong, and from which rank they come next."""

from __future__ import annotations

import pytest

from flashrecovery.controller.state.rank_record import Place, RankProcess, RankRecord
from flashrecovery.controller.state.restore_plan import Decision, RestoreRound, decide, from_snapshots
from flashrecovery.plan import NoSourceError
from flashrecovery.plan.restore.ranged import LEAST_BYTES as LARGE
from flashrecovery.proto import flashrecovery_pb2 as pb

VERSION, LOST = 6, 3


def record(rank: int) -> RankRecord:
    """Ranks 0 to 2 hold everything of VERSION; rank LOST has been filled again and has its rank-local state's page
    only."""
    one = RankRecord(rank)
    one.inventory.needs = {"a": 16, "b": 16, f"capsule@{rank}": 1}
    own = [pb.Held(kind="page", version=VERSION, shards=[f"capsule@{rank}"], nbytes=[1])]
    one.inventory.take(-1 if rank == LOST else VERSION, own if rank == LOST else [])
    one.place = Place.STOPPED
    return one


def planned() -> RestoreRound:
    return decide({rank: record(rank) for rank in range(4)}, None).round


def source_of(round_: RestoreRound, shard: str) -> int:
    (source,) = {t.source for t in round_.plan.transfers if t.shard == shard}
    return source


def carried_out(round_: RestoreRound, wrong: str = "") -> None:
    """All have reported; what has come of the shard ``wrong`` is not what was sent."""
    sent: dict[int, dict[str, str]] = {}
    for t in round_.plan.transfers:
        sent.setdefault(t.source, {})[t.shard] = "good"
    for rank, digests in sent.items():
        round_.report(rank, pb.Reply(sent_digests=digests))
    received = {t.shard: "bad" if t.shard == wrong else "good" for t in round_.plan.transfers}
    round_.report(LOST, pb.Reply(received_digests=received, bytes_received=16 * len(received)))


def test_what_nobody_has_reported_is_wrong() -> None:
    round_ = planned()
    assert sorted(shard for shard, _ in round_.mismatches()) == ["a", "b"]
    carried_out(round_)
    assert round_.mismatches() == [] and round_.bytes_received() == 32


def test_one_side_alone_proves_nothing() -> None:
    round_ = planned()
    carried_out(round_)
    del round_.reports[source_of(round_, "a")]
    assert "a" in {shard for shard, _ in round_.mismatches()}


def test_a_wrong_shard_comes_from_each_other_source_in_turn() -> None:
    """Only that shard again, never from a source that was wrong, and nothing that was said of the last round counts."""
    round_, tried = planned(), []
    for _ in range(3):
        carried_out(round_, wrong="a")
        tried.append(source_of(round_, "a"))
        wrong = round_.mismatches()
        assert wrong == [("a", tried[-1])]
        if len(tried) == 3:
            break
        round_ = round_.retry(wrong)
        assert {t.shard for t in round_.plan.transfers} == {"a"}
        assert round_.version == VERSION and round_.mismatches() and round_.bytes_received() == 0
    assert sorted(tried) == [0, 1, 2]
    with pytest.raises(NoSourceError):
        round_.retry(round_.mismatches())


def test_each_rank_is_told_its_own_part() -> None:
    round_ = planned()
    lost = round_.command(LOST, "", 7.0)
    assert sorted(t.shard for t in lost.transfers) == ["a", "b"] and list(lost.local) == ["capsule@3"]
    assert {t.dest for t in lost.transfers} == {LOST} and (lost.version, lost.deadline_s) == (VERSION, 7.0)
    source = source_of(round_, "a")
    assert "a" in {t.shard for t in round_.command(source, "", 7.0).transfers}
    others = round_.command(None, "/checkpoint", 7.0)
    assert not others.transfers and not others.local and others.checkpoint == "/checkpoint"
    assert round_.busy == {LOST, *(t.source for t in round_.plan.transfers)}


def planned_in_ranges(*, nodes: int = 4, device: bool = False) -> RestoreRound:
    """Each rank on a host of its own, or the holders on one; shards are large."""
    records = {rank: record(rank) for rank in range(4)}
    for rank, one in records.items():
        one.inventory.needs |= {"a": LARGE, "b": LARGE}
        one.inventory.uses_device = device and rank == 0
        one.process = RankProcess(pid=rank + 1, host=f"10.0.0.{rank if nodes == 4 else int(rank == LOST)}")
    return decide(records, None).round


def test_what_comes_in_ranges_is_an_order_of_its_own() -> None:
    round_ = planned_in_ranges()
    for rank in range(4):
        order = round_.command(rank, "", 7.0)
        assert not order.transfers
        ((dest, holders, shards, kind),) = {(o.dest, *map(tuple, (o.holders, o.shards)), o.kind) for o in order.ranged}
        assert (dest, holders, shards, kind) == (LOST, (0, 1, 2), ("a", "b"), "live")
    assert not round_.command(None, "", 7.0).ranged and round_.busy == {0, 1, 2, LOST}
    assert all(round_.senders(t) == (0, 1, 2) for t in round_.plan.transfers)


def test_between_accelerators_nothing_comes_in_ranges() -> None:
    """One rank that uses one is enough: a replacement may not have begun to."""
    round_ = planned_in_ranges(device=True)
    assert not round_.plan.ranged and {t.shard for t in round_.command(LOST, "", 7.0).transfers} == {"a", "b"}


@pytest.mark.parametrize("device", [False, True])
def test_a_relaunch_knows_of_accelerators_before_any_rank_has_been_stopped(device: bool) -> None:
    """What ranks find of an earlier launch is planned from what they say at their first step."""
    records = {rank: RankRecord(rank) for rank in range(4)}
    for rank, one in records.items():
        one.process = RankProcess(pid=rank + 1, host=f"10.0.0.{rank}")
        copies = [pb.Held(kind="copy", version=VERSION, shards=["a"], nbytes=[LARGE])] if rank != LOST else []
        needs = [pb.ShardNeed(name="a", nbytes=LARGE)] if rank == LOST else []
        one.joined(pb.Joined(rank=rank, needs=needs, held=copies, uses_device=device and rank == 0))
    decision = from_snapshots(records)
    assert isinstance(decision, Decision) and [t.dest for t in decision.round.plan.transfers] == [LOST]
    assert [one.holders for one in decision.round.plan.ranged] == ([] if device else [(0, 1, 2)])


def answered(round_: RestoreRound, sent: dict[int, str], received: str) -> None:
    """Digests of shard "a"; that of "b" is the same everywhere."""
    for rank, digest in sent.items():
        said = {"a": digest} if digest else {}
        round_.report(rank, pb.Reply(sent_digests={**said, "b": "good"}))
    round_.report(LOST, pb.Reply(received_digests={"a": received, "b": "good"}, bytes_received=1))


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        pytest.param({0: "x", 1: "x", 2: "x"}, "damaged", id="on-the-way"),
        pytest.param({0: "x", 1: "y", 2: "x"}, "mixed", id="of-two-ranks"),
        pytest.param({0: "x", 1: "y", 2: "x"}, "x", id="of-equal-ones-though-one-differs"),
        pytest.param({0: "x", 1: "", 2: "x"}, "x", id="one-has-said-nothing"),
    ],
)
def test_ranges_that_make_no_whole_come_again_from_one_rank(sent: dict[int, str], received: str) -> None:
    """None of them is known to be wrong: all may be asked again, and then one alone, until it has been wrong."""
    round_ = planned_in_ranges()
    answered(round_, sent, received)
    wrong = round_.mismatches()
    assert {shard for shard, _ in wrong} == {"a"}
    tried = []
    for _ in range(3):
        round_ = round_.retry(wrong)
        assert not round_.plan.ranged and {t.shard for t in round_.plan.transfers} == {"a"}
        tried.append(source_of(round_, "a"))
        round_.report(tried[-1], pb.Reply(sent_digests={"a": "x"}))
        round_.report(LOST, pb.Reply(received_digests={"a": "damaged"}, bytes_received=1))
        wrong = round_.mismatches()
        assert wrong == [("a", tried[-1])]
    assert sorted(tried) == [0, 1, 2]


def test_the_only_holder_of_ranges_is_not_asked_again() -> None:
    round_ = planned_in_ranges(nodes=2)
    assert len({t.holders for t in round_.plan.ranged}) == 1
    (holder,) = round_.plan.ranged[0].holders
    answered(round_, {holder: "x"}, "damaged")
    assert source_of(round_.retry(round_.mismatches()), "a") != holder


def test_from_a_checkpoint_nobody_sends_anything() -> None:
    records = {rank: record(rank) for rank in range(4)}
    round_ = RestoreRound.from_checkpoint(2, records, "no cut")
    assert (round_.version, round_.plan.version, round_.reason) == (2, 2, "no cut")
    assert round_.ranks == (0, 1, 2, 3) and not round_.busy and not round_.mismatches()
    assert round_.plan.bytes_on_wire == 0

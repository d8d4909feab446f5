"""What only those have who leave a job: which rank serves it, and which can leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from flashrecovery.controller.state.custody import choose_leaving, custody, left_behind, sharded
from flashrecovery.controller.state.membership import Membership
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.controller.state.restore_plan import decide
from flashrecovery.errors import JobFailedError
from flashrecovery.plan import Kind
from flashrecovery.proto import flashrecovery_pb2 as pb


def records(
    size: int = 4, version: int = 7, copies: Mapping[int, Sequence[int]] | None = None
) -> dict[int, RankRecord]:
    """Ranks with a shard each, and something that all have. ``copies``: versions of the copies that each rank keeps
    for the one before it."""
    found = {}
    for rank in range(size):
        record = RankRecord(rank)
        record.inventory.needs = {f"w#shard={rank}/{size}": 100, "common": 10, f"capsule@{rank}": 5}
        record.inventory.sharded = frozenset({f"w#shard={rank}/{size}"})
        kept = (version,) if copies is None else copies.get(rank, ())
        owner = (rank - 1) % size
        names = [f"w#shard={owner}/{size}", f"capsule@{owner}"]
        held = [pb.Held(kind=Kind.COPY.value, version=v, shards=names, nbytes=[100, 5]) for v in kept]
        record.inventory.take(version, held)
        found[rank] = record
    return found


def without(everybody: dict[int, RankRecord], *ranks: int) -> dict[int, dict[str, int]]:
    return {rank: everybody.pop(rank).inventory.needs for rank in ranks}


def test_who_has_a_part_follows_each_change() -> None:
    members = Membership(sharded_among=(0, 1, 2))
    assert members.has_part(2) and not members.has_part(3)
    members.resharded((0, 3))
    assert members.has_part(3) and not members.has_part(2)
    members.sharded_among = (2,)
    assert members.has_part(2) and not members.has_part(0)


def test_whether_state_is_sharded() -> None:
    everybody = records()
    assert sharded(list(everybody.values()))
    everybody[2].inventory.need_no_part()
    assert sharded(list(everybody.values()))
    assert sharded(list(records(1).values()))  # it has all parts, and others are to get theirs
    for record in everybody.values():
        record.inventory.needs = {"w": 100, "common": 10, f"capsule@{record.rank}": 5}
        record.inventory.sharded = frozenset()
    assert not sharded(list(everybody.values()))


def test_what_nobody_else_needs_is_left_behind() -> None:
    everybody = records()
    removed = without(everybody, 1)
    assert [(n.rank, n.shard) for n in left_behind(removed, everybody.values())] == [(1, "w#shard=1/4")]
    everybody[2].inventory.needs["w#shard=1/4"] = 100  # a replica
    assert left_behind(removed, everybody.values()) == []


def test_the_neighbour_serves_it() -> None:
    everybody = records()
    removed = without(everybody, 1, 3)
    found = custody(left_behind(removed, everybody.values()), everybody.values(), 7)
    assert found is not None
    assert [(c.owner, c.shard, c.holder, c.kind) for c in found] == [
        (1, "w#shard=1/4", 2, "copy"),
        (3, "w#shard=3/4", 0, "copy"),
    ]


@pytest.mark.parametrize("leaving", [(1, 2), (0, 1), (0, 3)])
def test_a_rank_whose_neighbour_leaves_as_well(leaving: tuple[int, ...]) -> None:
    everybody = records()
    removed = without(everybody, *leaving)
    assert custody(left_behind(removed, everybody.values()), everybody.values(), 7) is None
    with pytest.raises(JobFailedError, match="held by no living process or copy"):
        decide(everybody, None, range(4), removed)


def test_copies_of_another_version_do_not_count() -> None:
    everybody = records(copies=dict.fromkeys(range(4), (6,)))
    removed = without(everybody, 1)
    assert custody(left_behind(removed, everybody.values()), everybody.values(), 7) is None


def test_all_go_back_to_the_version_of_the_copies() -> None:
    """The others have their own of it, too."""
    everybody = records(copies=dict.fromkeys(range(4), (6,)))
    for record in everybody.values():
        own = [pb.Held(kind=Kind.UNDO.value, version=6, shards=list(record.inventory.needs))]
        record.inventory.take(7, [*own, pb.Held(kind="copy", version=6, shards=[f"w#shard={(record.rank - 1) % 4}/4"])])
    removed = without(everybody, 1)
    round_ = decide(everybody, None, range(4), removed).round
    assert round_.version == 6 and round_.reshape is not None
    assert list(round_.reshape.before) == [0, 1, 2, 3] and list(round_.reshape.after) == [0, 2, 3]
    assert [(c.owner, c.holder) for c in round_.reshape.custody] == [(1, 2)]


def test_nothing_is_sharded_otherwise_among_the_same_ranks() -> None:
    everybody = records()
    assert decide(everybody, None, range(4), {}).round.reshape is None
    assert decide(everybody, None).round.reshape is None


def test_the_last_ones_leave_as_far_as_their_state_is_elsewhere() -> None:
    everybody = records()
    assert choose_leaving(everybody, {}, 1, 7) == [3]
    assert choose_leaving(everybody, {}, 2, 7) == [1, 3]
    assert choose_leaving(everybody, {}, 3, 7) is None
    assert choose_leaving(everybody, {}, 1, 6) is None


def test_of_replicas_the_last_ones_leave() -> None:
    everybody = records()
    for record in everybody.values():
        record.inventory.needs = {"w": 100, "common": 10, f"capsule@{record.rank}": 5}
    assert choose_leaving(everybody, {}, 3, 7) == [1, 2, 3]


def test_one_who_has_just_left_counts() -> None:
    """Rank 0 has died, and rank 1 keeps its copies: it cannot leave at once."""
    everybody = records()
    removed = without(everybody, 0)
    assert choose_leaving(everybody, removed, 1, 7) == [2]


def test_a_local_state_that_nobody_has_is_another_ranks_in_an_elastic_job() -> None:
    """What each rank has for itself there is as good as equal. In any other job it is lost."""
    everybody = records(2, copies={})
    for record in everybody.values():
        record.inventory.needs = {"w": 100, "common": 10, f"capsule@{record.rank}": 5}
    everybody[1].inventory.take(-1, [])
    with pytest.raises(JobFailedError, match="capsule@1"):
        decide(everybody, None)
    round_ = decide(everybody, None, (0, 1)).round
    assert round_.version == 7 and round_.reshape is None
    assert {(t.shard, t.source, t.kind) for t in round_.plan.transfers} == {
        ("w", 0, Kind.LIVE),
        ("common", 0, Kind.LIVE),
        ("capsule@1", 0, Kind.LENT),
    }


def test_who_has_nothing_does_not_stay_alone() -> None:
    everybody = records()
    for record in everybody.values():
        record.inventory.needs = {"w": 100, "common": 10, f"capsule@{record.rank}": 5}
        record.inventory.take(7 if record.rank == 3 else -1, [])
    assert choose_leaving(everybody, {}, 3, 7) == [0, 1, 2]
    assert choose_leaving(everybody, {}, 3, 7, on_disk=True) == [1, 2, 3]
    assert choose_leaving(everybody, {}, 1, 7, named=[3]) is None


def test_what_a_rank_had_that_this_controller_has_never_heard_of() -> None:
    """It had died before: the copies say what it had."""
    everybody = records()
    without(everybody, 1)
    removed: dict[int, dict[str, int]] = {1: {}}
    assert [(n.rank, n.shard) for n in left_behind(removed, everybody.values())] == [(1, "w#shard=1/4")]
    reshape = decide(everybody, None, range(4), removed).round.reshape
    assert reshape is not None and [(c.owner, c.shard, c.holder) for c in reshape.custody] == [(1, "w#shard=1/4", 2)]


def test_a_rank_of_which_nothing_is_known_has_had_its_part() -> None:
    """It had died before this controller came, and so has whoever kept its copies: the job goes back to a checkpoint,
    or says what is lost. Where all have the same, nothing is."""
    everybody = records()
    without(everybody, 1, 2)
    removed: dict[int, dict[str, int]] = {1: {}, 2: {}}
    with pytest.raises(JobFailedError, match=r"capsule@1"):
        decide(everybody, None, range(4), removed)
    assert decide(everybody, (5, "step-5"), range(4), removed).checkpoint == "step-5"
    for record in everybody.values():
        record.inventory.needs = {"w": 100, "common": 10, f"capsule@{record.rank}": 5}
        record.inventory.sharded = frozenset()
        record.inventory.take(7, [])
    assert left_behind(removed, everybody.values()) == []


def test_only_a_copy_is_served() -> None:
    """What someone has of its own, from before, may be of another sharding."""
    everybody = records(copies={})
    removed = without(everybody, 1)
    own = pb.Held(kind=Kind.UNDO.value, version=7, shards=["w#shard=1/4"], nbytes=[100])
    everybody[2].inventory.take(7, [own])
    assert custody(left_behind(removed, everybody.values()), everybody.values(), 7) is None


def test_whoever_keeps_what_another_one_had_who_has_left_stays() -> None:
    everybody = records()
    removed = without(everybody, 1)
    assert choose_leaving(everybody, removed, 1, 7, named=[2]) is None

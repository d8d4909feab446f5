"""State that is sharded among replicas of several ranks: that of each model rank among the ranks that have it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flashrecovery.adapter import placement as adapter_placement
from flashrecovery.adapter import replicated
from flashrecovery.config import ElasticSettings, RunConfig
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.loss_policy import leaving_without
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.controller.state.restore_plan import decide
from flashrecovery.errors import JobFailedError, RestoreError
from flashrecovery.plan import Kind
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.plan.reshard.layouts import chunked
from flashrecovery.plan.reshard.placements import Rows, Whole
from flashrecovery.plan.reshard.plan import plan_reshard
from flashrecovery.plan.reshard.rules import Naming, TensorRule, from_plain, to_plain
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint.contents import contents
from flashrecovery.redundancy.checkpoint.convert import LooseShard, convert
from flashrecovery.redundancy.checkpoint.published import newest
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback
from flashrecovery.runtime import naming
from flashrecovery.state.spec import ShardSpec, TensorSpec
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard.reshard import Reshaping, _change, _ShardLayouts, _Sharers
from tests.support.checkpoints import load
from tests.unit.test_reshaping import ROWS, InRows, Kept, OneAdapter
from tests.unit.test_reshaping import Rows as RowsShard

SHAPES = [ReplicaShape(r, inner, outer) for r, inner, outer in itertools.product((2, 3, 4), (1, 2), (1, 2, 3))]


def text(shape: ReplicaShape) -> str:
    return f"{shape.replicas}x{shape.inner}x{shape.outer}"


@pytest.mark.parametrize("per_node", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_copies_stay_among_those_who_stand_at_the_same_place(shape: ReplicaShape, per_node: int) -> None:
    """Whatever replica has left: everybody's are with another one of these, and no rank keeps those of two."""
    for gone in (None, *range(shape.replicas)):
        members = [rank for rank in range(shape.world) if shape.replica(rank) != gone]
        ring = shape.ring(members, per_node if per_node < shape.world else 1, per_node)
        assert sorted(ring) == list(range(len(members)))
        for number, keeper in enumerate(ring):
            assert shape.model_rank(members[number]) == shape.model_rank(members[keeper])
            alone = len(shape.by_replica(members)) == 1
            assert (number == keeper) == alone
            assert alone or shape.replica(members[number]) != shape.replica(members[keeper])


def test_where_each_rank_is_a_replica_the_ring_is_that_of_all() -> None:
    for size, stride, per_node in itertools.product((2, 3, 5), (1, 2, 3), (1, 2, 5)):
        assert ReplicaShape(size).ring(range(size), stride, per_node) == ring_of(range(size), stride, per_node)


def test_copies_are_on_another_node_where_one_of_the_same_place_is_there() -> None:
    """Two replicas of two ranks on each of three nodes, of which one, or one replica, has left."""
    shape = ReplicaShape(6, 2)
    for gone in ((), (2, 3), (1,)):
        members = [rank for rank in range(shape.world) if shape.replica(rank) not in gone]
        for number, keeper in enumerate(shape.ring(members, 4, 4)):
            assert members[number] // 4 != members[keeper] // 4
    assert shape.ring(range(4), 4, 4) == [2, 3, 0, 1], "one node is left"


@pytest.mark.parametrize(("shape", "node"), [(ReplicaShape(4, 2), 4), (ReplicaShape(6, 2), 4), (ReplicaShape(4, 4), 8)])
def test_copies_are_on_another_node(shape: ReplicaShape, node: int) -> None:
    """Nodes of whole replicas, which follow on each other."""
    for number, keeper in enumerate(shape.ring(range(shape.world), node, node)):
        assert number // node != keeper // node


def test_peers_and_their_shape() -> None:
    shape = ReplicaShape(3, 2, 2)  # 0 1 | 2 3 | 4 5 and 6 7 | 8 9 | 10 11
    members = [0, 1, 4, 5, 6, 7, 10, 11]
    assert shape.peers(members, 11) == [7, 11] and shape.peers(members, 4) == [0, 4]
    assert shape.now(members) == ReplicaShape(2, 2, 2)
    assert shape.unlike(ReplicaShape(3, 4, 1)) and shape.unlike(ReplicaShape(3, 2, 1))
    assert not shape.unlike(ReplicaShape(2, 2, 2)) and not shape.unlike(ReplicaShape(1, 4, 1))


# -- one rank's part in sharding again -------------------------------------------------------------------


def of_four(rank: int, mate: int) -> tuple[Reshaping, Registry, OneAdapter, Kept]:
    """One of two replicas of two ranks, whose peer ``mate`` has left, and whose copies it keeps."""

    def never(*_: object) -> Any:
        raise AssertionError

    shape = ReplicaShape(2, 2)
    registry = Registry(rank, 4, never, never)
    registry.shape = shape
    adapter = OneAdapter(shape.replica(rank), 2)
    adapter.shard.holders = (rank,)
    registry.adapters.append(adapter)
    registry.close()
    kept = Kept(shape.replica(mate), 2)
    return Reshaping(registry, cast(Copies, kept), rank, (0, 1, 2, 3)), registry, adapter, kept


@pytest.mark.parametrize(("rank", "mate", "after"), [(0, 2, (0, 1)), (1, 3, (0, 1)), (2, 0, (2, 3)), (3, 1, (2, 3))])
def test_who_stays_takes_the_part_of_the_one_who_stood_there(rank: int, mate: int, after: Sequence[int]) -> None:
    reshaping, registry, adapter, kept = of_four(rank, mate)
    registry.resize(after, rank)
    message = pb.Reshape(before=range(4), after=after)
    for other in sorted({*range(4)} - {*after}):
        holder = other + 2 if other < 2 else other - 2
        place = ReplicaShape(2, 2).replica(other)
        message.custody.add(shard=f"rows#shard={place}/2", owner=other, holder=holder, kind=Kind.COPY.value)
    reshaping.make_ready(message, 5, 1, corrupt=False)
    assert kept.said[-1] == "ready rows#shard=0/1" and torch.equal(adapter.shard.data, RowsShard(rank // 2, 2).data)
    reshaping.put_in_place()
    assert torch.equal(adapter.shard.data, ROWS) and reshaping.layout == tuple(after)
    assert adapter.shard.holders == (after.index(rank),), "its number in the group, and not its place in the sharding"
    assert reshaping.settle(tuple(range(4))) == -1


def test_a_replacement_takes_on_the_division_of_its_own_place() -> None:
    """The others go on in a layout of two replicas; its number in that is not its place."""

    def never(*_: object) -> Any:
        raise AssertionError

    registry = Registry(5, 6, never, never)
    registry.shape = ReplicaShape(3, 2)
    adapter = OneAdapter(2, 3)
    adapter.shard.holders = (5,)
    registry.adapters.append(adapter)
    registry.close()
    said: list[tuple[int, tuple[int, ...]]] = []

    class Begins(Kept):
        def begin_sharded(self, shards: Sequence[Any], place: int, members: tuple[int, ...]) -> None:
            said.append((place, members))

    reshaping = Reshaping(registry, cast(Copies, Begins(0, 2)), 5, range(6))
    registry.resize((2, 3, 4, 5), 5)
    assert reshaping.begin((2, 3, 4, 5))
    assert adapter.shard.name == "rows#shard=1/2" and adapter.shard.holders == (3,)
    assert said == [(3, (2, 3, 4, 5))]


@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_nothing_goes_from_one_place_to_another(shape: ReplicaShape) -> None:
    """By the plan that each of a place's ranks makes."""
    everybody = range(shape.world)
    for gone, rank in itertools.product(range(shape.replicas), everybody):
        if shape.replica(rank) == gone:
            continue
        after = [member for member in everybody if shape.replica(member) != gone]
        ring, number_of = shape.ring(range(shape.world), 1, shape.world), {member: n for n, member in enumerate(after)}
        old, new = (_Sharers.of(shape.peers(some, rank), some, rank) for some in (everybody, after))
        shard_layout = InRows(RowsShard(old.place, old.size), old.size)
        of_all = _ShardLayouts({0: shard_layout}, {0: shard_layout.describe()})
        leaver = shape.rank(gone, shape.model_rank(rank))
        item = pb.Custody(shard=f"rows#shard={gone}/{old.size}", owner=leaver, holder=ring[leaver])
        change = _change(of_all, old, new, number_of, {(leaver, item.shard): item})
        plan = plan_reshard(change.spaces, change.old, change.new)
        peers = {number_of[peer] for peer in new.ranks}
        assert {n for share in (*change.old["0/rows"], *change.new["0/rows"]) for n in share.ranks} <= peers
        for place, peer in enumerate(new.ranks):
            low, high = chunked(7, new.size)[place]
            have = sum(box.size for _, box in plan.kept(number_of[peer]))
            assert have <= (high - low) * 2
        if new.size == 1:
            assert plan.moved_bytes == 0


# -- who leaves -----------------------------------------------------------------------------------------


def job_of_three(*, sharded: bool) -> JobState:
    """Three replicas of two ranks, all of which train; each part has copies with the next one of its place."""
    job = JobState(RunConfig(nproc_per_node=6, elastic=ElasticSettings(min=1, max=3)), state=State.RUNNING)
    for record in job.in_order:
        job.move(record.rank, Place.RUNNING)
        record.shape = ReplicaShape(3, 2)
        record.inventory.needs = {f"w#shard={record.rank // 2}/3,stand={record.rank % 2}": 9}
        record.inventory.sharded = frozenset(record.inventory.needs if sharded else ())
    return job


@pytest.mark.parametrize("sharded", [True, False])
def test_who_keeps_the_only_copies_of_what_is_being_filled_does_not_leave(sharded: bool) -> None:
    """Rank 1 is being filled again; rank 3, healthy, keeps the copies of its part. Then rank 2 is lost, for which there
    is no room, and rank 3 would leave with it."""
    job = job_of_three(sharded=sharded)
    job.vacate(1)
    job.vacate(2)
    assert leaving_without(job, [2]) == (() if sharded else (2,))
    assert job.keepers_of_copies()[1] == (3 if sharded else 2) and job.keepers_of_parts()[1] == 3
    job.remove_member(3)
    assert (job.keepers_of_copies()[1] in job.ranks) is not sharded


@pytest.mark.parametrize("filled", [3, None])
def test_it_leaves_where_it_keeps_nobodys(filled: int | None) -> None:
    """Copies of rank 3's part are with rank 5, those of rank 5's with rank 1; and a rank that is lost keeps nothing
    anyway."""
    job = job_of_three(sharded=True)
    job.vacate(2)
    if filled is not None:
        job.vacate(filled)
    assert leaving_without(job, [2]) == (2,)
    job.vacate(3)
    assert leaving_without(job, [2, 3]) == (2, 3)


def test_a_healthy_rank_does_not_leave_while_it_alone_has_its_part() -> None:
    """Copies of rank 3's part were with rank 5, which is being filled again. Once rank 3 is lost, too, nothing is won
    by waiting."""
    job = job_of_three(sharded=True)
    job.vacate(2)
    job.vacate(5)
    assert leaving_without(job, [2]) == ()
    job.vacate(3)
    assert leaving_without(job, [2, 3]) == (2, 3)


def members(shape: ReplicaShape, live: int = 7, late: Collection[int] = ()) -> dict[int, RankRecord]:
    """All are at this version and can go back to the one before; each keeps copies of both for the one whose keeper it
    is, but for those of the ``late`` ranks, which have not arrived yet."""
    ring = shape.ring(range(shape.world), 1, shape.world)
    found = {}
    for rank in range(shape.world):
        record = RankRecord(rank)
        record.shape = shape
        part = f"w#shard={shape.replica(rank)}/{shape.replicas},stand={shape.model_rank(rank)}"
        record.inventory.needs = {part: 100, "common": 10, f"capsule@{rank}": 5}
        record.inventory.sharded = frozenset({part})
        owner = ring.index(rank)
        copied = f"w#shard={shape.replica(owner)}/{shape.replicas},stand={shape.model_rank(owner)}"
        held = [pb.Held(kind=Kind.UNDO.value, version=v, shards=list(record.inventory.needs)) for v in (live - 1,)]
        for version in (live - 1, live):
            if owner not in late or version < live:
                names = [copied, f"capsule@{owner}"]
                held.append(pb.Held(kind=Kind.COPY.value, version=version, shards=names, nbytes=[100, 5]))
        record.inventory.take(live, held)
        found[rank] = record
    return found


def without(everybody: dict[int, RankRecord], shape: ReplicaShape, *replicas: int) -> dict[int, dict[str, int]]:
    return {rank: everybody.pop(rank).inventory.needs for replica in replicas for rank in shape.ranks(replica)}


@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_what_the_leaving_replica_had_is_with_those_of_the_same_place(shape: ReplicaShape) -> None:
    """What its healthy ranks had, too."""
    ring = shape.ring(range(shape.world), 1, shape.world)
    for gone in range(shape.replicas):
        everybody = members(shape)
        removed = without(everybody, shape, gone)
        found = decide(everybody, None, range(shape.world), removed).round
        assert found.version == 7 and found.reshape is not None
        assert (list(found.reshape.before), list(found.reshape.after)) == ([*range(shape.world)], [*everybody])
        assert {c.owner: c.holder for c in found.reshape.custody} == {rank: ring[rank] for rank in shape.ranks(gone)}


def test_the_version_of_which_all_of_the_leaving_replica_is_there() -> None:
    """Copies of one of its ranks had not arrived yet, those of the others had."""
    shape = ReplicaShape(3, 2)
    for late in (2, 3):
        everybody = members(shape, late=[late])
        found = decide(everybody, None, range(6), without(everybody, shape, 1)).round
        assert found.version == 6 and found.reshape is not None and len(found.reshape.custody) == 2


def test_of_two_replicas_at_once_neither_may_keep_the_others_copies() -> None:
    shape = ReplicaShape(4, 2)
    for one, other in itertools.combinations(range(4), 2):
        everybody = members(shape)
        removed = without(everybody, shape, one, other)
        if other - one == 2:
            found = decide(everybody, None, range(8), removed).round.reshape
            assert found is not None and len(found.custody) == 4
            continue
        with pytest.raises(JobFailedError, match="cannot be recovered"):
            decide(everybody, None, range(8), removed)


# -- names ----------------------------------------------------------------------------------------------


def test_names_of_rules_end_in_whose_they_are() -> None:
    rows = TensorRule("w", (7, 2), 4, Rows(), "w#part=", "param", Naming.PLACE_UNLESS_ALONE, suffix="stand=1")
    flat = TensorRule("f", (7,), 4, Whole(), "flat#dp=", "data", Naming.SIZE, suffix="stand=1")
    assert (rows.shard_at(1, 2), rows.shard_at(0, 1)) == ("w#part=1/2,stand=1", "w#stand=1")
    assert (flat.shard_at(1, 2), flat.shard_at(0, 1)) == ("flat#dp=2,stand=1", "flat#dp=1,stand=1")
    assert from_plain(*to_plain([rows, flat])) == (rows, flat)
    without = TensorRule("w", (7, 2), 4, Rows(), "w#part=", "param")
    assert len(to_plain([without])[1][0]) == 9, "as versions before have written it"


def test_in_an_elastic_job_names_are_the_same_in_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages: the second one's ranks have other numbers in another size."""
    try:
        for by_model_rank, names in ((True, ["param/w#stand=1"] * 2), (False, ["param/w#group=2", "param/w#group=3"])):
            naming.by_model_rank(by_model_rank)
            found = []
            for replicas in (2, 3):
                monkeypatch.setattr(adapter_placement, "world_size", lambda replicas=replicas: 2 * replicas)
                found.append(replicated("w", range(replicas, 2 * replicas))[0])
            assert found == names
        assert naming.of_group(range(4), 4) == ""
        naming.by_model_rank(True)
        assert naming.of_group([0, 3], 4) == "group=0", "not equally far apart"
        assert naming.of_group([1], 2) == "stand=1", "one replica"
    finally:
        naming.by_model_rank(False)


# -- checkpoints ----------------------------------------------------------------------------------------

VERSION = 3


def rule(model_rank: int) -> TensorRule:
    return TensorRule("w", (7, 2), 4, Rows(), "w#shard=", "param", suffix=f"stand={model_rank}")


def whole(model_rank: int) -> torch.Tensor:
    return torch.arange(14.0).view(7, 2) + 100 * model_rank


def shards(shape: ReplicaShape, rank: int, *, filled: bool) -> list[LooseShard]:
    """Its rows of what its place has, and what all of its place have alike."""
    place, model_rank = shape.replica(rank), shape.model_rank(rank)
    mine = LooseShard(rule(model_rank).shard_at(place, shape.replicas), (rank,))
    alike = LooseShard(f"bias#stand={model_rank}", tuple(shape.peers(range(shape.world), rank)))
    if filled:
        low, high = chunked(7, shape.replicas)[place]
        for shard, key, data in ((mine, "param", whole(model_rank)[low:high]), (alike, "data", whole(model_rank)[0])):
            shard.allocate(ShardSpec({key: TensorSpec(tuple(data.shape), data.dtype)}))[key].copy_(data)
    return [mine, alike]


def saved(folder: Path, shape: ReplicaShape) -> Path:
    for rank in range(shape.world):
        writing = CheckpointFallback(folder, rank=rank, world=shape.world, shape=shape)
        writing.commit(
            VERSION,
            shards(shape, rank, filled=True),
            local_state=b"own",
            common=b"common",
            generation=0,
            rules=(rule(shape.model_rank(rank)),),
        )
        assert writing.wait(30) and writing.close(5)
    found = newest(folder)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("inner", "outer"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 2), (4, 1), (1, 2)])
def test_each_place_reads_its_own(before: int, after: int, inner: int, outer: int, tmp_path: Path) -> None:
    path, shape = saved(tmp_path, ReplicaShape(before, inner, outer)), ReplicaShape(after, inner, outer)
    for rank in range(shape.world):
        mine, alike = shards(shape, rank, filled=False)
        rules = (rule(shape.model_rank(rank)),)
        load(
            path,
            [mine, alike],
            rank=rank,
            world=shape.world,
            elastic=True,
            rules=rules,
            sharing=Sharing.of_rank(shape, rank),
        )
        low, high = chunked(7, after)[shape.replica(rank)]
        assert torch.equal(mine.tensors()["param"], whole(shape.model_rank(rank))[low:high])
        assert torch.equal(alike.tensors()["data"], whole(shape.model_rank(rank))[0])


@pytest.mark.parametrize("shape", [ReplicaShape(2, 3), ReplicaShape(6), ReplicaShape(3, 1, 2), ReplicaShape(2, 2)])
def test_other_replicas_are_refused(shape: ReplicaShape, tmp_path: Path) -> None:
    path, fits = saved(tmp_path, ReplicaShape(3, 2)), shape == ReplicaShape(2, 2)
    mine, rules = shards(shape, 0, filled=False), (rule(0),)
    if fits:
        load(path, mine, rank=0, world=shape.world, elastic=True, rules=rules, sharing=Sharing.of_rank(shape, 0))
        return
    with pytest.raises(RestoreError, match="another number of the same replicas can read it"):
        load(path, mine, rank=0, world=shape.world, elastic=True, rules=rules, sharing=Sharing.of_rank(shape, 0))


def test_a_checkpoint_of_replicas_is_shown_and_not_converted(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", ReplicaShape(2, 2))
    found = {tensor.name: tensor for tensor in contents(path).tensors}
    assert set(found) == {"w#stand=0", "w#stand=1", "bias#stand=0/data", "bias#stand=1/data"}
    assert {rank: len(boxes) for rank, boxes in found["w#stand=1"].boxes.items()} == {1: 1, 3: 1}
    with pytest.raises(RestoreError, match="2 replicas of 2 ranks each"):
        convert(path, tmp_path / "out", 2)

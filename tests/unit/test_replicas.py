"""Replicas of several ranks, without a process: which ranks make one up, and what the controller's machine does when
one of them is lost, or some come."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.config import Settings
from flashrecovery.controller.state import restore_plan
from flashrecovery.controller.state.custody import have
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.elastic.replicas import ReplicaShape, shape_of
from flashrecovery.plan.elastic.resize import ReplicaRange, filling, leaving
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.replication import copies, policy
from tests.unit.test_growing import GrowingWorld

NEIGHBOURS, APART, BOTH = ReplicaShape(3, 2, 1), ReplicaShape(3, 1, 2), ReplicaShape(3, 2, 2)
SHAPES = (NEIGHBOURS, APART, BOTH)


# -- which ranks make up a replica --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_rank_stands_in_one_replica(shape: ReplicaShape) -> None:
    places = {(shape.replica(rank), shape.model_rank(rank)): rank for rank in range(shape.world)}
    assert sorted(places) == [(replica, model_rank) for replica in range(3) for model_rank in range(shape.each)]
    assert all(shape.rank(*place) == rank for place, rank in places.items())
    assert sorted(rank for replica in range(3) for rank in shape.ranks(replica)) == list(range(shape.world))


def test_the_ranks_of_replicas() -> None:
    assert [NEIGHBOURS.ranks(replica) for replica in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [APART.ranks(replica) for replica in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [BOTH.ranks(replica) for replica in range(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_ranks_peers_say_the_shape(shape: ReplicaShape) -> None:
    for rank in range(shape.world):
        peers = [shape.rank(replica, shape.model_rank(rank)) for replica in range(3)]
        assert shape_of(peers, shape.world) == shape


@pytest.mark.parametrize(
    ("peers", "world"), [([0, 3], 4), ([1, 0], 4), ([0, 1, 3], 6), ([0, 2], 5), ([], 4), ([0, 2, 4], 8), ([1, 2], 4)]
)
def test_peers_that_say_none(peers: list[int], world: int) -> None:
    assert shape_of(peers, world) is None


def test_which_groups_follow() -> None:
    everybody = range(6)
    for ranks in ([0, 2, 4], [1, 3, 5], [2, 3], [5], list(everybody)):
        assert NEIGHBOURS.follows(ranks, everybody), ranks
    for ranks in ([0, 2], [0, 3, 4], [1, 2], [0, 1, 2, 3], [0, 1, 2, 4]):
        assert not NEIGHBOURS.follows(ranks, everybody), ranks
    assert NEIGHBOURS.follows([2, 4], [2, 3, 4, 5]), "of a job that has become smaller"


# -- who leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_lost_rank_takes_its_replica_with_it(shape: ReplicaShape) -> None:
    for rank in range(shape.world):
        found = leaving(range(shape.world), [rank], ReplicaRange(1, 3), shape)
        assert list(found) == shape.ranks(shape.replica(rank))


def test_none_leaves_where_too_few_would_be_left() -> None:
    assert leaving(range(6), [0, 2], ReplicaRange(2, 3), NEIGHBOURS) == ()
    assert leaving(range(6), [0, 1], ReplicaRange(2, 3), NEIGHBOURS) == (0, 1)


def test_what_is_left_of_a_replica_leaves_with_the_next() -> None:
    assert leaving([1, 2, 3, 4, 5], [4], ReplicaRange(1, 3), NEIGHBOURS) == (1, 4, 5)


def test_who_is_filled_where_there_is_not_room_for_all() -> None:
    """So that as many replicas as possible go on."""
    sizes = ReplicaRange(1, 3)
    assert filling(range(6), [0, 1, 3], 1, sizes, NEIGHBOURS) == [3]
    assert filling(range(6), [0, 1, 3], 2, sizes, NEIGHBOURS) == [3]
    assert filling(range(6), [0, 3, 5], 2, sizes, NEIGHBOURS) == [0, 3]
    assert filling(range(6), [0, 3, 5], 1, ReplicaRange(2, 3), NEIGHBOURS) == []
    assert filling(range(6), [0, 1], 1, sizes, NEIGHBOURS) == [], "half a replica is of no use"


# -- what is refused ----------------------------------------------------------------------------------


def test_state_that_one_node_has_alone_is_refused_before_anything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be kept of it: neighbour copies, or parity."""
    registry: Any = SimpleNamespace(
        rank=0, world_size=6, shape=NEIGHBOURS, adapters=[], batches=None, tensor_shards=list, unique_shards=list
    )
    settings = Settings.model_validate({"elastic": {"min": 1, "max": 3}})
    monkeypatch.setattr(policy, "copied_shards", lambda *_: ["param/w"])
    monkeypatch.setattr(policy, "anywhere", lambda here: here)
    monkeypatch.setattr(policy, "choice", lambda *_: pytest.fail("it was asked for a choice"))
    with pytest.raises(UnsupportedError, match="one node has all that there is of some state"):
        copies.Copies(registry, settings, *[lambda *_: None] * 5)


# -- the controller -----------------------------------------------------------------------------------


class ReplicaWorld(GrowingWorld):
    """Workers that say which ranks make up their replicas, and have what those at their place have."""

    def __init__(self, shape: ReplicaShape, **config: Any) -> None:
        self.shape = shape
        super().__init__(config.pop("nproc", shape.world), **config)

    def joined(self, rank: int, generation: int) -> pb.Joined:
        names = {f"param/w#{self.shape.model_rank(rank)}": 100, "common": 10, f"capsule@{rank}": 5}
        return pb.Joined(
            rank=rank,
            generation=generation,
            steps=self.steps,
            needs=[pb.ShardNeed(name=name, nbytes=nbytes) for name, nbytes in names.items()],
            replicas=self.shape.replicas,
            each=self.shape.each,
            inner=self.shape.inner,
        )

    def train(self) -> bool:
        """All pause, where ranks have what others do not."""
        job = self.machine.job
        running = [r.rank for r in job.ranks.values() if r.place is Place.RUNNING]
        pausing = [r for r in running if 0 <= self.pause_at.get(r, -1) <= self.version[r]]
        if job.state is not State.RUNNING or not pausing:
            return super().train()
        for rank in pausing:
            self.machine.on_paused(
                pb.Paused(rank=rank, generation=job.generation, version=self.version[rank]), self.now
            )
        return True


def world_of(shape: ReplicaShape, least: int = 1, replace: str = "never", **config: Any) -> ReplicaWorld:
    elastic = {"min": least, "max": shape.replicas, "replace": replace}
    world = ReplicaWorld(shape, steps=80, elastic=elastic, **config)
    machine = world.machine
    said = machine.on_joined

    def with_shape(message: pb.Joined, now: float, node: str = "") -> None:
        said(world.joined(message.rank, message.generation), now, node)

    machine.on_joined = with_shape  # type: ignore[method-assign]
    world.launch()
    world.go_on()
    return world


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_its_replica_leaves(shape: ReplicaShape, seed: int) -> None:
    victim = random.Random(seed).randrange(shape.world)
    world = world_of(shape)
    world.kill(victim)
    world.go_on()
    gone = shape.ranks(shape.replica(victim))
    assert world.resized() == [(3, 2, gone, [])]
    assert list(world.machine.job.ranks) == [rank for rank in range(shape.world) if rank not in gone]
    assert set(gone) - {victim} <= world.left_behind(), "those that live are told"
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_command_takes_the_last_replica(shape: ReplicaShape) -> None:
    world = world_of(shape)
    assert "2 is allowed" not in world.resize(2)
    world.go_on()
    assert world.resized() == [(3, 2, shape.ranks(2), [])]
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_replica_comes_back_as_a_whole(shape: ReplicaShape, victim: int) -> None:
    world = world_of(shape)
    world.kill(victim)
    world.go_on()
    gone = shape.ranks(shape.replica(victim))
    assert world.resize(3) == ""
    assert sorted(world.joining()) == gone
    world.go_on(20)
    assert world.resized()[1:] == [(2, 3, [], gone)]
    assert list(world.machine.job.ranks) == list(range(shape.world))
    assert world.run() is State.FINISHED


def test_a_replica_of_which_one_does_not_come_does_not_come() -> None:
    world = world_of(NEIGHBOURS)
    world.kill(2)
    world.go_on()
    world.silent = {2, 3}
    assert world.resize(3) == ""
    world.kill_joining_process(3)
    world.go_on()
    assert not world.machine.job.membership.joining and world.resized() == [(3, 2, [2, 3], [])]
    assert len(world.notices("joining_process_given_up")) == 2


def test_two_of_one_replica_are_one_loss() -> None:
    world = world_of(NEIGHBOURS, least=2)
    world.kill(4)
    world.kill(5)
    world.go_on()
    assert world.resized() == [(3, 2, [4, 5], [])]


def test_a_mate_that_dies_while_it_is_stopped() -> None:
    world = world_of(NEIGHBOURS)
    world.kill(4)
    world.step()
    world.kill(5)
    world.go_on()
    assert world.resized() == [(3, 2, [4, 5], [])]


def test_one_of_each_replica() -> None:
    """No rank is whole any more: they wait for a node."""
    world = world_of(NEIGHBOURS, timeouts={"node_wait_s": 5.0})
    for rank in (0, 2, 4):
        world.kill(rank)
    assert world.run() is not State.FINISHED
    world.now += 6.0
    world.machine.on_tick(world.now)
    assert world.machine.job.state is State.FAILED
    world.machine.on_tick(world.now + 0.1)  # fails once


def test_a_process_that_waits_for_a_replica_that_leaves_ends() -> None:
    """Rank 4 has been filled again when rank 5 cannot be."""
    world = world_of(NEIGHBOURS, replace="auto", timeouts={"replacement_s": 5.0, "fence_s": 1.0})
    world.kill(4)
    while world.machine.job.ranks[4].place is not Place.JOINED:
        assert world.step()
    world.kill(5)
    world.inbox = [(rank, command) for rank, command in world.inbox if not (rank == 5 and command.HasField("replace"))]
    while world.inbox:
        assert world.step()
    world.now += 7.0
    world.machine.on_tick(world.now)
    world.collect()
    world.go_on()
    assert world.resized() == [(3, 2, [4, 5], [])] and 4 in world.left_behind()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_local_state_is_lent_by_all_at_the_same_place_and_nobody_else(shape: ReplicaShape) -> None:
    """What each rank has for itself is alike only there: a loader's position, a tensor-parallel rank's streams."""
    came = set(shape.ranks(1))
    records = [RankRecord(rank, new=rank in came, shape=shape) for rank in range(shape.world)]
    for record in records:
        record.inventory.live = -1 if record.new else 7
    lent: dict[str, set[int]] = {}
    for holding in restore_plan._lent(records, [7]):
        lent.setdefault(holding.shard, set()).add(holding.rank)
    assert lent == {
        f"capsule@{rank}": {shape.rank(replica, shape.model_rank(rank)) for replica in (0, 2)} for rank in came
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_who_stays_has_all_only_if_each_place_has_a_local_state(shape: ReplicaShape) -> None:
    """For a rank that has just been filled again."""
    records = [RankRecord(rank, shape=shape) for rank in range(shape.world)]
    for record in records:
        record.inventory.live, record.inventory.needs = 7, {f"capsule@{record.rank}": 5}
    records[0].inventory.live = -1
    assert have(records, 7)
    for record in records:
        record.inventory.live = -1 if shape.model_rank(record.rank) == shape.model_rank(0) else 7
    assert not have(records, 7)


def test_events_count_replicas() -> None:
    (started,) = world_of(NEIGHBOURS).of(ev.JobStarted)
    assert isinstance(started, ev.JobStarted) and (started.world_size, started.replicas) == (6, 3)


def lose_node_of(world: ReplicaWorld, rank: int) -> None:
    world.inbox = [(other, command) for other, command in world.inbox if other != rank]
    world.machine.on_node_lost(world.machine.job.ranks[rank].home, "test", 0.0, world.now)
    world.collect()


def test_who_alone_has_what_another_replica_lacks_does_not_leave() -> None:
    """Rank 2 is being filled again when rank 1 loses its node, for which there is no other one: rank 0 alone has what
    rank 2 needs, and would leave with rank 1. So a node is waited for."""
    world = world_of(ReplicaShape(2, 2), replace="auto", nproc=1, nnodes=4, controller="h:1")
    world.kill(2)
    lose_node_of(world, 1)
    while world.inbox:
        assert world.step()
    job = world.machine.job
    assert job.state is not State.FAILED, job.failure_reason
    assert list(job.ranks) == [0, 1, 2, 3] and not job.ranks[1].home and not world.resized()
    world.join("node9")
    world.go_on()
    assert list(job.ranks) == [0, 1, 2, 3] and not world.resized() and job.ranks[1].home == "node9"
    assert world.run() is State.FINISHED


def test_it_leaves_where_the_other_replica_has_all() -> None:
    world = world_of(ReplicaShape(2, 2), replace="auto", nproc=1, nnodes=4, controller="h:1")
    world.kill(0)  # also being filled again, for the replica that leaves
    lose_node_of(world, 1)
    world.inbox = [(rank, command) for rank, command in world.inbox if rank != 0]
    world.go_on()
    assert world.resized() == [(2, 1, [0, 1], [])]


def verifying(at_in: int) -> tuple[ReplicaWorld, int]:
    """A recovery that is nearly over, and a command for a step so far ahead, which is the second value."""
    world = world_of(NEIGHBOURS)
    at = world.version[0] + at_in
    assert world.resize(2, at) == ""
    world.kill(0)
    while world.machine.job.state is not State.VERIFYING:
        assert world.step()
    return world, at


def test_ranks_that_pause_before_all_have_said_that_they_go_on() -> None:
    """A command that could not be carried out yet: all pause again at once, some while others still resume."""
    world, at = verifying(4)
    job = world.machine.job
    for rank in (2, 3, 4):
        world.machine.on_paused(pb.Paused(rank=rank, generation=job.generation, version=at), world.now)
    while world.inbox:
        assert world.step()
    assert job.state is State.RUNNING
    generation = job.generation
    world.machine.on_paused(pb.Paused(rank=5, generation=generation, version=at), world.now)
    assert job.generation == generation + 1, "all have paused"


def test_the_last_of_them_too() -> None:
    world, at = verifying(4)
    job = world.machine.job
    generation = job.generation
    for rank in (2, 3, 4, 5):
        world.machine.on_paused(pb.Paused(rank=rank, generation=generation, version=at), world.now)
    assert job.generation == generation
    while job.state is State.VERIFYING:
        assert world.step()
    world.machine.on_tick(world.now)
    assert job.generation == generation + 1


def test_a_command_that_was_put_aside_counts_replicas() -> None:
    """As many as it says are there when it is taken up again, though there are more ranks."""
    world = world_of(NEIGHBOURS)
    resizing = world.machine._resizing
    assert world.resize(2, world.version[0] + 40) == ""
    resizing.put_aside()
    world.kill(0)
    world.go_on()
    assert world.resized() == [(3, 2, [0, 1], [])]
    resizing.take_up()
    assert resizing.pause() is None, "no rank pauses for it"

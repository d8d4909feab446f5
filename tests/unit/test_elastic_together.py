"""An elastic job hands a node's ranks over, or has a node that is warned of, and something else happens in the same
recovery: the controller's machine, without a process."""

from __future__ import annotations

import pytest

from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_handoff_pauses import ComingWorld
from tests.unit.test_replicas import ReplicaWorld, world_of
from tests.unit.test_sharded_replicas import launched

ACROSS = ReplicaShape(3, 1, 2)
"""Replicas 0 and 3, 1 and 4, 2 and 5; on three nodes of two ranks the second one has ranks 2 and 3."""


def leaving() -> ReplicaWorld:
    """A spare node has come, the second node is to leave, and all have paused for that."""
    world = world_of(ACROSS, replace="auto", nproc=2, nnodes=3, controller="h:1")
    world.join("spare", spare=True)
    world.go_on()
    assert world.machine.drain.ask("node1", 60.0, world.now)[0] == ""
    while world.machine.job.state is State.RUNNING:
        world.machine.on_tick(world.now)
        world.collect()
        assert world.step()
    assert world.machine.job.membership.joining.keys() == {2, 3} and world.machine.job.state is State.QUIESCING
    return world


def fails_for_good(world: ReplicaWorld, rank: int) -> None:
    """Its replacements have failed too often."""
    record = world.machine.job.ranks[rank]
    record.irreplaceable = True
    world.inbox = [(other, command) for other, command in world.inbox if other != rank]
    failure = pb.Failure(rank=rank, pid=record.process.pid, kind="killed", evidence="test", step=world.version[rank])
    world.machine.on_failure(failure, world.now, record.home)
    world.collect()


def test_one_whose_replica_leaves_does_not_come_in_alone() -> None:
    world = leaving()
    fails_for_good(world, 5)
    sizes = set()
    for _ in range(400):
        if not world.step():
            break
        job = world.machine.job
        if job.state in (State.REGROUPING, State.RESTORING, State.RUNNING):
            sizes.add(tuple(job.ranks))
            assert len(job.shape.whole(job.ranks)) * 2 == len(job.ranks), f"a part of a replica: {list(job.ranks)}"
    assert (0, 1, 3, 4) in sizes
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("shape", [ReplicaShape(3), ReplicaShape(3, 2), ACROSS], ids=str)
def test_a_warned_node_stays_while_ranks_leave(shape: ReplicaShape) -> None:
    """It may have the only copies of what those have had."""
    world = launched(shape, replace="auto", single=True)
    world.join("spare", spare=True)
    world.go_on()
    keeper = world.machine.job.keepers_of_parts()[0]
    world.machine.job.nodes[world.machine.job.ranks[keeper].home].suspect = "ECC"
    world.lose(0)
    fails_for_good(world, 0)
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    assert world.resized() and not world.notices("node_replaced")


@pytest.mark.parametrize("unsure", [False, True])
def test_a_warned_node_stays_until_it_is_known_how_state_is_sharded(unsure: bool) -> None:
    """The controller before this one may have been in the middle of a change: parts of ranks that have left, of which
    this one has not heard, may be there alone."""
    world = launched(ReplicaShape(5), replace="auto", single=True)
    for name in ("spare", "another"):
        world.join(name, spare=True)
    world.go_on()
    world.machine.job.nodes["node2"].suspect = "ECC"
    world.machine.job.membership.unsure = unsure
    world.kill(0)
    while world.machine.job.state in (State.RUNNING, State.QUIESCING):
        assert world.step()
    assert bool(world.notices("node_replaced")) is not unsure
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("elastic", [False, True])
def test_an_old_one_that_gets_its_rank_back_where_it_is_is_not_ended(elastic: bool) -> None:
    """The node with the new ones is lost, and the only room for their ranks is on the node that was to leave, where the
    old ones still are."""
    world = ComingWorld(elastic={"min": 4, "max": 4} if elastic else None)
    world.inbox = [(r, c) for r, c in world.inbox if r < 2]
    before = len(world.nodes_told)
    world.machine.on_node_lost("spare", "silent", 0.5, world.now)
    world.collect()
    assert world.homes()[2:] == ["node1", "node1"]
    told = [c.rank for node, c in world.nodes_told[before:] if c.HasField("leave") and node == "node1"]
    assert told == [], "these processes alone may have what is theirs"


def test_who_has_paused_for_processes_that_do_not_come_goes_on() -> None:
    """A rank comes in, and a member has paused for it. Then a node is to leave, whose rank is needed more: the others
    may have begun the step in which that member would wait until another process is there."""
    world = launched(ReplicaShape(3), replace="auto", single=True)
    job = world.machine.job
    world.lose_node_of(2)
    while len(job.ranks) > 2 or job.recovery is not None:
        world.now += 0.0 if world.inbox else 6.0
        world.machine.on_tick(world.now)
        world.collect()
        world.step()
    for name in ("s1", "s2"):
        world.join(name, spare=True)
    while not any(step >= 0 for step in world.pause_at.values()) or world.inbox:
        world.machine.on_tick(world.now)
        world.collect()
        world.step()
    at = world.version[0] = max(world.pause_at.values())
    world.machine.on_paused(pb.Paused(rank=0, generation=job.generation, version=at), world.now)
    assert job.state is State.RUNNING and list(job.membership.joining) == [2]
    before, world.silent = job.generation, {1}
    assert world.machine.drain.ask("node1", 60.0, world.now)[0] == ""
    world.machine.on_tick(world.now)
    assert list(job.membership.joining) == [1] and job.generation == before + 1, "all go on from where it has paused"
    world.collect()
    world.go_on()
    world.silent = set()
    assert world.run() is State.FINISHED and not world.odd

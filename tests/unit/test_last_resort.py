"""Processes that were given up are taken back where a death would otherwise take the only copies of something."""

from __future__ import annotations

from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_handoff import HandoffWorld
from tests.unit.test_sharded_replicas import ShardedWorld, launched


class JustHandedOver(HandoffWorld):
    """The spare node has node1's ranks, and no rank has taken a step since: its processes keep no copies yet."""

    def __init__(self, **config: Any) -> None:
        self.copies_there = False
        super().__init__(**config)
        assert self.leave("node1") == ""
        while self.machine.job.state is not State.RUNNING or self.homes()[2:] != ["spare", "spare"]:
            assert self.step()
        assert self.machine.job.recovery is not None
        self.join("extra", spare=True)

    def lose(self, node: str) -> None:
        self.machine.on_node_lost(node, "silent", 0.5, self.now)
        self.collect()

    def answer(self, rank: int, command: pb.Command) -> None:
        home = self.machine.job.ranks[rank].home if rank in self.machine.job.ranks else ""
        if home == "extra" and command.HasField("replace"):
            self._fill(rank, command)
            return
        self.copied = self.copies_there or home not in ("spare", "extra")
        super().answer(rank, command)

    def _fill(self, rank: int, command: pb.Command) -> None:
        """By a process that finds nothing on its node."""
        self.next_pid += 1
        self.pids[rank], self.version[rank] = self.next_pid, -1
        started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=self.next_pid)
        self.machine.on_started(started, "extra", "host")
        needs = [pb.ShardNeed(name=name, nbytes=10) for name in ("param/w", "common", f"capsule@{rank}")]
        joined = pb.Joined(rank=rank, generation=command.generation, steps=self.steps, needs=needs)
        self.machine.on_joined(joined, self.now, "extra")

    def train(self) -> bool:
        going = super().train()
        self.copies_there |= going and "spare" in self.homes()
        return going


def test_who_was_relieved_comes_back_with_the_copies_of_a_rank_that_dies() -> None:
    world = JustHandedOver()
    world.lose("node0")  # the copies of its ranks are with ranks 2 and 3
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    assert world.homes()[:2] == ["extra", "extra"]


def test_nor_is_anything_lost_if_it_is_one_of_the_new_ones() -> None:
    world = JustHandedOver()
    world.kill(2)
    assert world.run() is State.FINISHED and world.homes()[2:] == ["spare", "spare"]


def test_who_was_relieved_stays_until_all_have_taken_a_step() -> None:
    world = JustHandedOver()
    assert not world.left_behind()
    while world.machine.job.recovery is not None:
        assert world.step()
    world.collect()
    while world.inbox:
        assert world.step()
    assert world.left_behind() == {2, 3}
    world.lose("node0")
    assert world.run() is State.FINISHED and world.homes() == ["extra", "extra", "spare", "spare"]


def test_if_the_old_node_is_lost_as_well_the_job_ends_by_name() -> None:
    world = JustHandedOver()
    world.lose("node1")
    world.lose("node0")
    assert world.run() is State.FAILED and "capsule@0" in world.machine.job.failure_reason


def changing() -> ShardedWorld:
    """Of four ranks the last one leaves by command, and keeps the copies of rank 2's part."""
    world = launched(ReplicaShape(4), replace="auto")
    assert world.resize(3) == ""
    while world.machine.job.state is not State.REGROUPING:
        assert world.step()
    assert list(world.machine.job.ranks) == [0, 1, 2] and world.kept[3][0] == 2
    return world


@pytest.mark.parametrize("at", [State.REGROUPING, State.RESTORING])
def test_who_leaves_by_command_comes_back_with_the_copies_of_a_rank_that_dies(at: State) -> None:
    world = changing()
    while world.machine.job.state is not at:
        assert world.step()
    world.kill(2)
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    assert not world.odd and len(world.machine.job.ranks) == 3, "and one leaves after that"
    assert not world.of(ev.FallbackStarted)


def test_who_leaves_stays_away_if_the_others_have_everything() -> None:
    world = changing()
    world.kill(1)  # whose copies are with rank 2
    assert world.run() is State.FINISHED and not world.odd
    assert world.resized() == [(4, 3, [3], [])]

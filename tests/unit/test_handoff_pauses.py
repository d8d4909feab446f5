"""A node hands its ranks over, and members do not all come to the pause at once: the controller's machine, without a
process."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_handoff import HandoffWorld


class PausingWorld(HandoffWorld):
    """Members pause one by one, as the test says, once they have been told where."""

    def __init__(self) -> None:
        super().__init__()
        assert self.leave("node1") == ""
        while not any(step >= 0 for step in self.pause_at.values()) or self.inbox:
            assert self.step()
        self.step_of_pause = next(step for step in self.pause_at.values() if step >= 0)

    def say(self, committed: dict[int, int]) -> None:
        """What heartbeats bring."""
        for rank, version in committed.items():
            self.version[rank] = version
        ranks = [
            pb.RankHealth(rank=rank, pid=self.machine.job.ranks[rank].pid, committed=v) for rank, v in committed.items()
        ]
        self.machine.on_heartbeat(pb.Heartbeat(generation=self.machine.job.generation, ranks=ranks), self.now)

    def pauses(self, rank: int) -> None:
        self.version[rank] = self.step_of_pause
        paused = pb.Paused(rank=rank, generation=self.machine.job.generation, version=self.step_of_pause)
        self.machine.on_paused(paused, self.now)
        self.collect()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.machine.on_tick(self.now)
        self.collect()


def test_one_that_writes_a_checkpoint_alone_is_waited_for() -> None:
    """It has not come to the step of the pause yet, and could not be stopped there."""
    world = PausingWorld()
    behind = world.step_of_pause - 1
    world.say({0: behind, 1: behind, 2: behind, 3: behind})
    for rank in (1, 2, 3):
        world.pauses(rank)
    for _ in range(30):
        world.wait(1.0)
    assert world.machine.job.state is State.RUNNING and not world.of(ev.RecoveryStarted)
    world.pauses(0)
    assert world.machine.job.state is not State.RUNNING
    world.go_on(8)
    assert world.homes()[2:] == ["spare", "spare"] and world.shut_down() == ["node1"]
    assert world.run() is State.FINISHED


def test_one_that_has_begun_the_step_is_waited_for_no_longer_than_that() -> None:
    """It had begun it before it heard of the pause: it waits in it for the others."""
    world = PausingWorld()
    at = world.step_of_pause
    world.say({0: at, 1: at, 2: at, 3: at})
    for rank in (1, 2, 3):
        world.pauses(rank)
    world.wait(1.0)
    assert world.machine.job.state is State.RUNNING
    world.wait(3.0)
    assert world.machine.job.state is not State.RUNNING
    world.go_on(8)
    assert world.homes()[2:] == ["spare", "spare"] and world.run() is State.FINISHED


def test_a_newcomer_dies_when_some_have_paused() -> None:
    """They are not left there: the others may have heard in time that nobody pauses, and wait for them in that step."""
    world = PausingWorld()
    for rank in (0, 1):
        world.pauses(rank)
    world.kill_newcomer(3)
    world.wait(0.1)
    assert world.machine.job.state is not State.RUNNING
    assert not world.machine.job.newcomers, "the other one does not come alone"
    world.go_on(4)
    assert world.homes()[2:] == ["node1", "node1"] and not world.shut_down()
    assert all(step < 0 for step in world.pause_at.values())
    assert world.run() is State.FINISHED


def test_its_time_is_over_when_some_have_paused() -> None:
    world = PausingWorld()
    behind = world.step_of_pause - 1
    world.say({2: behind, 3: behind})
    for rank in (0, 1):
        world.pauses(rank)
    world.wait(61.0)
    assert "its time is over" in world.notices("node_leaves")[-1]
    assert world.machine.job.state is not State.RUNNING
    world.go_on(4)
    assert not world.machine.job.nodes["node1"].leaving and world.run() is State.FINISHED

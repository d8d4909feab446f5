"""A node hands its ranks over, and members do not all come to the pause at once: the controller's machine, without a
process."""

from __future__ import annotations

from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_handoff import HandoffWorld


class PausingWorld(HandoffWorld):
    """Members pause one by one, as the test says, once they have been told where."""

    def __init__(self, *, one_at: int = -1, **config: Any) -> None:
        super().__init__(**config)
        if one_at >= 0:
            assert self.machine.resize(1, one_at, self.now) == ""
        assert self.leave("node1") == ""
        while not any(step >= 0 for step in self.pause_at.values()) or self.inbox:
            assert self.step()
        self.step_of_pause = next(step for step in self.pause_at.values() if step >= 0)

    def say(self, committed: dict[int, int]) -> None:
        """What heartbeats bring."""
        for rank, version in committed.items():
            self.version[rank] = version
        ranks = [
            pb.RankHealth(rank=rank, pid=self.machine.job.ranks[rank].process.pid, committed=v)
            for rank, v in committed.items()
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


def test_a_joining_process_dies_when_some_have_paused() -> None:
    """They are not left there: the others may have heard in time that no rank pauses, and wait for them in that
    step."""
    world = PausingWorld()
    for rank in (0, 1):
        world.pauses(rank)
    world.kill_joining_process(3)
    world.wait(0.1)
    assert world.machine.job.state is not State.RUNNING
    assert not world.machine.job.membership.joining, "the other one does not come alone"
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


class ComingWorld(PausingWorld):
    """All have paused, and the new processes are members, but have not got their state yet."""

    def __init__(self, until: State = State.REGROUPING, **config: Any) -> None:
        super().__init__(**config)
        for rank in range(4):
            self.pauses(rank)
        while self.machine.job.state is not until:
            assert self.step()
        assert self.homes()[2:] == ["spare", "spare"]
        assert not self.left_behind(), "the old ones are there until all have taken a step"

    def fails(self, rank: int, node: str, pid: int | None = None) -> None:
        if pid is None:
            pid = self.machine.job.ranks[rank].process.pid
            self.inbox = [(r, c) for r, c in self.inbox if r != rank]
        failure = pb.Failure(rank=rank, pid=pid, kind="killed", evidence="test", step=self.version[rank])
        self.machine.on_failure(failure, self.now, node)
        self.collect()


@pytest.mark.parametrize("until", [State.REGROUPING, State.RESTORING])
def test_one_that_stays_dies_and_the_old_ones_go_on(until: State) -> None:
    """They alone may have what is theirs: the one that died kept their copies. Then the hand-off begins again."""
    world = ComingWorld(until)
    world.fails(0, "node0")
    assert world.homes() == ["node0", "node0", "node1", "node1"], "they have their ranks again"
    assert world.left_behind() == {2, 3} and world.machine.job.nodes["spare"].state is NodeState.SPARE
    world.go_on(12)
    assert world.homes()[2:] == ["spare", "spare"] and world.shut_down() == ["node1"]
    assert world.run() is State.FINISHED


def test_one_that_stays_dies_when_the_new_ones_have_all() -> None:
    world = ComingWorld(State.VERIFYING)
    world.fails(0, "node0")
    assert world.homes()[2:] == ["spare", "spare"]
    world.go_on(6)
    assert world.shut_down() == ["node1"] and world.run() is State.FINISHED


def test_a_new_one_dies_before_it_has_its_state() -> None:
    world = ComingWorld()
    world.fails(3, "spare")
    assert world.homes()[2:] == ["node1", "node1"]
    world.go_on(12)
    assert world.homes()[2:] == ["spare", "spare"] and world.run() is State.FINISHED


def test_their_node_is_lost_before_they_have_their_state() -> None:
    world = ComingWorld()
    world.inbox = [(r, c) for r, c in world.inbox if r < 2]
    world.machine.on_node_lost("spare", "silent", 0.5, world.now)
    world.collect()
    assert world.homes()[2:] == ["node1", "node1"] and world.machine.job.homeless_since is None
    world.go_on(6)
    assert not world.shut_down() and world.homes()[2:] == ["node1", "node1"]
    assert world.run() is State.FINISHED


def test_where_no_room_is_left_an_elastic_job_shrinks_then() -> None:
    world = ComingWorld(elastic={"min": 2, "max": 4})
    world.fails(3, "spare")
    world.machine.job.nodes["spare"].leaving = True  # no other rank can take them
    world.go_on(8)
    assert world.resized() == [(4, 2, [2, 3], [])] and world.shut_down() == ["node1"]
    said = [text for text in world.notices("node_leaves") if "is to leave" in text]
    assert len(said) == 2, "once each time"
    assert world.run() is State.FINISHED


def test_old_ones_that_have_died_meanwhile_do_not_come_back() -> None:
    """Their node has ended sooner than it was to; the others have copies of what they had."""
    world = ComingWorld()
    old = world.machine._coming.relieved._old
    world.fails(2, "node1", old[2].process.pid)
    assert world.machine.job.state is State.REGROUPING and sorted(old) == [3]
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert not old and world.machine.job.state is State.REGROUPING, "nothing is missing"
    world.go_on(6)
    assert world.homes()[2:] == ["spare", "spare"] and world.run() is State.FINISHED


def test_a_hand_off_that_always_fails_ends() -> None:
    world = ComingWorld()
    for attempt in range(3):
        world.fails(3, "spare")
        assert world.homes()[2:] == ["node1", "node1"], attempt
        for _ in range(3000):
            if world.machine.job.state is State.REGROUPING and world.homes()[3] == "spare":
                break
            if not world.machine.job.nodes["node1"].leaving:
                break
            assert world.step()
    assert "could not be handed over" in world.notices("node_leaves")[-1]
    assert world.run() is State.FINISHED


class CallsWorld(HandoffWorld):
    """Steps are a framework's own calls: no one says how many there are."""

    def _build_up(self, rank: int, command: pb.Command) -> None:
        self.steps, known = -1, self.steps
        super()._build_up(rank, command)
        self.steps = known


def test_steps_may_be_a_frameworks_own_calls() -> None:
    world = CallsWorld()
    for record in world.machine.job.in_order:
        record.steps = -1
    assert world.leave("node1") == ""
    world.go_on(8)
    assert world.homes()[2:] == ["spare", "spare"] and world.shut_down() == ["node1"]
    assert world.run() is State.FINISHED


def test_a_hand_off_that_has_failed_begins_once_more_and_no_command_is_forgotten() -> None:
    """Now there is no room, and the ranks of an elastic job leave; then what was commanded before for later is done."""
    world = ComingWorld(one_at=40, elastic={"min": 1, "max": 4})
    world.inbox = [(r, c) for r, c in world.inbox if r < 2]
    world.machine.on_node_lost("spare", "silent", 0.5, world.now)
    world.collect()
    assert world.homes()[2:] == ["node1", "node1"]
    world.go_on(10)
    begun = [text for text in world.notices("node_leaves") if "is to leave" in text]
    assert len(begun) == 2 and "goes on with 2 replicas" in begun[-1], begun
    assert world.shut_down() == ["node1"] and world.resized()[-1][:2] == (4, 2)
    world.go_on(30)
    assert world.resized()[-1][:2] == (2, 1) and world.run() is State.FINISHED

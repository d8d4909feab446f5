"""A node is to leave: what is decided, and how the controller's machine goes about it."""

from __future__ import annotations

from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.controller.service.status import job_status
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.plan.elastic.drain import HandOffWay, Parting, hand_off
from flashrecovery.plan.elastic.resize import ReplicaRange
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.plan.membership.placement import Room
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_growing import GrowingWorld

OWN = Room("b", "b", 0)
SPARE = Room("s", "s", 2, spare=True)


def parting(*rooms: Room, **more: Any) -> Parting:
    facts = {"node": "b", "domain": "b", "ranks": (2, 3), "members": range(4), "rooms": (OWN, *rooms), **more}
    return Parting(**facts)


@pytest.mark.parametrize(
    ("facts", "way", "said"),
    [
        (parting(SPARE), HandOffWay.MOVE, "ranks 2 and 3 of node b move to s"),
        (parting(Room("a", "a", 1), Room("c", "c", 1)), HandOffWay.MOVE, "move to a, c"),
        (parting(Room("s", "s", 2, spare=True, suspect=True)), HandOffWay.NOTHING, "no other node has room"),
        (parting(Room("a", "a", 1), sizes=ReplicaRange(2, 4)), HandOffWay.SHRINK, "goes on with 2 replicas"),
        (parting(sizes=ReplicaRange(3, 4)), HandOffWay.NOTHING, "the job is not elastic, or too small"),
        (parting(sizes=ReplicaRange(3, 4), saves=True), HandOffWay.SAVE, "a checkpoint is taken before node b ends"),
        (parting(SPARE, cannot_move="why not", saves=True), HandOffWay.SAVE, "why not; a checkpoint"),
        (parting(SPARE, ranks=()), HandOffWay.LET_GO, "holds no rank"),
        (parting(Room("b", "b", 5)), HandOffWay.NOTHING, "no other node has room"),
    ],
)
def test_what_is_done(facts: Parting, way: HandOffWay, said: str) -> None:
    found = hand_off(facts)
    assert found.way is way and said in found.reason
    assert set(found.places) == (set(facts.ranks) if way is HandOffWay.MOVE else set())
    assert "b" not in found.places.values()


class HandoffWorld(GrowingWorld):
    """Two nodes of two ranks, and a spare one. What a rank alone has is held by the one two places on, too."""

    def __init__(self, *, spare: bool = True, **config: Any) -> None:
        super().__init__(2, nnodes=2, controller="h:1", steps=60, **config)
        self.copied = True
        self.launch()
        if spare:
            self.join("spare", spare=True)
        self.go_on()

    def answer(self, rank: int, command: pb.Command) -> None:
        if command.HasField("stop"):
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
            reply.live_version = self.version[rank]
            if self.copied:
                other = f"capsule@{(rank + 2) % 4}"
                reply.held.add(kind="copy", version=self.version[rank], shards=[other], nbytes=[5])
            self.machine.on_reply(reply, self.now)
        else:
            super().answer(rank, command)

    def train(self) -> bool:
        """All pause where they are asked to, one after the other."""
        job = self.machine.job
        pausing = [r for r in job.ranks if 0 <= self.pause_at.get(r, -1) <= self.version[r]]
        if job.state is State.RUNNING and len(pausing) == len(job.ranks):
            for rank in pausing:
                paused = pb.Paused(rank=rank, generation=job.generation, version=self.version[rank])
                self.machine.on_paused(paused, self.now)
            return True
        return super(GrowingWorld, self).train()

    def leave(self, node: str, within_s: float = 60.0) -> str:
        error, _ = self.machine.drain.ask(node, within_s, self.now)
        self.machine.on_tick(self.now)
        self.collect()
        return error

    def homes(self) -> list[str]:
        return [record.home for record in self.machine.job.in_order]

    def shut_down(self) -> list[str | None]:
        return [node for node, command in self.nodes_told if command.HasField("shutdown")]


def test_its_ranks_move_and_it_leaves() -> None:
    world = HandoffWorld()
    at = world.version[0]
    assert world.leave("node1") == "" and world.joining() == {2: "spare", 3: "spare"}
    world.go_on(8)
    assert world.homes() == ["node0", "node0", "spare", "spare"] and world.shut_down() == ["node1"]
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished)
    assert finished.cause == "handoff" and finished.victims == [] and finished.resume_step > at + 1
    assert world.left_behind() == {2, 3} and not world.of(ev.JobResized)
    assert [entry.node for entry in world.tables[-1].entries] == ["spare", "spare"] or world.tables
    assert world.machine.job.nodes["node1"].state is NodeState.LOST and not world.of(ev.NodeLost)
    assert world.run() is State.FINISHED


def test_status_says_what_is_under_way() -> None:
    world = HandoffWorld()
    liveness = Liveness(world.machine.job.config.timeouts, "")

    def told() -> list[str]:
        return list(job_status(world.machine, liveness, (0, 0), world.now, world.now).changes)

    for node in world.machine.job.nodes:
        liveness.heard(node, world.now)
    assert told() == []
    assert world.leave("node1") == "" and told() == ["join: starting", "drain of node1: moving"]
    world.go_on(8)
    assert told() == []


def test_what_nobody_else_has_stays_where_it_is() -> None:
    """Three tries; the job trains on, nothing is lost."""
    world = HandoffWorld()
    world.copied = False
    assert world.leave("node1") == ""
    world.go_on(20)
    assert world.homes()[2:] == ["node1", "node1"] and not world.shut_down()
    assert any("no other rank could give it its state" in text for text in world.notices("joining_process_given_up"))
    assert "could not be handed over" in world.notices("node_leaves")[-1]
    assert world.run() is State.FINISHED
    steps = [e.resume_step for e in world.of(ev.RecoveryFinished)]  # type: ignore[attr-defined]
    assert len(steps) == 3 and steps == sorted(steps)


def test_it_is_lost_before() -> None:
    world = HandoffWorld()
    world.silent = {3}
    assert world.leave("node1") == ""
    world.go_on(3)
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert not world.machine.job.membership.joining
    world.silent = set()
    world.copied = True
    world.go_on()
    assert world.homes()[2:] == ["spare", "spare"] and world.run() is State.FINISHED


def test_its_time_is_over() -> None:
    world = HandoffWorld()
    world.silent = {2, 3}
    assert world.leave("node1", 5.0) == ""
    world.go_on()
    world.now += 6.0
    world.go_on()
    assert not world.machine.job.membership.joining and "its time is over" in world.notices("node_leaves")[-1]
    assert not world.machine.job.nodes["node1"].leaving and world.run() is State.FINISHED


def test_a_spare_node_leaves_at_once() -> None:
    world = HandoffWorld()
    assert world.leave("spare") == "" and world.shut_down() == ["spare"]
    assert world.run() is State.FINISHED


def test_no_room() -> None:
    world = HandoffWorld(spare=False)
    assert "no other node has room for ranks 2 and 3" in world.leave("node1")
    assert "does not belong to the job; these do: node0, node1" in world.leave("node7")
    assert not world.machine.job.nodes["node1"].leaving


def test_no_room_and_elastic() -> None:
    world = HandoffWorld(spare=False, elastic={"min": 2, "max": 4})
    assert world.leave("node1") == ""
    world.go_on(6)
    assert world.resized() == [(4, 2, [2, 3], [])] and world.shut_down() == ["node1"]
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("spare", [False, True])
def test_a_command_for_a_later_step_does_not_hold_it_up(spare: bool) -> None:
    """A node that is to leave has its time; what a user has commanded before for a later step is done at that."""
    world = HandoffWorld(spare=spare, elastic={"min": 1, "max": 4})
    at = max(world.version) + 12
    assert world.machine.resize(1, at, world.now) == ""
    assert world.leave("node1") == ""
    world.go_on(5)
    assert world.shut_down() == ["node1"] and max(world.version) < at
    assert world.resized() == ([] if spare else [(4, 2, [2, 3], [])])
    world.go_on(12)
    (*_, event) = world.of(ev.JobResized)
    assert isinstance(event, ev.JobResized) and (event.replicas, event.step) == (1, at)
    assert len(world.of(ev.JobResized)) == (1 if spare else 2) and world.run() is State.FINISHED


def test_a_command_while_a_node_leaves_is_done_afterwards() -> None:
    world = HandoffWorld(spare=False, elastic={"min": 1, "max": 4})
    world.machine.drain.ask("node1", 60.0, world.now)
    world.machine.on_tick(world.now)
    assert world.machine.resize(1, -1, world.now) == ""
    world.collect()
    world.go_on(8)
    assert [(e[0], e[1]) for e in world.resized()] == [(4, 2), (2, 1)] and world.shut_down() == ["node1"]
    assert world.run() is State.FINISHED


def test_a_command_that_the_leaving_has_fulfilled_is_forgotten() -> None:
    world = HandoffWorld(spare=False, elastic={"min": 1, "max": 4})
    at = max(world.version) + 12
    assert world.machine.resize(2, at, world.now) == "" and world.leave("node1") == ""
    world.go_on(20)
    assert world.resized() == [(4, 2, [2, 3], [])] and world.run() is State.FINISHED


def test_its_time_is_over_and_the_command_still_counts() -> None:
    """Those that were to take over have never been ready."""
    world = HandoffWorld(elastic={"min": 1, "max": 4})
    world.silent = {2, 3}
    at = max(world.version) + 20
    assert world.machine.resize(2, at, world.now) == "" and world.leave("node1", 5.0) == ""
    world.go_on()
    world.now += 6.0
    world.go_on(25)
    assert "its time is over" in world.notices("node_leaves")[-1] and not world.shut_down()
    (event,) = world.of(ev.JobResized)
    assert isinstance(event, ev.JobResized) and (event.replicas, event.step) == (2, at)
    assert world.run() is State.FINISHED


def test_two_nodes_one_after_the_other() -> None:
    world = HandoffWorld()
    world.join("other", spare=True)
    assert world.leave("node1") == "" and world.leave("node0") == ""
    world.go_on(30)
    assert sorted(set(world.homes())) == ["other", "spare"] and world.shut_down() == ["node1", "node0"]
    assert world.run() is State.FINISHED


def test_the_node_that_takes_them_is_lost_at_once() -> None:
    """They come back: there is no other room."""
    world = HandoffWorld()
    assert world.leave("node1") == ""
    while world.homes()[3] != "spare":
        world.step()
    world.machine.on_node_lost("spare", "silent", 0.5, world.now)
    world.collect()
    assert world.homes()[2:] == ["node1", "node1"] and "has the only room" in world.notices("node_leaves")[-1]
    world.go_on()
    assert not world.shut_down() and not world.machine.job.nodes["node1"].leaving
    assert world.run() is State.FINISHED

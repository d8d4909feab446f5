"""Elastic jobs without a process: what the controller's machine does about a loss and a command, which rank gets which
batch, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, combinations, islice, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from flashrecovery import events as ev
from flashrecovery.cli.run_options import settings
from flashrecovery.config import RunConfig, Settings, run_config
from flashrecovery.controller.elastic.join import Joining
from flashrecovery.controller.state.custody import sharding_of
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.controller.state.rank_table import Parts, RankTable, affected
from flashrecovery.errors import ConfigError, RegistrationError, UnsupportedError
from flashrecovery.plan.elastic.resize import ReplicaRange, leaving
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.data import global_batches as elastic
from flashrecovery.worker.data.global_batches import BatchSettings, ElasticBatches
from flashrecovery.worker.recovery import Recovery
from flashrecovery.worker.reshard import elastic_checks
from tests.unit.test_machine import World
from tests.unit.test_machine_failures import running


def elastic_world(size: int = 4, least: int = 2, replace: str = "never", **config: object) -> World:
    return running(size, elastic={"min": least, "max": size, "replace": replace}, **config)


def resized(world: World) -> ev.JobResized:
    """The one change that there was."""
    (event,) = world.of(ev.JobResized)
    assert isinstance(event, ev.JobResized)
    return event


def pause(world: World, rank: int, generation: int | None = None) -> None:
    generation = world.machine.job.generation if generation is None else generation
    world.machine.on_paused(pb.Paused(rank=rank, generation=generation, version=world.version[rank]), world.now)
    world.collect()


def told(world: World, body: str) -> dict[int, pb.Command]:
    return {rank: command for rank, command in world.inbox if command.WhichOneof("body") == body}


# -- a loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_is_not_replaced_leaves(victim: int) -> None:
    world = elastic_world()
    world.kill(victim)
    assert not told(world, "replace") and world.run() is State.FINISHED
    others = [rank for rank in range(4) if rank != victim]
    event = resized(world)
    assert (event.before, event.replicas, event.left, event.ranks) == (4, 3, [victim], others)
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and finished.victims == finished.left == [victim]
    assert [entry.rank for entry in world.tables[-1].entries] == others


def test_the_others_are_told_who_is_left() -> None:
    world = elastic_world()
    world.kill(1)
    while not told(world, "regroup"):
        assert world.step()
    assert {tuple(c.regroup.members) for c in told(world, "regroup").values()} == {(0, 2, 3)}
    assert told(world, "regroup").keys() == {0, 2, 3}


def test_in_a_job_of_fixed_size_nobody_is_told_of_members() -> None:
    world = running(4)
    world.kill(1)
    while not told(world, "regroup"):
        assert world.step()
    assert not any(c.regroup.members for c in told(world, "regroup").values())


def test_with_room_the_rank_is_replaced() -> None:
    world = elastic_world(replace="auto")
    world.kill(1)
    assert 1 in told(world, "replace") and world.run() is State.FINISHED
    assert not world.of(ev.JobResized)


@pytest.mark.parametrize("seed", range(30))
def test_a_second_death_at_any_moment(seed: int) -> None:
    world = elastic_world(5, least=1)
    world.random = random.Random(seed)
    first, second = world.random.sample(range(5), 2)
    world.kill(first)
    for _ in range(world.random.randrange(14)):
        world.step()
    world.kill(second)
    assert world.run() is State.FINISHED
    left = [rank for event in world.of(ev.JobResized) for rank in event.left]  # type: ignore[attr-defined]
    assert sorted(left) == sorted([first, second])
    assert set(world.machine.job.ranks) == set(range(5)) - {first, second}


class Torn(World):
    """No one has a whole state when a rank dies, and the newest of three checkpoints are damaged, that many of them."""

    damaged = 0
    torn = False

    def answer(self, rank: int, command: pb.Command) -> None:
        path = command.restore.checkpoint
        if self.torn and command.HasField("stop"):
            self.version[rank] = -1
        if path and int(path) > 30 - 10 * self.damaged:
            fields = {"serial": command.serial, "generation": command.generation, "rank": rank}
            self.machine.on_reply(pb.Reply(error_type="DamagedCheckpointError", error="cut short", **fields), self.now)
        else:
            super().answer(rank, command)


@pytest.mark.parametrize("victims", [(0,), (3,), (1, 2)])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_part_that_is_lost_in_the_first_step_begins_again(taken: int, victims: tuple[int, ...]) -> None:
    """A rank has died before anybody had copies of its part: no step that counts is lost, so all are started again,
    and a rank that has left is one of them. After that a step would be."""
    world = Torn(4, steps=6, elastic={"min": 1, "max": 4, "replace": "never"})
    world.launch()
    while world.machine.job.state is not State.RUNNING or world.version[0] < taken:
        world.step()
    world.torn = True
    for victim in victims:
        world.kill(victim)
    if taken == 2:
        assert world.run() is State.FAILED and "no version" in world.machine.job.failure_reason
        return
    while world.machine.job.state is not State.STARTING:
        assert world.step(), world.machine.job.failure_reason
    world.torn = False
    while world.version[0] < 3:
        assert world.step()
    assert sorted(world.machine.job.ranks) == [0, 1, 2, 3] and world.machine.job.restarts == 1
    assert not world.of(ev.JobResized)
    world.kill(2)
    assert world.run() is State.FINISHED
    assert (resized(world).before, resized(world).replicas, resized(world).left) == (4, 3, [2])


@pytest.mark.parametrize("odd", ["taken", "lost", "drained", ""])
def test_who_is_taken_back_for_another_start_has_a_place_of_its_own(odd: str) -> None:
    """Meanwhile its place may have been given to another rank, its node be lost, or about to leave."""
    world = elastic_world(least=1)
    job, resizing = world.machine.job, world.machine._resizing
    gone = resizing._remove_member(3, grace_s=0.0)
    gone.irreplaceable = True
    if odd == "taken":
        job.ranks[1].local_rank = gone.local_rank
    elif odd == "lost":
        job.nodes[gone.home].state = NodeState.LOST
    elif odd == "drained":
        job.nodes[gone.home].leaving = True
    home = "" if odd else gone.home
    resizing.take_back_all()
    assert job.ranks[3].home == home and not job.ranks[3].irreplaceable
    assert (
        job.members == job.membership.sharded_among == (0, 1, 2, 3)
        and not job.membership.removed
        and job.membership.told_size == 4
    )


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_step_of_a_change_is_that_of_the_checkpoint_that_was_read(damaged: int) -> None:
    """The first event is told before it is read; another one has the step that it is in the end."""
    world = Torn(4, steps=60, elastic={"min": 2, "max": 4, "replace": "never"})
    world.launch()
    while world.version[0] < 32:
        world.step()
    for version in (10, 20, 30):
        world.machine.on_checkpoint(version, str(version))
    world.damaged, world.torn = damaged, True
    world.kill(1)
    while world.machine.job.recovery is not None and world.machine.job.state is not State.FAILED:
        if not world.step():
            world.now += 1.0
            world.machine.on_tick(world.now)
            world.collect()
    world.torn = False
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    first, *rest = world.of(ev.JobResized)
    assert isinstance(first, ev.JobResized) and (first.step, first.before, first.left) == (30, 4, [1])
    told = [(e.step, e.before, e.replicas, e.left, e.ranks, e.only_step) for e in rest]  # type: ignore[attr-defined]
    assert told == [(30 - 10 * damaged, 3, 3, [], [0, 2, 3], True)] * (damaged > 0)
    assert not first.only_step
    (finished,) = world.of(ev.RecoveryFinished)
    assert finished.resume_step == 30 - 10 * damaged  # type: ignore[attr-defined]


def test_below_the_least_it_waits_for_a_node_and_then_ends() -> None:
    world = elastic_world(3, least=3, timeouts={"node_wait_s": 5.0})
    world.kill(1)
    while world.step():
        pass
    assert world.machine.job.state is State.REPLACING and not world.of(ev.JobResized)
    world.now += 6.0
    world.machine.on_tick(world.now)
    assert world.machine.job.state is State.FAILED
    assert "fewer than elastic.min = 3" in world.machine.job.failure_reason
    assert "elastic.replace: never" in world.machine.job.failure_reason


def test_a_node_without_a_spare_one() -> None:
    world = World(2, steps=30, nnodes=2, controller="h:1", elastic={"min": 2, "max": 4})
    world.launch()
    while world.version[0] < 2:
        world.step()
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert world.run() is State.FINISHED
    assert resized(world).ranks == [0, 1] and resized(world).left == [2, 3]
    assert not [e for e in world.of(ev.Notice) if e.kind == "waiting_for_node"]  # type: ignore[attr-defined]


def test_a_node_with_a_spare_one() -> None:
    world = World(2, steps=30, nnodes=2, spare_nodes=1, controller="h:1", elastic={"min": 2, "max": 4})
    world.launch()
    while world.version[0] < 2:
        world.step()
    world.join("spare", spare=True)
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert world.run() is State.FINISHED and not world.of(ev.JobResized)


def test_a_rank_that_cannot_be_filled_in_time() -> None:
    world = elastic_world(replace="auto", timeouts={"replacement_s": 5.0, "fence_s": 1.0})
    world.kill(2)
    world.inbox = [(rank, command) for rank, command in world.inbox if not command.HasField("replace")]
    while world.step():
        pass
    world.now += 7.0
    world.machine.on_tick(world.now)
    world.collect()
    assert world.run() is State.FINISHED
    assert resized(world).left == [2]


def test_what_a_rank_that_has_left_still_says() -> None:
    world = elastic_world()
    pid = world.machine.job.ranks[1].process.pid
    world.kill(1)
    machine, now = world.machine, world.now
    machine.on_started(pb.WorkerStarted(rank=1, pid=7, generation=1), "node0", "h")
    machine.on_joined(pb.Joined(rank=1, generation=1), now)
    machine.on_failure(pb.Failure(rank=1, pid=pid, kind="killed"), now)
    machine.on_done(pb.Done(rank=1, generation=1), now)
    machine.on_exited(pb.Exited(rank=1, pid=pid), now)
    machine.on_paused(pb.Paused(rank=1, generation=1), now)
    assert world.run() is State.FINISHED


# -- a command ----------------------------------------------------------------------------------------


def test_the_last_ranks_leave() -> None:
    world = elastic_world(replace="auto")
    step = world.version[0] + 2
    assert world.machine.resize(2, step, world.now) == ""
    world.collect()
    assert {c.pause.step for c in told(world, "pause").values()} == {step} and len(told(world, "pause")) == 4
    while world.version[0] < step:
        world.step()
    pause(world, 2)
    while not told(world, "leave"):
        assert world.step()
    assert told(world, "leave").keys() == {2, 3} and all(c.leave.grace_s > 1 for c in told(world, "leave").values())
    assert world.run() is State.FINISHED
    event = resized(world)
    assert (event.step, event.before, event.replicas, event.ranks, event.left) == (step, 4, 2, [0, 1], [2, 3])
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and finished.cause == "resize" and not finished.victims


def test_a_failure_before_the_step_does_not_forget_the_command() -> None:
    world = elastic_world(replace="auto")
    step = world.version[0] + 5
    assert world.machine.resize(3, step, world.now) == ""
    world.kill(0)
    while not told(world, "resume"):
        assert world.step()
    assert all(c.resume.pause.step == step for c in told(world, "resume").values())
    while world.version[0] < step:
        world.step()
    pause(world, 1)
    assert world.run() is State.FINISHED
    assert resized(world).step == step and resized(world).left == [3]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, ""),
        ({"batches": "of others"}, "its batches are of others"),
        ({"steps": 7}, "needs the same number on every rank"),
        ({"needs": [pb.ShardNeed(name="more", nbytes=1)]}, "registered other state than the process that it replaces"),
    ],
)
def test_a_replacement_in_another_size_is_compared_with_the_process_before(said: dict[str, Any], why: str) -> None:
    """But for what is sharded, of which it has a part as at the launch."""
    world = elastic_world(replace="auto")
    job = world.machine.job
    assert world.machine.resize(3, -1, world.now) == ""
    for rank in range(4):
        pause(world, rank)
    while not world.of(ev.RecoveryFinished):
        assert world.step()
    record = job.ranks[1]
    record.inventory.needs = {**record.inventory.needs, "part#dp=1/3": 20}
    record.inventory.sharded = frozenset({"part#dp=1/3"})
    world.kill(1)
    joined = pb.Joined(rank=1, generation=job.generation, steps=world.steps)
    known = {**record.inventory.common_needs(), "part#dp=1/4": 15}
    joined.needs.extend(pb.ShardNeed(name=n, nbytes=b, sharded=n.startswith("part")) for n, b in known.items())
    joined.MergeFrom(pb.Joined(**said))
    world.machine.on_started(pb.WorkerStarted(rank=1, generation=job.generation, pid=999), record.home, "host")
    world.machine.on_joined(joined, world.now)
    assert job.state is (State.FAILED if why else State.QUIESCING) and why in job.failure_reason
    if not why:
        assert record.inventory.needs == {**record.inventory.common_needs(), "part#dp=1/3": 20}
        assert record.inventory.sharded == {"part#dp=1/3"}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_those_who_alone_have_the_state_do_not_leave(replicas: int) -> None:
    """Those that would stay have died, and have been filled again: they would get their state from those that leave."""
    world = elastic_world(least=1, replace="auto")
    assert world.machine.resize(replicas, -1, world.now) == ""
    pause(world, 3)
    for rank in range(3):
        world.kill(rank)
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    assert len(resized(world).ranks) == replicas and 3 in resized(world).ranks


def test_a_rank_that_dies_while_all_pause_leaves_instead() -> None:
    world = elastic_world()
    assert world.machine.resize(3, -1, world.now) == ""
    pause(world, 1)
    world.kill(0)
    assert world.run() is State.FINISHED
    assert resized(world).left == [0] and resized(world).ranks == [1, 2, 3]


def test_where_state_is_sharded_a_rank_that_does_not_pause_is_not_waited_for_for_ever() -> None:
    """It had begun the step when it heard of the command."""
    world = elastic_world(replace="auto")
    for record in world.machine.job.in_order:
        record.inventory.needs[f"w#shard={record.rank}/4"] = 100
        record.inventory.sharded = frozenset({f"w#shard={record.rank}/4"})
    assert world.machine.resize(3, -1, world.now) == ""
    pause(world, 1)
    assert world.machine.job.state is State.RUNNING
    world.machine.on_tick(world.now + 1.9)
    assert world.machine.job.state is State.RUNNING
    world.machine.on_tick(world.now + 2.1)
    assert world.machine.job.state is State.QUIESCING


def test_where_those_who_are_to_leave_cannot_all_pause_again_and_then_it_is_said() -> None:
    """No rank keeps copies of what each rank has alone."""
    world = elastic_world(replace="auto")
    for record in world.machine.job.in_order:
        record.inventory.needs[f"w#shard={record.rank}/4"] = 100
        record.inventory.sharded = frozenset({f"w#shard={record.rank}/4"})
    assert world.machine.resize(3, -1, world.now) == ""
    for attempt in range(3):
        assert not notices(world, "not_resized"), attempt
        for rank in range(4):
            pause(world, rank)
        assert world.machine.job.state is State.QUIESCING
        while world.machine.job.state is not State.RUNNING:
            assert world.step()
    assert len(notices(world, "not_resized")) == 1
    assert world.run() is State.FINISHED and not world.of(ev.JobResized)


def notices(world: World, kind: str) -> list[ev.Event]:
    return [event for event in world.of(ev.Notice) if isinstance(event, ev.Notice) and event.kind == kind]


def test_a_pause_of_an_older_generation_changes_nothing() -> None:
    world = elastic_world(replace="auto")
    assert world.machine.resize(3, 25, world.now) == ""
    world.kill(0)
    while world.machine.job.recovery is not None:
        world.step()
    pause(world, 1, generation=0)
    assert world.machine.job.state is State.RUNNING


def test_a_pause_that_nobody_remembers_is_ended() -> None:
    """Of a command that was given to the controller before this one: the ranks are not left waiting."""
    world = elastic_world(replace="auto")
    pause(world, 1)
    assert world.machine.job.state is State.QUIESCING
    assert world.run() is State.FINISHED and not world.of(ev.JobResized)


@pytest.mark.parametrize(
    ("replicas", "step", "why"),
    [
        (1, -1, "2 to 4, but for 4, is allowed"),
        (4, -1, "2 to 4, but for 4, is allowed"),
        (3, 1, "has begun already"),
        (3, 2, "has begun already"),
        (3, 30, "takes 30 steps"),
    ],
)
def test_a_command_that_is_refused(replicas: int, step: int, why: str) -> None:
    world = elastic_world()
    assert why in world.machine.resize(replicas, step, world.now)
    assert world.run() is State.FINISHED and not world.of(ev.JobResized)


def test_a_command_to_a_job_that_is_not_elastic_or_not_training() -> None:
    assert "--elastic" in running(4).machine.resize(3, -1, 0.0)
    world = elastic_world()
    world.kill(0)
    assert "when it trains" in world.machine.resize(2, -1, world.now)


def test_a_new_controller_learns_who_has_left() -> None:
    world = World(4, elastic={"min": 2, "max": 4})
    register = pb.Register(node="n", host="h", slots=4, incarnation="i", generation=1, stride=1, members=[0, 2, 3])
    for rank in (0, 2, 3):
        worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True, stepping=True)
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9))
        register.workers.append(worker)
    world.machine.on_register(register, 0.0)
    assert set(world.machine.job.ranks) == {0, 2, 3}
    assert world.machine.job.state is State.RUNNING and world.machine.job.all_in(Place.RUNNING)


@pytest.mark.parametrize("commanded", [False, True])
def test_a_new_controller_says_a_size_that_it_has_found_no_more(commanded: bool) -> None:
    """The one before has said it. What changes under this one it says, from the size that it has found."""
    world, fields = World(4, elastic={"min": 2, "max": 4}), {"node": "n", "host": "h", "slots": 4, "incarnation": "i"}
    register = pb.Register(**fields, generation=1, stride=1, members=[0, 2, 3], regrouped=1)  # type: ignore[arg-type]
    for rank in (0, 2, 3):
        worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True, stepping=True)
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9))
        register.workers.append(worker)
    world.machine.on_register(register, 0.0)
    job = world.machine.job
    resizing = world.machine._resizing
    if commanded:
        resizing._remove_member(3, grace_s=0.0)
    assert resizing.tell(7) is commanded
    world.collect()
    said = [(e.before, e.replicas, e.left) for e in world.of(ev.JobResized)]  # type: ignore[attr-defined]
    assert said == ([(3, 2, [3])] if commanded else []) and len(job.ranks) == (2 if commanded else 3)


def test_a_new_controller_says_a_size_that_it_has_found_if_the_one_before_may_have_said_another() -> None:
    """A recovery had begun, and no one here has heard with how many ranks it was to go on."""
    world, fields = World(4, elastic={"min": 2, "max": 4}), {"node": "n", "host": "h", "slots": 4, "incarnation": "i"}
    register = pb.Register(**fields, generation=2, stride=1, members=[0, 2, 3], regrouped=1)  # type: ignore[arg-type]
    for rank in (0, 2, 3):
        worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True)
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9))
        register.workers.append(worker)
    world.machine.on_register(register, 0.0)
    assert world.machine._resizing.tell(7)


def test_a_new_controller_hears_from_a_rank_that_has_not_heard_that_it_left() -> None:
    def register(node: str, ranks: list[int], members: list[int], generation: int) -> pb.Register:
        fields = {"node": node, "host": node, "slots": 2, "incarnation": node, "stride": 2, "peer_port": 1}
        message = pb.Register(**fields, generation=generation, members=members)  # type: ignore[arg-type]
        for rank in ranks:
            worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True, stepping=True)
            worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9))
            message.workers.append(worker)
        return message

    for first, second in (
        (register("a", [0, 1], [0, 1, 2], 2), register("b", [2, 3], [], 1)),
        (register("b", [2, 3], [], 1), register("a", [0, 1], [0, 1, 2], 2)),
    ):
        world = World(2, nnodes=2, controller="h:1", elastic={"min": 2, "max": 4})
        world.machine.on_register(first, 0.0)
        world.machine.on_register(second, 0.0)
        world.collect()
        assert set(world.machine.job.ranks) == {0, 1, 2}
        assert told(world, "leave").keys() == {3}


@pytest.mark.parametrize("stale_first", [True, False])
def test_a_new_controller_hears_from_a_node_that_was_cut_off_before_ranks_came(stale_first: bool) -> None:
    """That one's word of which ranks belong to the job is old: the ranks that have come since take steps with the
    others."""

    def register(node: str, ranks: list[int], members: list[int], generation: int) -> pb.Register:
        fields = {"node": node, "host": node, "slots": 2, "incarnation": node, "stride": 2, "peer_port": 1}
        message = pb.Register(**fields, generation=generation, members=members)  # type: ignore[arg-type]
        for rank in ranks:
            worker = pb.WorkerState(rank=rank, pid=10 * generation + rank + 1, resumed=True, stepping=generation == 4)
            worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9))
            message.workers.append(worker)
        return message

    stale, there = register("c", [1], [0, 1, 2], 1), [register("a", [0, 1], [0, 1, 2, 3], 4)]
    there.append(register("b", [2, 3], [0, 1, 2, 3], 4))
    world = World(2, nnodes=2, controller="h:1", elastic={"min": 2, "max": 4})
    world.machine.takeover.inherit(0.0)
    for message in [stale, *there] if stale_first else [there[0], stale, there[1]]:
        world.machine.on_register(message, 0.0)
    world.collect()
    assert set(world.machine.job.ranks) == {0, 1, 2, 3} and world.machine.job.state is State.RUNNING
    assert not told(world, "leave") and world.machine.job.membership.sharded_among == (0, 1, 2, 3)


def test_all_members_are_waited_for() -> None:
    coming = Joining(JobState(RunConfig(nproc_per_node=3)))
    assert [coming.on_paused(pb.Paused(rank=rank), 0.0) for rank in (2, 0, 2, 1)] == [False, False, False, True]


class Registered:
    """What :class:`elastic_rules.ElasticRules` looks at."""

    def __init__(self, *own: str, through: bool = True) -> None:
        self.adapters: list[Any] = []
        self.habits = SimpleNamespace(own=list(own))
        self.batches = SimpleNamespace(refuse_unread=self._refuse, check_framework=lambda: None)
        self._through = through

    def _refuse(self, step: int) -> None:
        if not self._through:
            raise RegistrationError(f"step {step}")


def test_each_step_is_looked_at() -> None:
    def check(registered: Registered) -> None:
        elastic_checks.ElasticRules(registered, registered.batches).check_step(4)  # type: ignore[arg-type]

    check(Registered())
    with pytest.raises(RegistrationError, match="step 4"):
        check(Registered(through=False))
    with pytest.raises(UnsupportedError, match="differ between the ranks"):
        check(Registered("thing"))


# -- pure parts ---------------------------------------------------------------------------------------


def test_who_leaves() -> None:
    sizes = ReplicaRange(2, 4)
    assert leaving([0, 1, 2, 3], {1}, sizes) == (1,)
    assert leaving([0, 2, 3], {3}, sizes) == (3,)
    assert leaving([0, 3], {3}, sizes) == (), "too few would be left"
    assert leaving([0, 1, 2, 3], set(), sizes) == ()


@pytest.mark.parametrize("per_node", range(1, 4))
@pytest.mark.parametrize("nodes", range(1, 5))
def test_each_rank_keeps_the_copies_of_one_other(nodes: int, per_node: int) -> None:
    """On another node, for as many as can: any process that has left."""
    world, stride = nodes * per_node, 1 if nodes == 1 else per_node
    if world > 1:
        assert ring_of(range(world), stride, per_node) == [(place + stride) % world for place in range(world)]
    for members in (m for n in range(2, world + 1) for m in combinations(range(world), n)):
        ring, on = ring_of(members, stride, per_node), [rank // per_node for rank in members]
        assert sorted(ring) == list(range(len(members))) and all(to != place for place, to in enumerate(ring))
        together = sum(on[place] == on[to] for place, to in enumerate(ring))
        most = max(map(on.count, on))
        assert together == max(0, 2 * most - len(members)), f"{members}: {ring}"


def test_copies_are_kept_in_another_failure_domain_where_ranks_have_left() -> None:
    """Two switches with two nodes each: one node is lost."""
    shared = (0, 0, 1, 1)
    assert ring_of([0, 1, 2, 3], 2, 1, shared) == [2, 3, 0, 1]
    for left in range(8):
        members = [rank for rank in range(8) if rank != left]
        ring = ring_of(members, 4, 2, shared)
        crossing = sum(shared[members[place] // 2] != shared[members[to] // 2] for place, to in enumerate(ring))
        assert crossing == 6, f"{members}: {ring}"


def test_a_rank_table_with_ranks_missing() -> None:
    def table(ranks: list[int]) -> Parts:
        entries = tuple(pb.RankEntry(rank=rank, node=f"n{rank // 2}", peer=f"p{rank}") for rank in ranks)
        return Parts(RankTable(entries, 2, (), 6))

    whole, part = table([0, 1, 2, 3, 4, 5]), table([0, 1, 3, 4])
    assert affected(whole, part) == {"n0", "n1", "n2"}
    for node in ("n0", "n1", "n2"):
        assert part.part_for(node).world_size == 6
        assert not {2, 5} & {entry.rank for entry in part.part_for(node).ranks}


def test_the_options() -> None:
    assert settings({"elastic": "2:4"}) == {"elastic": {"min": 2, "max": 4}}
    with pytest.raises(ConfigError, match="MIN:MAX"):
        settings({"elastic": "4"})


@pytest.mark.parametrize(
    ("elastic", "more", "why"),
    [
        ({"min": 3, "max": 2}, {}, "elastic.min = 3"),
        ({"min": 5, "max": 8}, {}, "elastic = 5:8: the job is launched with 4 ranks"),
        ({"min": 3, "max": 3}, {}, "elastic = 3:3: the job is launched with 4 ranks"),
        ({"min": 0, "max": 4}, {}, "elastic.min = 0"),
        ({"min": 2, "max": 4, "replace": "sometimes"}, {}, "elastic.replace = 'sometimes'"),
        ({"min": 2, "max": 4, "most": 4}, {}, "elastic.most"),
        ({"min": 2, "max": 4}, {"redundancy": "neighbor"}, "redundancy: 'neighbor'"),
        ({"min": 2, "max": 4}, {"redundancy": "parity"}, "redundancy: 'parity'"),
        ({"min": 2, "max": 4}, {"snapshots": {"keep": "always"}}, "snapshots.keep: 'always'"),
    ],
)
def test_a_configuration_that_is_refused(elastic: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config({"nproc_per_node": 4, "elastic": elastic, **more}, "here")
    assert why in str(refused.value)


# -- batches ------------------------------------------------------------------------------------------


def batches(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, **more: Any) -> ElasticBatches:
    monkeypatch.setattr(elastic, "_place", lambda _: (rank, size))
    data = TensorDataset(torch.arange(30, dtype=torch.float64))
    ours = {name: more.pop(name) for name in ("models", "framework", "watched") if name in more}
    return ElasticBatches(data, BatchSettings(**{"global_batch": 12, "micro_batch": 2, "seed": 4, **more}), **ours)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_the_mean_over_the_global_batch_in_any_size(size: int, averaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[float] = Counter()
    total, drawn = Fraction(0), {}
    for rank in range(size):
        mine = batches(monkeypatch, rank, size, averaged=averaged)
        found = list(mine.of(7))
        assert [batch.last for batch in found] == [False] * (len(found) - 1) + [True]
        for batch in mine.of(7):
            drawn[batch.number] = torch.rand(1).item()
            seen.update(batch.data[0].tolist())
            total += Fraction(batch.data[0].mean().item()) * Fraction(batch.weight).limit_denominator(1000)
    whole = list(batches(monkeypatch, 0, 1).of(7))
    samples = [x for batch in whole for x in batch.data[0].tolist()]
    assert seen == Counter(samples) and sorted(drawn) == list(range(6))
    assert total / (size if averaged else 1) == Fraction(sum(samples)) / 12
    expected = {}
    for batch in batches(monkeypatch, 0, 1).of(7):
        expected[batch.number] = torch.rand(1).item()
    assert drawn == expected and len({*drawn.values()}) == 6, "a stream for each micro-batch, in any size"


def test_gradients_are_reduced_in_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(torch.nn.Module):
        require_backward_grad_sync = True

    monkeypatch.setattr(elastic, "DistributedDataParallel", Wrapped)
    model = Wrapped()
    flags = [model.require_backward_grad_sync for _ in batches(monkeypatch, 0, 2, models=lambda: [model]).of(0)]
    assert flags == [False, False, True] and model.require_backward_grad_sync


def test_a_first_step_continues_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(first: int, step: int) -> list[float]:
        found = batches(monkeypatch, 1, 3, first_step=first).of(step)
        return [x for batch in found for x in batch.data[0].tolist()]

    assert samples(5, 2) == samples(0, 7) != samples(0, 2)


def test_a_step_that_has_not_gone_through_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = batches(monkeypatch, 0, 2)
    found.begin(3)
    with pytest.raises(RegistrationError, match=r"batches\.of"):
        found.refuse_unread(3)
    next(found.of(3))
    with pytest.raises(RegistrationError):
        found.refuse_unread(3)
    for _ in found.of(3):
        pass
    found.refuse_unread(3)
    found.begin(4)
    with pytest.raises(RegistrationError):
        found.refuse_unread(4)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"micro_batch": 5}, "micro_batch = 5"),
        ({"micro_batch": 0}, "1 or more"),
        ({"micro_batch": 6}, "2 micro-batches"),
    ],
)
def test_batches_that_are_refused(more: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=why):
        batches(monkeypatch, 0, 3, **more)


def test_a_loader_of_each_ranks_own_is_refused() -> None:
    elastic_checks.refuse_streams(Settings())
    with pytest.raises(UnsupportedError, match="elastic_batches"):
        elastic_checks.refuse_streams(Settings.model_validate({"elastic": {"min": 1, "max": 2}}))


class Communicating(torch.nn.Module):
    """As FSDP2's models."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        self.told.append(requires_gradient_sync)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_where_each_micro_batch_communicates_all_compute_equally_many(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some compute one of their own again, which adds nothing."""
    model, counts, samples = Communicating(), set(), Counter[float]()
    for rank in range(size):
        model.told.clear()
        found = list(batches(monkeypatch, rank, size, models=lambda: [model]).of(3))
        plain = list(batches(monkeypatch, rank, size).of(3))
        counts.add(len(found))
        assert model.told == [False] * (len(found) - 1) + [True]
        own = [batch for batch in found if not batch.repeated]
        assert [(b.number, b.weight, b.data[0].tolist()) for b in own] == [
            (b.number, b.weight, b.data[0].tolist()) for b in plain
        ]
        again = found[: len(found) - len(own)]
        assert all(b.repeated and b.weight == 0.0 and b.number == own[0].number for b in again)
        assert found[-1].last and not found[-1].repeated
        samples.update(x for b in own for x in b.data[0].tolist())
    assert counts == {-(-6 // size)}
    assert samples == Counter(x for b in batches(monkeypatch, 0, 1).of(3) for x in b.data[0].tolist())


class Chances(torch.nn.Module):
    """Draws, as dropout does."""

    def forward(self, batch: elastic.MicroBatch) -> tuple[int, float]:
        return batch.number, torch.rand(1).item()


@pytest.mark.parametrize(
    ("taken", "late"),
    [
        ("in turn", False),
        ("in turn, twice each", False),
        ("in turn, the second one skipped", False),
        ("unseen, in a list", False),
        ("in a list", True),
        ("one ahead", True),
        ("two at once", True),
    ],
)
def test_micro_batches_are_computed_before_the_next_one_is_taken(
    taken: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams are seeded when a micro-batch is handed out, so what is drawn for it would follow the size."""
    model, rest = Chances(), torch.nn.Identity()
    found = batches(monkeypatch, 0, 2, models=lambda: [model, rest])
    for step in (3, 4):
        found.begin(step)
        turns: Any = found.of(step)
        if "list" in taken:
            turns = list(turns)
        elif taken == "one ahead":
            turns = ahead(turns)
        elif taken == "two at once":
            turns = chain(list(islice(turns, 2)), turns)
        drawn = {}
        for at, batch in enumerate(turns):
            if "skipped" in taken and at == 1:
                continue
            go = model.forward if "unseen" in taken else model
            for _ in range(1 + ("twice" in taken)):
                drawn.update([go(batch)])
        if late:
            with pytest.raises(RegistrationError, match="before it computed the one before"):
                found.refuse_unread(step)
        else:
            found.refuse_unread(step)
        expected = {b.number: torch.rand(1).item() for b in found.of(step)}
        if taken == "in turn":
            assert drawn == expected


OF_COMPILED = [("in turn", False), ("in a list", True), ("the second one skipped", True), ("the last skipped", False)]
LEFT_OUT = "that is left out, before another one is computed, counts"


@pytest.mark.parametrize(("taken", "late"), OF_COMPILED)
def test_what_goes_forward_within_a_graph_is_seen_but_not_counted(
    taken: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Identity()
    found = batches(monkeypatch, 0, 2, models=lambda: [model])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # a compiled hook writes what a traced one does
    compute_and_look(found, taken, late, model)


def compute_and_look(found: elastic.ElasticBatches, taken: str, late: bool, model: Any) -> None:
    for step in range(3):
        found.begin(step)
        for at, batch in enumerate(list(found.of(step)) if "list" in taken else found.of(step)):
            if not ("second" in taken and at == 1) and not ("last" in taken and batch.last):
                model(torch.ones(4))
        if late:
            with pytest.raises(RegistrationError, match=LEFT_OUT):
                found.refuse_unread(step)
        else:
            found.refuse_unread(step)


@pytest.mark.grid  # the compiler is imported
@pytest.mark.parametrize("way", ["in place", "wrapped", "called by a compiled function"])
@pytest.mark.parametrize(("taken", "late"), OF_COMPILED)
def test_a_compiled_model_is_seen_to_go_forward(
    way: str, taken: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not how often: one that is left out, and then another one computed, is as one that is computed late."""
    torch._dynamo.reset()
    model, eager = torch.nn.Dropout(0.5), torch.nn.Identity()
    go: Any = model
    if way == "in place":
        model.compile(backend="eager", fullgraph=True)
    elif way == "wrapped":
        go = torch.compile(model, backend="eager", fullgraph=True)
    else:
        go = torch.compile(lambda data: model(data) * 2, backend="eager", fullgraph=True)
    found = batches(monkeypatch, 0, 2, models=lambda: [model, eager])
    with torch._dynamo.config.patch(error_on_recompile=True):
        compute_and_look(found, taken, late, go)


def ahead(turns: Iterator[elastic.MicroBatch]) -> Iterator[elastic.MicroBatch]:
    """As a script that fetches the next one while it computes."""
    held = next(turns)
    for following in turns:
        yield held
        held = following
    yield held


# -- a framework that accumulates itself --------------------------------------------------------------


def test_sizes_that_do_not_divide_are_left_out() -> None:
    """Of four replicas one is lost, and three are none that the batch allows: another one leaves with it."""
    world = elastic_world()
    for record in world.machine.job.in_order:
        record.sizes = frozenset({1, 2, 4})
    assert "2 is allowed" in world.machine.resize(3, -1, world.now)
    world.kill(1)
    assert world.run() is State.FINISHED
    event = resized(world)
    assert (event.before, event.replicas, event.left, event.ranks) == (4, 2, [1, 3], [0, 2])


def test_without_a_size_that_divides_it_waits() -> None:
    world = elastic_world(3, least=2, timeouts={"node_wait_s": 5.0})
    for record in world.machine.job.in_order:
        record.sizes = frozenset({1, 3})
    assert "no other number is allowed" in world.machine.resize(2, -1, world.now)
    world.kill(1)
    while world.step():
        pass
    world.now += 6.0
    world.machine.on_tick(world.now)
    assert world.machine.job.state is State.FAILED and not world.of(ev.JobResized)


def test_ranks_say_which_sizes_are_possible() -> None:
    world = World(4, elastic={"min": 2, "max": 4})
    register = pb.Register(node="n", host="h", slots=4, incarnation="i", generation=1, stride=1, members=[0, 1, 2, 3])
    for rank in range(4):
        worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True, stepping=True)
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=9, sizes=[4, 2]))
        register.workers.append(worker)
    world.machine.on_register(register, 0.0)
    assert "2 is allowed" in world.machine.resize(3, -1, world.now)


def of_framework(monkeypatch: pytest.MonkeyPatch, size: int, batch: elastic.FrameworkBatch, **more: Any) -> Any:
    none = {"global_batch": None, "micro_batch": None}
    return batches(monkeypatch, size - 1, size, **{**none, "framework": lambda: batch, **more})


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_batch_of_a_framework(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_framework(monkeypatch, size, elastic.FrameworkBatch(12, 2))
    mine = list(found.of(0))
    assert len(mine) == 6 // size and {batch.weight for batch in mine} == {1.0}
    assert found.settings["global_batch"] == 12 and found.settings["micro_batch"] == 2


def test_a_framework_whose_schedule_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as many as there are, and does not ask for one more."""
    found = of_framework(
        monkeypatch, 2, elastic.FrameworkBatch(None, None, counted=True), global_batch=12, micro_batch=2
    )
    turns = found.of(0)
    assert len(turns) == 3
    for left in (2, 1):
        next(turns)
        assert len(turns) == left
        with pytest.raises(RegistrationError):
            found.refuse_unread(0)
    next(turns)
    found.refuse_unread(0)
    with pytest.raises(RegistrationError):
        found.refuse_unread(1)


def test_random_streams_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are seeded for each micro-batch, and for the step outside of them: by step and number, not by replica."""

    def seeds(replica: int, size: int) -> list[int]:
        seen: list[int] = []
        batch = elastic.FrameworkBatch(12, 2, seed=lambda seed, chunk: seen.append(seed))
        found = batches(monkeypatch, replica, size, global_batch=None, micro_batch=None, framework=lambda: batch)
        found.begin(4)
        assert len(list(found.of(4))) == 6 // size
        return seen

    alone = seeds(0, 1)
    assert len({*alone}) == 7
    first, second = seeds(0, 2), seeds(1, 2)
    assert first[0] == second[0] == alone[0] and {*first[1:], *second[1:]} == {*alone[1:]}


def test_sizes_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_framework(monkeypatch, 6, elastic.FrameworkBatch(12, 2)).sizes == [6, 3, 2, 1]
    assert of_framework(monkeypatch, 6, elastic.FrameworkBatch(12, 2, frozenset({2, 4, 6}))).sizes == [6, 2]
    assert batches(monkeypatch, 0, 6).sizes == ()


@pytest.mark.parametrize(
    ("size", "more", "why"),
    [
        (4, {}, "6 micro-batches on 4 replicas"),
        (2, {"global_batch": 24}, "global_batch = 24, and the framework's own is 12"),
        (2, {"micro_batch": 3}, "micro_batch = 3, and the framework's own is 2"),
        (2, {"averaged": False}, "averaged=False"),
    ],
)
def test_a_batch_that_is_not_the_frameworks(
    size: int, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_framework(monkeypatch, size, elastic.FrameworkBatch(12, 2), **more)
    assert why in str(refused.value)


def test_a_framework_whose_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [elastic.FrameworkBatch(12, 2)]
    found = of_framework(monkeypatch, 2, now[0], framework=lambda: now[0])
    found.check_framework()
    now[0] = elastic.FrameworkBatch(24, 2)
    with pytest.raises(ConfigError, match="global_batch = 12"):
        found.check_framework()
    batches(monkeypatch, 0, 2).check_framework()


def test_sizes_are_needed_where_no_framework_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="micro_batch is missing"):
        batches(monkeypatch, 0, 2, micro_batch=None)


def test_two_engines_with_a_batch_of_their_own() -> None:
    recovery = Recovery(None)
    for _ in range(2):
        recovery.take_framework_batch(lambda: elastic.FrameworkBatch(4, 2))
    with pytest.raises(UnsupportedError, match="2 engines"):
        recovery.elastic_batches(TensorDataset(torch.arange(8)))


OLD, NEW = (0, 1, 2, 3), (0, 1, 2)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param([(OLD, ()), (OLD, ()), (OLD, ())], OLD, id="not begun"),
        pytest.param([(OLD, NEW), (OLD, NEW), (OLD, ())], OLD, id="ready, but no one has gone over"),
        pytest.param([(NEW, ()), (OLD, NEW), (OLD, NEW)], NEW, id="one has gone over"),
        pytest.param([(NEW, ()), (NEW, ()), (NEW, ())], NEW, id="all have"),
        pytest.param([(OLD, NEW), ((), NEW), ((), ())], OLD, id="who comes has none"),
        pytest.param([((), ()), ((), ())], (), id="nothing is sharded"),
    ],
)
def test_a_new_controller_asks_how_state_is_sharded(
    said: list[tuple[tuple[int, ...], tuple[int, ...]]], found: tuple[int, ...]
) -> None:
    for order in permutations(said):
        records = [RankRecord(rank) for rank in range(len(order))]
        for record, (layout, ready) in zip(records, order, strict=True):
            record.inventory.layout, record.inventory.ready = layout, ready
        assert sharding_of(records) == found


def test_a_controller_that_is_elected_in_the_middle_of_a_change() -> None:
    """Of five nodes the fourth was lost, and the job was about to go on without it when the first one was lost, with
    the controller: the state is still sharded among five."""
    world = World(1, nnodes=5, controller="h:1", elastic={"min": 1, "max": 5})
    machine, everybody = world.machine, [0, 1, 2, 3, 4]
    keeps = {1: 0, 2: 1, 4: 3}  # whose copies each one has
    shards = {rank: [f"part/{rank}of5", "common", f"capsule@{rank}"] for rank in everybody}
    machine.takeover.inherit(0.0)
    for rank in keeps:
        fields = {"node": f"n{rank}", "host": f"n{rank}", "slots": 1, "incarnation": f"n{rank}", "peer_port": 1}
        register = pb.Register(**fields, stride=1, generation=1, members=[0, 1, 2, 4])  # type: ignore[arg-type]
        worker = register.workers.add(rank=rank, pid=rank + 1, resumed=True, committed=7)
        worker.joined.CopyFrom(pb.Joined(rank=rank, steps=30))
        machine.on_register(register, 0.0)
    machine.on_tick(20.0)
    world.collect()
    stops, reshape = [], None
    while world.inbox and reshape is None:
        rank, command = world.inbox.pop(0)
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        if command.HasField("hold"):
            reply.position.CopyFrom(pb.Position(settled=True, version=7))
        elif command.HasField("stop"):
            stops.append((command.stop.unsure, tuple(command.stop.layout)))
            reply.live_version = 7
            reply.needs.extend(pb.ShardNeed(name=name, nbytes=8, sharded=name[0] == "p") for name in shards[rank])
            for name in shards[keeps[rank]]:
                reply.held.add(kind="copy", version=7, shards=[name], nbytes=[8])
            reply.layout.extend(everybody if command.stop.unsure else ())
        elif command.HasField("restore"):
            reshape = command.restore.reshape
        if rank >= 0:
            machine.on_reply(reply, 20.0)
            world.collect()
    thought = (True, (0, 1, 2, 4))
    assert stops == [thought] * 3 + [(False, (0, 1, 2, 3, 4))] * 3
    assert reshape is not None and (list(reshape.before), list(reshape.after)) == (everybody, [1, 2, 4])
    assert {(c.owner, c.holder) for c in reshape.custody} == {(0, 1), (3, 4)}

"""An elastic job grows: which ranks come, beside what, and what happens to those that do not. The controller's machine,
without a process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.agent.monitoring.reply_batching import singly
from flashrecovery.config import run_config
from flashrecovery.controller.state.outbox import Send
from flashrecovery.controller.state.rank_record import Place, RankRecord
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import Ordered
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_machine import World


class GrowingWorld(World):
    """Workers that pause where they are asked to, and processes that are built up beside them."""

    def __init__(self, size: int, **config: Any) -> None:
        super().__init__(size, **config)
        self.pause_at: dict[int, int] = {}
        self.nodes_told: list[tuple[str | None, pb.Command]] = []
        self.silent: set[int] = set()  # joining processes that never come to their first step
        self.batches = ""
        self.outline = ""

    def collect(self) -> None:
        for action in self.machine.job.outbox.actions:
            if isinstance(action, Send):
                commands = singly(action.command) if action.command.ranks else [action.command]
                self.nodes_told += [(action.node, command) for command in commands]
        super().collect()

    def joining(self) -> dict[int, str | None]:
        """Which nodes were asked to build up which ranks."""
        return {command.rank: node for node, command in self.nodes_told if command.replace.joining}

    def left_behind(self) -> set[int]:
        """Ranks whose processes were ended."""
        return {command.rank for _, command in self.nodes_told if command.HasField("leave")}

    def answer(self, rank: int, command: pb.Command) -> None:
        if command.HasField("pause"):
            if command.generation == self.machine.job.generation:
                self.pause_at[rank] = command.pause.step
        elif command.replace.joining:
            self._build_up(rank, command)
        else:
            if command.HasField("resume"):
                self.pause_at[rank] = command.resume.pause.step if command.resume.HasField("pause") else -1
            if command.HasField("replace") and self.inherited.get(rank):
                self.version[rank] = self.inherited[rank][0]  # its page is inherited again
            if rank in self.machine.job.ranks:
                self.pids[rank] = self.machine.job.ranks[rank].process.pid
            super().answer(rank, command)

    def _build_up(self, rank: int, command: pb.Command) -> None:
        joining = self.machine.job.membership.joining.get(rank)
        node = "" if joining is None else joining.record.home
        self.next_pid += 1
        generation = command.generation
        started = pb.WorkerStarted(rank=rank, generation=generation, pid=self.next_pid, joining=command.replace.joining)
        self.machine.on_started(started, node, "host")
        if rank not in self.machine.job.ranks:  # else another process fills it yet
            self.version[rank] = -1
        if rank not in self.silent:
            needs = [
                pb.ShardNeed(name="param/w", nbytes=100),
                pb.ShardNeed(name="common", nbytes=10),
                pb.ShardNeed(name=f"capsule@{rank}", nbytes=5),
            ]
            joined = pb.Joined(
                rank=rank,
                generation=generation,
                steps=self.steps,
                needs=needs,
                batches=self.batches,
                outline=self.outline,
            )
            self.machine.on_joined(joined, self.now, node)

    def train(self) -> bool:
        job = self.machine.job
        running = [r.rank for r in job.ranks.values() if r.place is Place.RUNNING]
        pausing = [r for r in running if 0 <= self.pause_at.get(r, -1) <= self.version[r]]
        if job.state is State.RUNNING and pausing:
            first = self.random.choice(pausing) if self.random else pausing[0]
            paused = pb.Paused(rank=first, generation=job.generation, version=self.version[first])
            self.machine.on_paused(paused, self.now)
            return True
        return super().train()

    def kill_joining_process(self, rank: int) -> None:
        record = self.machine.job.membership.joining[rank].record
        self.inbox = [(r, c) for r, c in self.inbox if r != rank]
        failure = pb.Failure(rank=rank, pid=record.process.pid or 7, kind="killed", evidence="test")
        self.machine.on_failure(failure, self.now, record.home)
        self.collect()

    def go_on(self, steps: int = 2) -> None:
        """Until nothing is on its way and that many more steps are taken."""
        goal = min(self.version[r] for r in self.machine.job.ranks) + steps
        while (
            self.inbox
            or self.machine.job.recovery is not None
            or min(self.version[r] for r in self.machine.job.ranks) < goal
        ):
            assert self.machine.job.state is not State.FAILED, self.machine.job.failure_reason
            assert self.step()

    def resized(self) -> list[tuple[int, int, list[int], list[int]]]:
        return [(e.before, e.replicas, e.left, e.came) for e in self.of(ev.JobResized)]  # type: ignore[attr-defined]

    def notices(self, kind: str) -> list[str]:
        return [e.text for e in self.of(ev.Notice) if e.kind == kind]  # type: ignore[attr-defined]

    def resize(self, replicas: int, step: int = -1) -> str:
        error = self.machine.resize(replicas, step, self.now)
        self.collect()
        return error


def world_of(
    size: int = 4, least: int = 1, replace: str = "never", grow: str = "auto", most: int = 0, **config: Any
) -> GrowingWorld:
    elastic = {"min": least, "max": most or size * config.get("nnodes", 1), "replace": replace, "grow": grow}
    world = GrowingWorld(size, steps=60, elastic=elastic, **config)
    world.launch()
    world.go_on()
    return world


def shrunk(left: int = 1, size: int = 4, **config: Any) -> GrowingWorld:
    """A job that ``left`` has left."""
    world = world_of(size, **config)
    world.kill(left)
    world.go_on()
    assert world.resized() == [(size, size - 1, [left], [])]
    return world


@pytest.mark.parametrize("left", [0, 1, 3])
def test_who_has_left_comes_back_in_its_place(left: int) -> None:
    world = shrunk(left)
    assert world.resize(4) == ""
    assert world.joining() == {left: "node0"} and list(world.machine.job.ranks) == [r for r in range(4) if r != left]
    world.go_on()
    assert world.resized()[1:] == [(3, 4, [], [left])]
    assert list(world.machine.job.ranks) == [0, 1, 2, 3] == [r.rank for r in world.machine.job.in_order]
    assert [entry.rank for entry in world.tables[-1].entries] == [0, 1, 2, 3]
    assert world.run() is State.FINISHED and not world.machine.job.membership.joining


def test_who_is_built_up_is_told_how_far_the_others_have_come() -> None:
    world = shrunk()
    reached = world.version[0]
    assert world.resize(4) == ""
    (ahead,) = [command.replace.ahead for _, command in world.nodes_told if command.replace.joining]
    assert ahead.reached == reached > 0 and 0.0 < ahead.for_s < world.config.timeouts.replacement_s


def test_the_members_train_on_until_all_are_there() -> None:
    world = world_of(4)
    for rank in (1, 2):
        world.kill(rank)
        world.go_on()
    world.silent = {2}
    assert world.resize(4) == ""
    at = world.version[0]
    for _ in range(10):
        world.step()
    assert world.machine.job.state is State.RUNNING and world.version[0] > at + 5
    assert not any(step >= 0 for step in world.pause_at.values()), "no rank pauses for one that is not there"
    world.kill_joining_process(2)  # the other one comes alone
    world.go_on()
    assert world.resized()[2:] == [(2, 3, [], [1])]
    assert world.run() is State.FINISHED


def test_at_a_step() -> None:
    world = shrunk()
    at = world.version[0] + 6
    assert world.resize(4, at) == ""
    world.go_on(12)
    (_, event) = world.of(ev.JobResized)
    assert isinstance(event, ev.JobResized) and event.step == at


def test_a_command_that_is_refused_does_not_forget_the_one_before() -> None:
    world = world_of(4)
    at = world.version[0] + 6
    assert world.resize(3, at) == ""
    assert "4 at most is allowed" in world.resize(9)
    world.go_on(12)
    assert world.resized() == [(4, 3, [3], [])]
    assert world.of(ev.JobResized)[0].step == at  # type: ignore[attr-defined]


def test_a_recovery_before_that_step_does_not_forget_it() -> None:
    world = shrunk(2, size=5)
    at = world.version[0] + 6
    assert world.resize(5, at) == ""
    world.go_on(1)
    world.kill(4)
    world.go_on(12)
    assert world.resized()[1:] == [(4, 3, [4], []), (3, 4, [], [2])]
    assert world.of(ev.JobResized)[2].step == at  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("replicas", "step", "said"),
    [
        (3, -1, "1 to 4, but for 3, is allowed"),
        (5, -1, "4 at most is allowed"),
        (4, 0, "has begun already"),
        (4, 99, "an earlier one is allowed"),
        (0, -1, "is allowed"),
    ],
)
def test_refused(replicas: int, step: int, said: str) -> None:
    world = shrunk()
    assert said in world.resize(replicas, step)
    assert not world.machine.job.membership.joining and not world.joining()


def test_no_room() -> None:
    world = world_of(2, nnodes=2, controller="h:1")
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    world.go_on()
    assert world.resized() == [(4, 2, [2, 3], [])]
    error = world.resize(3)
    assert "there is room for 0 more (node node0: 0); a node with room has to come first" in error


def test_two_at_once_are_refused_and_called_off() -> None:
    world = shrunk()
    world.silent = {1}
    assert world.resize(4) == ""
    assert "--to 3 calls that off" in world.resize(2)
    assert world.resize(3) == "" and not world.machine.job.membership.joining and world.left_behind() >= {1}
    world.go_on()
    assert world.notices("joining_process_given_up") and len(world.resized()) == 1
    world.silent = set()
    assert world.resize(4) == ""
    world.go_on()
    assert world.resized()[-1] == (3, 4, [], [1])


def test_one_that_is_never_there() -> None:
    world = shrunk(timeouts={"replacement_s": 30.0, "fence_s": 1.0})
    world.silent = {1}
    assert world.resize(4) == ""
    world.go_on()
    world.now += 32.0
    world.machine.on_tick(world.now)
    world.collect()
    (text,) = world.notices("joining_process_given_up")
    assert "within 30 s" in text and 1 in world.left_behind() and not world.machine.job.membership.joining
    assert world.machine.job.state is State.RUNNING and world.run() is State.FINISHED
    assert len(world.resized()) == 1


def test_one_that_dies_after_the_members_were_told_to_pause() -> None:
    world = shrunk()
    assert world.resize(4, world.version[0] + 5) == ""
    while not any(step > 0 for step in world.pause_at.values()):
        world.step()
    world.kill_joining_process(1)
    world.go_on(8)
    assert len(world.resized()) == 1 and len(world.of(ev.RecoveryFinished)) == 1, "no rank pauses in vain"
    assert world.run() is State.FINISHED


def test_one_of_another_script_does_not_come() -> None:
    world = shrunk()
    world.batches = '{"seed": 4}'
    assert world.resize(4) == ""
    world.go_on()
    (text,) = world.notices("joining_process_given_up")
    assert "its batches are" in text and len(world.resized()) == 1


def test_a_word_of_one_that_was_given_up_counts_for_nothing() -> None:
    world = shrunk()
    world.silent = {1}
    assert world.resize(4) == ""
    (number,) = [c.replace.joining for _, c in world.nodes_told if c.replace.joining]
    assert world.resize(3) == "" and world.resize(4) == ""
    late = pb.WorkerStarted(rank=1, generation=world.machine.job.generation, pid=5, joining=number)
    world.machine.on_started(late, "node0", "host")
    assert world.machine.job.membership.joining[1].record.place is Place.EMPTY


# -- by itself ----------------------------------------------------------------------------------------


def two_nodes(**config: Any) -> GrowingWorld:
    """Node 1 is lost, and the job has shrunk."""
    world = world_of(2, nnodes=2, controller="h:1", **config)
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    world.go_on()
    return world


@pytest.mark.parametrize("replace", ["never", "auto"])
def test_a_node_comes_back(replace: str) -> None:
    world = two_nodes(replace=replace)
    world.join("node1", incarnation="again")
    world.go_on()
    assert world.joining() == {2: "node1", 3: "node1"}
    assert world.resized() == [(4, 2, [2, 3], []), (2, 4, [], [2, 3])]
    assert [r.home for r in world.machine.job.in_order] == ["node0", "node0", "node1", "node1"]
    assert len({(r.home, r.local_rank) for r in world.machine.job.in_order}) == 4
    assert world.run() is State.FINISHED


def test_a_node_comes_during_a_recovery() -> None:
    world = two_nodes()
    world.kill(0)
    world.join("other")
    assert not world.joining()
    world.go_on()
    assert world.joining() == {0: "other", 2: "other"} and world.resized()[-1] == (1, 3, [], [0, 2])


def test_it_may_be_switched_off() -> None:
    world = two_nodes(grow="never")
    world.join("node1", incarnation="again")
    world.go_on()
    assert not world.joining()
    assert world.resize(4) == ""
    world.go_on()
    assert world.resized()[-1] == (2, 4, [], [2, 3])


def test_a_rank_that_died_alone_does_not_come_back_by_itself() -> None:
    world = shrunk()
    world.go_on(10)
    assert not world.joining() and len(world.machine.job.ranks) == 3


def test_a_command_is_not_overruled() -> None:
    """A user wants three replicas; a node that comes does not make it four."""
    world = world_of(2, nnodes=2, controller="h:1")
    assert world.resize(3) == ""
    world.go_on()
    world.join("other")
    world.go_on()
    assert not world.joining()
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)  # it had one of the three
    world.collect()
    world.go_on()
    world.join("another")
    world.go_on()
    assert list(world.joining()) == [2] and len(world.machine.job.ranks) == 3


def test_a_node_that_is_lost_on_the_way() -> None:
    world = two_nodes()
    world.silent = {2, 3}
    world.join("node1", incarnation="again")
    world.step()
    assert len(world.machine.job.membership.joining) == 2
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert not world.machine.job.membership.joining and len(world.notices("joining_process_given_up")) == 2
    assert world.machine.job.state is State.RUNNING, "no member was there"
    world.silent = set()
    world.join("node1", incarnation="a third time")
    world.go_on()
    assert len(world.machine.job.ranks) == 4


def test_a_lost_rank_comes_before_a_joining_process() -> None:
    """Its room is taken by processes that are on their way in: these are given up."""
    world = world_of(2, nnodes=3, controller="h:1", replace="auto", least=4)
    world.machine.on_node_lost("node2", "silent", 0.5, world.now)
    world.collect()
    world.go_on()
    world.silent = {4, 5}
    world.join("node2", incarnation="again")
    world.step()
    assert len(world.machine.job.membership.joining) == 2
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    assert not world.machine.job.membership.joining
    world.silent = set()
    world.go_on()
    assert len(world.machine.job.ranks) == 4 and world.resized() == [(6, 4, [4, 5], [])]


# -- any moment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_deaths_at_any_moment(seed: int) -> None:
    """Members and joining processes die while ranks are on their way in; whatever comes of it, the job goes on, each
    rank is informed of in one place, and a growth that is asked for again afterwards succeeds."""
    pick = random.Random(seed)
    world = world_of(5, replace=pick.choice(["never", "auto"]))
    world.random = random.Random(seed)
    for rank in pick.sample(range(5), pick.choice([1, 2])):
        assert world.resize(len(world.machine.job.ranks) - 1) == "", rank
        world.go_on(1)
    assert world.resize(5) == ""
    for _ in range(pick.choice([1, 2])):
        for _ in range(pick.randrange(25)):
            world.step()
        job = world.machine.job
        if job.membership.joining and pick.random() < 0.6:
            world.kill_joining_process(pick.choice(list(job.membership.joining)))
        elif len(job.ranks) > 2:
            world.kill(pick.choice(list(job.ranks)))
        assert set(job.ranks).isdisjoint(job.membership.joining)
    world.go_on()
    while world.machine.job.membership.joining:
        world.step()
    world.go_on()
    if len(world.machine.job.ranks) < 5:
        assert world.resize(5) == ""
        world.go_on()
    assert list(world.machine.job.ranks) == [0, 1, 2, 3, 4]
    sizes = [(e[0], e[1]) for e in world.resized()]
    assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(sizes)), sizes
    assert not any(record.new for record in world.machine.job.in_order)
    assert world.run() is State.FINISHED


@pytest.mark.parametrize("body", ["hold", "stop", "regroup", "restore", "resume"])
@pytest.mark.parametrize("who", ["joining", "member"])
def test_a_death_in_each_state_of_coming_in(who: str, body: str) -> None:
    world = shrunk()
    assert world.resize(4) == ""
    while not any(command.HasField(body) for _, command in world.inbox):
        world.step()
    job = world.machine.job
    victim = 1 if who == "joining" else 2
    if victim in job.membership.joining:
        world.kill_joining_process(victim)
    else:
        world.kill(victim)
    world.go_on()
    assert sorted(job.ranks) == [r for r in range(4) if r != victim]
    assert world.resize(4) == ""
    world.go_on()
    assert list(job.ranks) == [0, 1, 2, 3] and world.run() is State.FINISHED


def test_the_job_ends_meanwhile() -> None:
    world = shrunk()
    world.silent = {1}
    assert world.resize(4) == ""
    assert world.run() is State.FINISHED
    world.machine.on_tick(world.now)
    assert not world.machine.job.membership.joining


def test_another_controller_has_them_ended() -> None:
    world = GrowingWorld(4, steps=20)
    world.join("node0", joining=[3])
    assert world.left_behind() == {3}


@pytest.mark.parametrize(
    ("ranks", "least", "most"), [(4, 5, 8), (5, 2, 4), (7, 2, 6), (1, 1, 4)], ids=lambda value: str(value)
)
def test_a_launch_that_is_outside_is_refused(ranks: int, least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"elastic = {least}:{most}"):
        run_config({"nproc_per_node": ranks, "elastic": {"min": least, "max": most}}, "here")


def test_a_launch_may_be_smaller_than_the_job_becomes() -> None:
    config = run_config({"nproc_per_node": 4, "elastic": {"min": 2, "max": 6}}, "here")
    assert (config.world_size, config.most_ranks) == (4, 12), "of two ranks each, perhaps"


def test_another_model_is_given_up() -> None:
    world = shrunk()
    world.outline = "of another model"
    assert world.resize(4) == ""
    world.go_on()
    (text,) = world.notices("joining_process_given_up")
    assert "its model has other parameters" in text and len(world.resized()) == 1


def test_who_comes_needs_no_part_of_what_is_sharded() -> None:
    """It names its shards as in the launch's size, of which the others have none any more; and says so again when it is
    stopped before it has got its part."""
    record = RankRecord(3)
    names = [("param/w#shard=3/4", True), ("buffer", False), ("common", False), ("capsule@3", False)]
    needs = [pb.ShardNeed(name=name, nbytes=1, sharded=sharded) for name, sharded in names]
    record.inventory.take_needs(needs)
    assert record.inventory.sharded == {"param/w#shard=3/4"} and len(record.inventory.needs) == 4
    record.inventory.need_no_part()
    assert [*record.inventory.needs] == ["buffer", "common", "capsule@3"] and not record.inventory.sharded

    world = shrunk(3)
    assert world.resize(4) == ""
    while 3 not in world.machine.job.ranks:
        assert world.step()
    joining = world.machine.job.ranks[3]
    known = dict(joining.inventory.needs)
    stopped = pb.Reply(rank=3, generation=world.machine.job.generation, needs=needs, live_version=-1)
    world.machine._carried_out([joining], Ordered.STOP, stopped)
    assert joining.inventory.needs == known and 3 not in world.machine.job.membership.sharded_among


# -- beyond the launch --------------------------------------------------------------------------------


def test_a_node_comes_that_the_launch_has_not_had() -> None:
    """What comes there are ranks that the launch has not had, each told in whose place it runs the script."""
    world = world_of(2, nnodes=2, controller="h:1", most=7)
    world.join("more", slots=2)
    world.go_on()
    assert world.joining() == {4: "more", 5: "more"} and world.resized() == [(4, 6, [], [4, 5])]
    orders = [command.replace for _, command in world.nodes_told if command.HasField("replace")]
    assert {order.stands_in for order in orders if order.joining} == {3}
    assert {order.stands_in for order in orders if not order.joining} == {0}
    world.join("another", slots=2)
    world.go_on()
    assert world.resized()[-1] == (6, 7, [], [6])
    assert "7 at most is allowed" in world.resize(8)
    assert world.run() is State.FINISHED


def test_of_those_that_come_the_launchs_own_are_first() -> None:
    world = world_of(2, nnodes=2, controller="h:1", most=6)
    world.machine.on_node_lost("node1", "silent", 0.5, world.now)
    world.collect()
    world.go_on()
    world.join("more", slots=3)
    world.go_on()
    assert world.joining() == {2: "more", 3: "more", 4: "more"} and world.resized()[-1] == (2, 5, [], [2, 3, 4])


def test_one_beyond_the_launch_is_replaced_and_leaves_as_any_other() -> None:
    world = world_of(2, nnodes=2, controller="h:1", most=6, replace="auto")
    world.join("more", slots=2)
    world.go_on()
    world.nodes_told.clear()
    world.kill(5)
    world.go_on()
    (order,) = [command.replace for _, command in world.nodes_told if command.HasField("replace")]
    assert order.stands_in == 3 and len(world.resized()) == 1
    assert world.resize(5) == ""
    world.go_on()
    world.kill(0)
    world.go_on()
    assert [*world.machine.job.ranks] == [0, 1, 2, 3, 4] and not world.machine.job.whole
    assert world.run() is State.FINISHED


@pytest.mark.parametrize(("most", "grown"), [(2, False), (4, True)])
def test_a_spare_node_of_the_launch_is_for_growth_if_there_may_be_any(most: int, grown: bool) -> None:
    world = GrowingWorld(2, steps=60, elastic={"min": 1, "max": most}, spare_nodes=1, controller="h:1")
    world.join("spare", spare=True)
    world.launch()
    world.go_on()
    assert world.joining() == ({2: "spare", 3: "spare"} if grown else {})
    assert len(world.machine.job.ranks) == (4 if grown else 2)


def test_one_beyond_the_launch_is_filled_again_before_it_has_a_part() -> None:
    """State is still sharded as at the launch, and its process begins with the part of the rank in whose place it runs:
    that is not what it needs."""
    world = world_of(2, nnodes=2, controller="h:1", most=6, replace="auto")
    job = world.machine.job
    world.join("more", slots=2)
    while 5 not in job.ranks:
        assert world.step()
    record, known = job.ranks[5], dict(job.ranks[5].inventory.needs)
    assert job.membership.sharded_among == (0, 1, 2, 3)
    world.kill(5)
    joined = pb.Joined(rank=5, generation=job.generation, steps=world.steps)
    parts = {**known, "part#dp=1/4": 15}
    joined.needs.extend(pb.ShardNeed(name=n, nbytes=b, sharded=n.startswith("part")) for n, b in parts.items())
    world.machine.on_started(pb.WorkerStarted(rank=5, generation=job.generation, pid=999), record.home, "host")
    world.machine.on_joined(joined, world.now)
    assert job.state is not State.FAILED, job.failure_reason
    assert record.inventory.needs == known and not record.inventory.sharded


@pytest.mark.parametrize(("launched", "most"), [(4, 4), (2, 4)])
def test_joining_processes_do_not_make_it_a_number_that_is_not_allowed(launched: int, most: int) -> None:
    """The batch can be divided among one, two and four. Two are built up beside two, of which one is lost meanwhile."""
    world = world_of(launched, most=most, slots=4) if launched == 4 else world_of(1, nnodes=2, controller="h:1", most=4)
    job = world.machine.job
    for record in job.ranks.values():
        record.sizes = frozenset({1, 2, 4})
    if launched == 4:
        assert world.resize(2) == ""
        world.go_on()
    else:
        world.join("more", slots=2)
        job.membership.joining or world.step()
    if not job.membership.joining:
        assert world.resize(4) == ""
    while not world.machine._coming.joining_processes.all_here:
        assert world.step()
    world.kill(0)
    world.go_on()
    assert [(before, after) for before, after, *_ in world.resized()][-1] == (2, 2), world.resized()
    assert len(world.notices("joining_process_given_up")) == 1
    assert world.run() is State.FINISHED


@pytest.mark.parametrize(("slots", "alone"), [(1, False), (3, True)])
def test_it_is_said_if_a_node_has_sharded_state_and_its_copies(slots: int, alone: bool) -> None:
    world = world_of(1, nnodes=2, controller="h:1", most=6)
    for record in world.machine.job.in_order:
        record.inventory.sharded = frozenset({f"part#dp={record.rank}/2"})
    world.join("more", slots=slots)
    while not world.resized():
        assert world.step()
    said = [text for text in world.notices("redundancy") if "on one node each (more)" in text]
    assert bool(said) == alone, world.notices("redundancy")


def test_two_nodes_make_up_what_one_does_not() -> None:
    """The batch can be divided among two and four: with the first node that comes the job cannot grow, with the second
    one it can."""
    world = world_of(1, nnodes=2, controller="h:1", most=4)
    job = world.machine.job
    for record in job.ranks.values():
        record.sizes = frozenset({1, 2, 4})
    world.join("third")
    world.go_on()
    assert not world.joining()
    world.join("fourth")
    world.go_on()
    assert {*world.joining().values()} == {"third", "fourth"} and world.resized() == [(2, 4, [], [2, 3])]
    assert world.run() is State.FINISHED

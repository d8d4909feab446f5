"""The controller's decisions when a job of several nodes is laid out in another way: where ranks go, what is still
there to be read, and what follows from another lost node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.relayout.staging_writers import assigned
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.controller.state.outbox import Emit, Send
from flashrecovery.plan.strategy.relayout import LayoutFacts
from flashrecovery.plan.transitions import RelayoutState, State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_replan import FACTS, record

TWO_STAGES = replace(FACTS, layout={"tp": 1, "pp": 2, "cp": 1, "ep": 1, "dp": 2})


class Nodes:
    """``nodes`` of two ranks each, in stages; ranks of a stage have the same, the second stage's are on the last
    ones. No rank keeps copies but as ``copies`` says."""

    def __init__(self, nodes: int = 2, spare: int = 0, copies: bool = True, **settings: object) -> None:
        self.size, self.copies = 2 * nodes, copies
        given = {"nnodes": nodes, "spare_nodes": spare, "nproc_per_node": 2, "controller": "h:1"}
        self.machine = Machine(
            validate(RunConfig, {**given, "parallelism": {"min": 1, "replace": "never", **settings}}, "test")
        )
        self.sent: list[tuple[str | None, pb.Command]] = []
        self.events: list[ev.Event] = []
        self.pids = iter(range(100, 1000))
        for number in range(nodes + spare):
            self.come(number, spare=number >= nodes)
        self.start()
        self.reply("resume")

    @property
    def job(self):  # type: ignore[no-untyped-def]
        return self.machine.job

    def come(self, number: int, *, spare: bool = False, incarnation: str = "i") -> None:
        node = pb.Register(
            node=f"n{number}",
            host=f"h{number}",
            slots=2,
            node_rank=-1,
            peer_port=7,
            incarnation=incarnation,
            spare=spare,
        )
        self.machine.on_register(node, 0.0)
        self.collect()

    def collect(self) -> None:
        for action in self.job.take_actions():
            if isinstance(action, Emit):
                self.events.append(action.event)
            elif isinstance(action, Send):
                self.sent.append((action.node, action.command))

    def of(self, body: str) -> list[tuple[int, str | None, pb.Command]]:
        found = [(node, c) for node, c in self.sent if c.WhichOneof("body") == body]
        self.sent = [(node, c) for node, c in self.sent if c.WhichOneof("body") != body]
        return [(rank, node, c) for node, c in found for rank in (list(c.ranks) or [c.rank])]

    def start(self) -> dict[int, str | None]:
        """All come to their first step. Returns where they are."""
        orders = self.of("replace")
        for rank, node, command in orders:
            started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=next(self.pids))
            self.machine.on_started(started, str(node), "h")
        plan = self.job.parallel.text or "tp=1,pp=2,dp=2"
        sizes = {name: int(size) for name, _, size in (part.partition("=") for part in plan.split(","))}
        facts = replace(FACTS, layout={"cp": 1, "ep": 1, **sizes})
        for rank, node, command in orders:
            names = (f"stage{rank * 2 // self.size}", "common", f"capsule@{rank}")
            needs = [pb.ShardNeed(name=name, nbytes=8) for name in names]
            joined = pb.Joined(rank=rank, generation=command.generation, needs=needs, steps=100, facts=facts.text())
            self.machine.on_joined(joined, 1.0, str(node))
        self.collect()
        return {rank: node for rank, node, _ in orders}

    def reply(self, body: str, live: int = 7) -> list[int]:
        orders = self.of(body)
        for rank, _, command in orders:
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
            if body == "hold":
                reply.position.CopyFrom(pb.Position(settled=True, version=7))
            if body == "stop":
                reply.live_version = live
                before = (rank - 2) % self.size
                if self.copies:
                    names = [f"stage{before * 2 // self.size}", f"capsule@{before}"]
                    reply.held.append(pb.Held(kind="copy", version=7, shards=names, nbytes=[8, 8]))
            self.machine.on_reply(reply, 2.0)
        self.collect()
        return sorted(rank for rank, _, _ in orders)

    def lose(self, number: int) -> None:
        self.machine.on_node_lost(f"n{number}", "silent", 0.0, 3.0)
        self.collect()

    def stop(self) -> None:
        self.reply("hold")
        self.reply("stop")

    def change(self, layout: str) -> None:
        """By command, until all is written."""
        assert self.machine.replan(layout, -1)[0] == ""
        self.collect()
        self.machine.on_paused(pb.Paused(rank=0, generation=self.job.generation, version=7), 3.0)
        self.collect()
        self.stop()
        self.reply("staging")

    def replanned(self) -> list[ev.JobReplanned]:
        return [event for event in self.events if isinstance(event, ev.JobReplanned)]

    def notices(self) -> list[str]:
        return [str(event.kind) for event in self.events if isinstance(event, ev.Notice)]


def test_the_ranks_of_a_lost_node_are_done_without() -> None:
    world = Nodes()
    world.lose(1)
    assert world.job.homeless_since is None and "waiting_for_node" not in world.notices()
    world.stop()
    world.reply("staging")
    (event,) = world.replanned()
    assert event.ranks == 2
    assert set(world.start().values()) == {"n0"}
    places = {tuple(c.restore.staging.ranks) for _, _, c in world.of("restore")}
    assert places == {(0, 1)}


def test_readers_are_told_whose_agents_have_it() -> None:
    """Also where none of the new ranks is on that node; whose processes of the old layout end there."""
    world = Nodes(replace="auto")
    world.change("tp=1,pp=2,dp=1")
    assert sorted((rank, node) for rank, node, _ in world.of("leave")) == [(2, "n1"), (3, "n1")]
    assert world.job.nodes["n1"].state is NodeState.SPARE
    orders = [c.replace for _, c in world.sent if c.HasField("replace")]
    assert {(o.nodes, o.stride, tuple(o.domains)) for o in orders} == {(1, 1, ())}
    assert world.start() == {0: "n0", 1: "n0"}
    for _, _, command in world.of("restore"):
        assert {source.rank: source.peer for source in command.restore.staging.sources} == {
            rank: f"h{rank // 2}:7" for rank in command.restore.staging.ranks
        }


def test_a_rank_that_goes_to_another_node_ends_where_it_was() -> None:
    """Its number is filled on another node, whose agent cannot end it."""
    world = Nodes(nodes=3)
    world.lose(0)
    world.stop()
    world.reply("staging")
    left = {(rank, node) for rank, node, _ in world.of("leave")}
    homes = {rank: node for rank, node, _ in world.of("replace")}
    old = {2: "n1", 3: "n1", 4: "n2", 5: "n2"}
    assert left == {(rank, node) for rank, node in old.items() if homes.get(rank) != node} and left


def test_each_shard_is_on_two_nodes_if_it_can_be() -> None:
    records = {rank: record(rank, 5, [f"s{rank // 2}"]) for rank in range(4)}
    for rank, node in enumerate("abaa"):
        records[rank].home = node
    orders = assigned(records, {}, 5)
    wrote = {(rank, item.shard) for rank, items in orders.items() for item in items}
    assert {(0, "s0"), (1, "s0")} <= wrote  # on two nodes
    assert len([rank for rank, shard in wrote if shard == "s1"]) == 1  # one node has it: once is enough


def test_the_second_node_is_in_another_failure_domain() -> None:
    """If any is: what shares a switch, or power, is lost at once."""
    records = {rank: record(rank, 5, ["s"]) for rank in range(4)}
    for rank, node in enumerate("abcd"):
        records[rank].home = node
    for domains, second in (("xxxy", 3), ("xyxx", 1), ("xxxx", 1)):
        orders = assigned(records, {}, 5, dict(zip("abcd", domains, strict=True)))
        assert sorted(rank for rank, items in orders.items() if items) == [0, second]


def test_two_nodes_that_have_a_shard_otherwise() -> None:
    """Ranks of the new layout would read the one here and the other there, and be no replicas of each other."""
    world = Nodes(nodes=2, replace="auto", copies=True)
    assert world.machine.replan("tp=1,pp=2,dp=1", -1)[0] == ""
    world.collect()
    world.machine.on_paused(pb.Paused(rank=0, generation=world.job.generation, version=7), 3.0)
    world.collect()
    world.stop()
    written: dict[str, list[int]] = {}
    for rank, _, command in world.of("staging"):
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        for item in command.staging.items:
            written.setdefault(item.shard, []).append(rank)
            reply.sent_digests[f"shard {item.shard!r}"] = f"{item.shard} of rank {rank}"
        world.machine.on_reply(reply, 3.0)
    world.collect()
    assert any(len(ranks) > 1 for ranks in written.values())
    assert not world.replanned() and world.job.state is not State.FAILED
    (notice,) = [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"]
    assert "shard 'stage" in notice and "only one of them can be everybody's" in notice


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_only_node_with_something_is_lost_before_the_first_step(checkpoint: bool) -> None:
    world = Nodes(copies=False, nodes=3)
    if checkpoint:
        world.machine.on_checkpoint(4, "path")
    world.lose(0)  # of stages (0, 1, 2) and (3, 4, 5)
    world.stop()
    world.reply("staging")
    assert world.job.state is State.STARTING
    world.of("replace")
    world.lose(2)
    if not checkpoint:
        assert world.job.state is not State.FAILED  # rank 3 is on the other node
        world.lose(1)
        assert world.job.state is State.FAILED
        assert "was in the memory of n1, n2 alone; and there is no checkpoint" in world.job.failure_reason
        return
    assert [event.step for event in world.replanned()] == [7, 7]
    world.lose(1)
    assert world.job.state is State.FAILED  # no rank is left
    assert "no parallel layout fits" in world.job.failure_reason


def test_a_node_without_ranks_is_lost_with_what_nobody_else_has() -> None:
    world = Nodes(copies=False, replace="auto")
    world.machine.on_checkpoint(4, "path")
    world.change("tp=1,pp=2,dp=1")
    world.of("replace")
    world.lose(1)
    assert [(event.step, event.layout) for event in world.replanned()] == [
        (7, "tp=1,pp=2,dp=1"),
        (4, "tp=1,pp=2,dp=1"),
    ]
    assert [e.version for e in world.events if isinstance(e, ev.FallbackStarted)] == [4]
    world.start()
    assert {c.restore.checkpoint for _, _, c in world.of("restore")} == {"path"}


def test_an_agent_that_was_started_again_has_nothing_any_more() -> None:
    world = Nodes(copies=False, replace="auto")
    world.change("tp=1,pp=2,dp=1")
    world.come(1, incarnation="another")
    assert world.job.state is State.FAILED
    assert "was in the memory of n1 alone" in world.job.failure_reason


def refuse(world: Nodes) -> None:
    """What a rank of the new layout has to read cannot be read, and no one is found to have died of it."""
    world.start()
    (rank, _, command), *_ = world.of("restore")
    reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
    reply.error_type, reply.error = "RestoreError", "did not come: connection reset"
    world.machine.on_reply(reply, 4.0)
    world.machine.on_tick(6.0)
    world.collect()


def test_who_serves_dies_and_is_found_to_be_lost_later() -> None:
    """Connections break at once, silence is found after seconds. Each shard is on another node, too."""
    world = Nodes(nodes=3, replace="auto")
    world.machine.on_checkpoint(4, "path")
    world.change("tp=1,pp=2,dp=1")
    refuse(world)
    assert [event.step for event in world.replanned()] == [7, 7]
    world.lose(2)
    world.start()
    places = [c.restore.staging for _, _, c in world.of("restore")]
    assert places and all(set(place.ranks) == {0, 1, 2, 3} for place in places)


def test_what_cannot_be_read_a_second_time_is_on_disk() -> None:
    world = Nodes(nodes=3, replace="auto")
    world.machine.on_checkpoint(4, "path")
    world.change("tp=1,pp=2,dp=1")
    refuse(world)
    refuse(world)
    assert [event.step for event in world.replanned()] == [7, 7, 4]


def test_a_rank_that_is_replaced_while_state_is_written_leaves_the_command_as_it_was() -> None:
    world = Nodes(replace="auto")
    assert world.machine.replan("tp=1,pp=2,dp=1", -1)[0] == ""
    world.collect()
    world.machine.on_paused(pb.Paused(rank=0, generation=world.job.generation, version=7), 3.0)
    world.collect()
    world.stop()
    assert world.machine.under_way()["relayout"] is RelayoutState.WRITING
    dead = pb.Failure(rank=3, pid=world.job.ranks[3].process.pid, kind="killed", evidence="signal 9")
    world.machine.on_failure(dead, 3.0, "n1")
    world.collect()
    assert world.machine.under_way()["relayout"] is RelayoutState.ORDERED
    world.start()
    world.stop()
    world.reply("staging")
    assert [event.layout for event in world.replanned()] == ["tp=1,pp=2,dp=1"]
    assert world.machine.under_way()["relayout"] is RelayoutState.STARTED


def test_a_node_that_comes_back_drops_what_it_still_has() -> None:
    """It was away when that was given back on all nodes."""
    world = Nodes(replace="auto")
    world.lose(1)
    assert not world.of("drop_staging")
    world.come(1, incarnation="another")
    assert [node for _, node, _ in world.of("drop_staging")] == ["n1"]


def test_who_keeps_copies_in_another_layout() -> None:
    """Nodes need not have equally many ranks there."""
    world = Nodes(nodes=2, replace="auto")
    assert world.job.keepers_of_copies() == {0: 2, 1: 3, 2: 0, 3: 1}
    world.change("tp=1,pp=1,dp=4")
    world.job.domains, world.job.stride = (0, 1, 1, 1), 1
    assert world.job.keepers_of_copies() == {0: 1, 1: 2, 2: 3, 3: 0}


def test_free_places_of_other_nodes_count_where_ranks_are_replaced() -> None:
    world = Nodes(nodes=3, spare=1, replace="auto")
    world.lose(2)  # the spare node takes them
    assert world.job.state is not State.FAILED and not world.of("staging")
    assert {world.job.ranks[rank].home for rank in (4, 5)} == {"n3"}


def test_a_command_may_use_spare_nodes_up_to_the_ranks_of_the_launch() -> None:
    world = Nodes(spare=1, replace="auto")
    assert "8 ranks are needed, and there are 4" in world.machine.replan("tp=2,pp=2,dp=2", -1)[0]
    assert world.machine.replan("tp=1,pp=1,dp=4", -1)[0] == ""


def test_a_node_that_a_commanded_layout_needs_has_gone() -> None:
    """It had no ranks, so nothing else has happened."""
    world = Nodes(replace="auto")
    world.change("tp=1,pp=2,dp=1")
    world.start()
    world.reply("restore")
    world.reply("resume")
    health = [pb.RankHealth(rank=r, pid=world.job.ranks[r].process.pid, committed=8) for r in range(2)]
    world.machine.on_heartbeat(pb.Heartbeat(generation=world.job.generation, ranks=health), 4.0)
    world.collect()
    assert world.of("drop_staging") and world.job.recovery is None
    assert world.machine.replan("tp=1,pp=2,dp=2", -1)[0] == ""
    world.lose(1)
    world.machine.on_paused(pb.Paused(rank=0, generation=world.job.generation, version=8), 5.0)
    world.collect()
    world.reply("hold")
    world.reply("stop", live=8)
    assert world.job.state is State.REGROUPING and not world.of("staging")
    assert [e.text for e in world.events if isinstance(e, ev.Notice) and e.kind == "not_replanned"] == [
        "the layout does not change to tp=1,pp=2,dp=2: a node has gone, and there is room for 2 ranks"
    ]


def test_a_job_of_another_layout_is_not_handed_over() -> None:
    world = Nodes(spare=1, replace="auto")
    refused, _ = world.machine.drain.ask("n1", 60.0, 3.0)
    assert "parallel layout may change (parallelism) are not handed over yet" in refused


def test_facts_of_the_test() -> None:
    assert LayoutFacts.parse(TWO_STAGES.text()) == TWO_STAGES

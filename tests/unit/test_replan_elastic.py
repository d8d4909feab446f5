"""A job that is elastic and whose parallel layout may change: what comes first, what the numbers of replicas mean, and
what a shard is of in any number of them. Without processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrecovery import events as ev
from flashrecovery.config import RunConfig, run_config, validate
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.loss_policy import allowed_sizes, never_replaced
from flashrecovery.plan.elastic.resize import ReplicaRange
from flashrecovery.plan.reshard import placements
from flashrecovery.plan.reshard.boxes import flat_boxes
from flashrecovery.plan.reshard.logical import Box, LogicalPart, ShardedParts, ShardParts, ranged, sharded_description
from flashrecovery.plan.reshard.rules import Naming, TensorRule
from flashrecovery.plan.strategy.relayout import LayoutFacts
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_replan import FACTS, World

# -- numbers of replicas ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "replicas", "expected"),
    [
        ((2, 4), 4, (2, 4)),
        ((2, 4), 8, (2, 8)),  # MAX is the layout's own
        ((2, 4), 3, (2, 3)),
        ((2, 4), 1, (1, 1)),  # fewer than MIN: none leaves
        ((1, 2), 1, (1, 1)),
    ],
)
def test_min_and_max_are_replicas_of_whatever_layout(
    sizes: tuple[int, int], replicas: int, expected: tuple[int, int]
) -> None:
    found = ReplicaRange(*sizes, allowed=frozenset({1, 2})).of_layout(replicas)
    assert (found.least, found.most, found.allowed) == (*expected, frozenset({1, 2}))


def test_both_may_be_asked_for() -> None:
    config = run_config({"nproc_per_node": 4, "parallelism": {"min": 1}, "elastic": {"min": 1, "max": 2}}, "test")
    assert config.parallelism is not None and config.elastic is not None


@pytest.mark.parametrize(("elastic", "replan"), [("never", "auto"), ("auto", "never"), ("auto", "auto")])
def test_either_may_say_that_no_rank_is_replaced(elastic: str, replan: str) -> None:
    settings = {"elastic": {"min": 1, "max": 2, "replace": elastic}, "parallelism": {"min": 1, "replace": replan}}
    job = Machine(validate(RunConfig, {"nproc_per_node": 4, **settings}, "test")).job
    job.state = State.RUNNING
    assert never_replaced(job) is ("never" in (elastic, replan))


# -- what a shard is of in any number of replicas ----------------------------------------------------


def of_range(low: int, high: int, whole: tuple[int, ...], begin: int = 0) -> tuple[LogicalPart, ...]:
    parts, at = [], begin
    for box in flat_boxes(Box.whole(whole), low, high):
        parts.append(LogicalPart("t", whole, box, at))
        at += box.size
    return tuple(parts)


def values_of(parts: tuple[LogicalPart, ...], source: np.ndarray, length: int) -> np.ndarray:
    found = np.full(length, -1.0)
    for part in parts:
        index = tuple(slice(a, b) for a, b in zip(part.box.low, part.box.high, strict=True))
        found[part.begin : part.begin + part.box.size] = source[index].reshape(-1)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_range_of_a_tensor_is_of_what_it_says(seed: int) -> None:
    """Its elements, by their values: a local tensor of pieces of a logical one, in any order, and any range of it."""
    rng = random.Random(seed)
    whole = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    source = np.arange(float(np.prod(whole))).reshape(whole)
    cuts = sorted({0, source.size, *(rng.randint(0, source.size) for _ in range(2))})
    runs = [*itertools.pairwise(cuts)]
    rng.shuffle(runs)
    parts, at = [], 0
    for low, high in runs:
        parts += of_range(low, high, whole, at)
        at += high - low
    local = values_of(tuple(parts), source, source.size)
    low = rng.randint(0, source.size)
    high = rng.randint(low, source.size)
    found = tuple(replace(part, begin=part.begin - low) for part in ranged(parts, low, high))
    assert np.array_equal(values_of(found, source, high - low), local[low:high])


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_place_in_any_number_of_replicas(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 200) for _ in range(rng.randint(1, 4))]
    bucket = placements.FlatBuffer((sum(lengths),), 128)
    starts = np.cumsum([0, *lengths])
    tensors, sources = [], {}
    for number, length in enumerate(lengths):
        name = f"p{number}"
        start = int(starts[number])
        sources[name] = np.arange(length) + 1000.0 * (number + 1)
        own = (LogicalPart(name, (length,), Box((0,), (length,)), 0),)
        of_part = placements.BufferRange(bucket, 0, start)
        given = {"shape": (length,), "itemsize": 4, "suffix": "stand=1"}
        rule = TensorRule(
            f"{name}/param",
            pattern=of_part,
            shard=f"param/{name}#part=",
            key="param",
            naming=Naming.PLACE_UNLESS_ALONE,
            **given,  # type: ignore[arg-type]
        )
        tensors.append(ShardedParts(rule, ShardParts("main.", "state.{}.", own)))
        in_buffer = placements.InBuffer(bucket, 0, start)
        rule = TensorRule(
            f"{name}/w",
            pattern=in_buffer,
            shard="weights#dp=",
            key="data",
            naming=Naming.SIZE,
            **given,  # type: ignore[arg-type]
        )
        tensors.append(ShardedParts(rule, ShardParts("", "state.{}.", own)))
    rng.shuffle(tensors)
    for size in (1, 2, 3, 5):
        described = sharded_description(tensors, size)
        weights = described[f"weights#dp={size},stand=1"]
        assert [part.name for part in weights.parts] == [f"p{n}" for n in range(len(lengths))]
        assert [part.begin for part in weights.parts] == [int(s) for s in starts[:-1]]
        for name, source in sources.items():
            found = []
            for place in range(size):
                shard = f"param/{name}#stand=1" if size == 1 else f"param/{name}#part={place}/{size},stand=1"
                if shard not in described:
                    continue
                assert described[shard].param == "main."
                parts = described[shard].parts
                found += list(values_of(parts, source, sum(part.box.size for part in parts)))
            assert found == list(source)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("each", [2, 4])
def test_experts_are_in_one_place_in_any_number_of_replicas(each: int, replicas: int) -> None:
    """Those of the n-th place in a replica lie on every ``each``-th of those that divide the dense parameters: all have
    a shard of flat weights, and each part of what is stepped on is of these experts."""
    length, bucket = 700, placements.FlatBuffer((700,), 128)
    tensors, sources = [], {}
    for first in range(each):
        name = f"experts{first}"
        sources[name] = np.arange(length) + 1000.0 * (first + 1)
        own = (LogicalPart(name, (length,), Box((0,), (length,)), 0),)
        given: dict[str, Any] = {"shape": (length,), "itemsize": 4, "suffix": f"stand={first}"}
        lies = [placements.BufferRange(bucket, 0, 0), placements.InBuffer(bucket, 0, 0)]
        of_part, in_buffer = (placements.EveryNth(pattern, each, first) for pattern in lies)
        parted = Naming.PLACE_UNLESS_ALONE
        part = TensorRule("e/param", pattern=of_part, shard="param/e#part=", key="param", naming=parted, **given)
        flat = TensorRule("e/w", pattern=in_buffer, shard="weights#dp=", key="data", naming=Naming.SIZE, **given)
        tensors.append(ShardedParts(part, ShardParts("main.", "state.{}.", own), each))
        tensors.append(ShardedParts(flat, ShardParts("", "state.{}.", own), each))
    described = sharded_description(tensors, replicas)
    for first in range(each):
        name = f"experts{first}"
        weights = described[f"weights#dp={replicas},stand={first}"]
        assert [(part.name, part.begin, part.box.size) for part in weights.parts] == [(name, 0, length)]
        found: list[float] = []
        for place in range(replicas):
            alone = f"param/e#stand={first}"
            shard = alone if replicas == 1 else f"param/e#part={place}/{replicas},stand={first}"
            parts = described[shard].parts
            found += list(values_of(parts, sources[name], sum(part.box.size for part in parts)))
        assert found == list(sources[name])
    assert len(described) == each * (replicas + 1)


# -- the machine ------------------------------------------------------------------------------------

TP2 = replace(FACTS, layout={"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 2})


class Both(World):
    """Four ranks of two replicas, (0, 1) and (2, 3), each of which has what its mate in the other replica has; and the
    last replica's ranks keep copies for each other."""

    inner = 2

    def __init__(self, least: int = 1, **settings: object) -> None:
        super().__init__(elastic={"min": least, "max": 2, "replace": "never"}, **settings)

    def _config(self, settings: dict[str, object]) -> dict[str, object]:
        elastic = settings.pop("elastic")
        return {"nproc_per_node": 4, "parallelism": {"min": 1, "replace": "never", **settings}, "elastic": elastic}

    def joined(self, rank: int, command: pb.Command, steps: int, facts: LayoutFacts) -> pb.Joined:
        dp = facts.layout["dp"]
        each = facts.layout["tp"] * facts.layout["pp"]
        return pb.Joined(
            rank=rank,
            generation=command.generation,
            needs=self.needs(rank),
            steps=steps,
            facts=facts.text(),
            replicas=dp,
            each=each,
            inner=facts.layout["tp"] if dp > 1 else each,
            sizes=[size for size in (1, 2, 3, 4) if size <= dp],
        )

    def start(self, facts: LayoutFacts, steps: int = 100) -> list[int]:
        facts = TP2 if facts is FACTS else facts
        orders = self.of("replace")
        for rank, command in orders:
            started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=next(self.pids))
            self.machine.on_started(started, "n", "h")
        for rank, command in orders:
            self.machine.on_joined(self.joined(rank, command, steps, facts), 1.0)
        self.collect()
        return [rank for rank, _ in orders]

    @staticmethod
    def needs(rank: int) -> list[pb.ShardNeed]:
        return [pb.ShardNeed(name=name, nbytes=8) for name in (f"stand{rank % 2}", "common", f"capsule@{rank}")]

    def stop(self) -> None:
        """Those of the last replica keep each other's copies."""
        self.reply("hold")
        while orders := self.of("stop"):
            for rank, command in orders:
                reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=7)
                if len(self.job.ranks) + len(self.job.membership.removed) == 2:
                    other = rank ^ 1
                    shards = [f"stand{other % 2}", f"capsule@{other}"]
                    reply.held.append(pb.Held(kind="copy", version=7, shards=shards, nbytes=[8, 8]))
                self.machine.on_reply(reply, 2.0)
            self.collect()

    def go_on(self, version: int = 8) -> None:
        """Those that are left go on, and have taken a step."""
        for body in ("regroup", "restore"):
            self.reply(body)
        self.of("restore")
        self.reply("resume")
        assert self.job.state is State.RUNNING, self.job.state
        health = [
            pb.RankHealth(rank=r, pid=record.process.pid, committed=version) for r, record in self.job.ranks.items()
        ]
        self.machine.on_heartbeat(pb.Heartbeat(generation=self.job.generation, ranks=health), 4.0)
        self.collect()

    def resized(self) -> list[ev.JobResized]:
        return [event for event in self.events if isinstance(event, ev.JobResized)]


def test_first_a_replica_leaves_and_then_the_layout_changes() -> None:
    world = Both()
    world.kill(3)
    world.stop()
    assert [(event.replicas, event.left) for event in world.resized()] == [(1, [2, 3])]
    assert not world.replanned()
    world.go_on()
    assert list(world.job.ranks) == [0, 1] and world.job.recovery is None
    world.kill(0)
    world.stop()
    items = {(rank, item.shard, item.kind) for rank, c in world.of("staging") for item in c.staging.items}
    assert items == {(1, "stand1", "live"), (1, "stand0", "copy")}


def test_the_other_ranks_of_a_lost_replica_have_a_part_in_another_layout() -> None:
    """Below ``elastic.min``: three ranks live, and what each of them has may be needed."""
    world = Both(least=2)
    world.kill(1)
    world.stop()
    assert not world.resized() and [rank for rank, _ in world.of("leave")] == [1]
    assert sorted(rank for rank, _ in world.of("staging")) == [0, 2, 3]
    assert list(world.job.ranks) == [0, 2, 3]


def test_a_second_loss_takes_what_is_left_of_both_replicas() -> None:
    world = Both()
    world.kill(3)
    world.kill(0)
    world.stop()
    assert not world.resized()
    assert sorted(rank for rank, _ in world.of("staging")) == [1, 2]


def changed(world: Both, layout: str, facts: LayoutFacts) -> None:
    world.command(layout)
    world.reply("staging")
    world.start(facts)
    world.go_on()


def test_the_new_layout_has_replicas_of_its_own() -> None:
    world = Both()
    facts = replace(FACTS, layout={"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 4})
    changed(world, "tp=1,pp=1,dp=4", facts)
    sizes = allowed_sizes(world.job)
    assert (sizes.least, sizes.most, world.job.replicas) == (1, 4, 4)
    assert "4 at most is allowed" in world.machine.resize(5, -1, 5.0)
    assert world.machine.resize(2, -1, 5.0) == ""
    assert "about to change its number of replicas" in world.machine.replan("tp=2,pp=1,dp=2", -1)[0]


def test_one_command_at_a_time() -> None:
    world = Both()
    assert world.machine.replan("tp=1,pp=1,dp=4", 50)[0] == ""
    assert "about to change its parallel layout" in world.machine.resize(1, -1, 5.0)


def test_the_layout_that_a_smaller_job_has() -> None:
    world = Both()
    world.kill(3)
    world.stop()
    world.go_on()
    assert "has the layout tp=2,pp=1,dp=1 already" in world.machine.replan("tp=2,pp=1,dp=1", -1)[0]
    why_not, found, _ = world.machine.replan("tp=2,pp=1,dp=2", -1)  # back to that of the launch
    assert why_not == "" and found == "tp=2,pp=1,dp=2"


def test_who_is_on_the_way_in_is_given_up_when_the_layout_changes() -> None:
    world = Both()
    world.kill(3)
    world.stop()
    world.go_on()
    assert world.machine.resize(2, -1, 5.0) == ""
    assert sorted(world.job.membership.joining) == [2, 3]
    assert "about to change" in world.machine.replan("tp=1,pp=1,dp=2", -1)[0]
    world.kill(0)
    assert world.job.state is State.QUIESCING
    world.stop()
    world.reply("staging")
    assert not world.job.membership.joining and world.replanned()[-1].ranks == 1

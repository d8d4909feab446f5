"""Random histories, without a process, of jobs that are elastic and change their parallel layout: losses of ranks and
nodes, commands of both kinds, and nodes that come, in any moment. Workers keep account of which rank has which part,
and whose copies, in the layout of the moment; what is written for another layout must be all of the state."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_sizes
from tests.unit.test_replan import FACTS
from tests.unit.test_sharded_replicas import OVER, ShardedWorld


def shape_of_layout(layout: dict[str, int]) -> ReplicaShape:
    """Megatron's order: tensor ranks, context-parallel ones, data-parallel ones (of a replica several, with experts),
    stages."""
    cp, ep = layout.get("cp", 1), layout.get("ep", 1)
    replicas = layout["dp"] * cp // max(cp, ep)
    return ReplicaShape(replicas, layout["tp"] * cp * layout["dp"] // replicas, layout["pp"])


class Histories(ShardedWorld):
    def __init__(self, layout: dict[str, int], *, sharded: bool, seed: int, single: bool, **config: Any) -> None:
        of = EXPERTS if "ep" in layout else replace(FACTS, takes="cp")
        self.facts = replace(of, layout={"cp": 1, "ep": 1, **layout}, sharded=sharded, elastic=True)
        self.sharded = sharded
        self.staged: dict[str, set[str]] = {}
        self.whole: dict[str, set[str]] = {}
        shape = shape_of_layout(layout)
        places = {"nproc": 1, "nnodes": shape.world, "controller": "h:1"} if single else {"nproc": shape.world}
        super().__init__(shape, steps=60, seed=seed, timeouts={"node_wait_s": 5.0}, **places, **config)

    # -- what ranks have ----------------------------------------------------------------------------

    def part(self, rank: int, layout: tuple[int, ...]) -> list[str]:
        """Of the dense parameters, which all data-parallel and context-parallel ranks divide, several of each replica;
        and of the experts, which those at the same place in every replica do (with context parallelism perhaps those
        of several places)."""
        if not self.sharded:
            return []
        found = []
        for kind, peers in self.sharing(rank, layout):
            of = f"first={peers[0]}"
            found += [f"{kind}#part={peers.index(rank)}/{len(peers)},{of}", f"{kind}-flat#{len(peers)},{of}"]
        return found

    def sharing(self, rank: int, layout: tuple[int, ...]) -> list[tuple[str, list[int]]]:
        """Which ranks divide what with this one. The first of them tells them apart from others: it is at one place."""
        tp, ep, shape = self.facts.layout["tp"], self.facts.layout["ep"], self.shape

        def at(other: int) -> tuple[int, int]:
            run, place = divmod(shape.model_rank(other), shape.inner)
            return run, place % tp

        dense = sorted(other for other in layout if at(other) == at(rank))
        experts = dense[dense.index(rank) % ep :: ep]
        return [("w", dense), *([("e", experts)] if ep > 1 else [])]

    def alone(self, rank: int, layout: tuple[int, ...]) -> list[str]:
        return [name for name in self.part(rank, layout) if "#part=" in name]

    def all_of(self, rank: int, layout: tuple[int, ...]) -> list[str]:
        return [*self.part(rank, layout), f"param/w#{self.shape.model_rank(rank)}"]

    def joined(self, rank: int, generation: int) -> pb.Joined:
        found = super().joined(rank, generation)
        dp, replicas = self.facts.layout["dp"], self.shape.replicas
        each = dp // replicas
        sizes = [size for size in range(1, replicas + 1) if self.facts.micro_batches % (size * each) == 0]
        found.facts = self.facts.text()
        found.sizes.extend(sizes)
        return found

    def _alone(self, layout: tuple[int, ...]) -> bool:
        return len(self.shape.by_replica(layout)) == 1 and len(layout) > 1

    def _copy(self, rank: int) -> None:
        layout, job = self.layout[rank], self.machine.job
        self.kept.pop(rank, None)
        if rank not in layout or max(layout) >= job.world_size:  # it has been laid out otherwise meanwhile
            return
        per_node = 1 if job.parallel.text else job.config.nproc_per_node
        if self._alone(layout):
            ring = ring_of(layout, job.stride, per_node, job.domains)
        elif self.sharded:
            ring = self.shape.ring(layout, job.stride, per_node, job.domains)
        else:
            return
        number = layout.index(rank)
        if ring[number] != number:
            self.kept[rank] = layout[ring.index(number)], self.version[rank]

    def _say_more(self, reply: pb.Reply) -> None:
        rank, command = self._told
        kept, before = self.kept.get(rank), len(reply.held)
        if not self.sharded:
            self.kept.pop(rank, None)  # all that others may keep is said below
        super()._say_more(reply)
        if not self.sharded and kept is not None:
            self.kept.setdefault(rank, kept)
        if command.HasField("stop") and rank in self.kept and self._alone(self.layout[rank]):
            owner, version = self.kept[rank]
            del reply.held[before:]
            names = [*self.all_of(owner, self.layout[rank]), f"capsule@{owner}"]
            reply.held.add(kind="copy", version=version, shards=names, nbytes=[9] * len(names))

    # -- another layout -----------------------------------------------------------------------------

    def answer(self, rank: int, command: pb.Command) -> None:
        order = command.replace
        if order.layout and not (order.joining or order.detached):
            self.facts = replace(self.facts, layout={"cp": 1, "ep": 1, **layout_sizes(order.layout)})
            self.shape = shape_of_layout(dict(self.facts.layout))
        if command.HasField("staging"):
            self._write(rank, command)
            return
        super().answer(rank, command)

    def _write(self, rank: int, command: pb.Command) -> None:
        if rank not in self.living or command.generation != self.machine.job.generation:
            return
        staging, layout = command.staging, self.layout[rank]
        owner, version = self.kept.get(rank, (-1, -1))
        for item in staging.items:
            mine = item.shard in [*self.all_of(rank, layout), "common"] and self.version[rank] == staging.version
            copy = owner >= 0 and version == staging.version and item.shard in self.all_of(owner, layout)
            if not (mine if item.kind == "live" else copy if item.kind == "copy" else False):
                self.odd.append(f"rank {rank} is to write {item.kind} {item.shard!r} at {staging.version}, and has not")
        self.staged.setdefault(staging.directory, set()).update(item.shard for item in staging.items)
        if staging.items:
            model_ranks = range(self.shape.each)
            peers = [self.shape.peers(layout, self.shape.rank(0, model_rank)) for model_rank in model_ranks]
            every = {name for some in peers for peer in some for name in self.all_of(peer, layout)}
            self.whole.setdefault(staging.directory, set()).update(every)
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, staged_bytes=9)
        self.machine.on_reply(reply, self.now)

    def _restored(self, rank: int, restore: pb.Restore, reply: pb.Reply) -> None:
        if self.sharded:
            super()._restored(rank, restore, reply)
        elif restore.HasField("reshape"):
            self.ready[rank] = tuple(restore.reshape.after)
        name = restore.staging.directory
        if restore.HasField("staging") and not self.staged.get(name, set()) >= self.whole[name]:
            self.odd.append(f"{name} lacks {sorted(self.whole[name] - self.staged[name])}")

    def check_counted(self) -> None:
        job = self.machine.job
        found = Counter(record.place for record in job.ranks.values())
        assert {place: count for place, count in job.places.items() if count} == found


LAYOUTS = [
    {"tp": 2, "pp": 1, "dp": 2},
    {"tp": 1, "pp": 2, "dp": 2},
    {"tp": 2, "pp": 1, "dp": 3},
    {"tp": 2, "pp": 2, "dp": 2},
]
SHARED = [
    {"tp": 1, "pp": 1, "cp": 2, "dp": 2},
    {"tp": 1, "pp": 2, "cp": 2, "dp": 2},
    {"tp": 1, "pp": 1, "ep": 2, "dp": 4},
    {"tp": 1, "pp": 1, "ep": 2, "dp": 6},
    {"tp": 1, "pp": 1, "cp": 2, "ep": 2, "dp": 2},
    {"tp": 1, "pp": 1, "cp": 4, "ep": 2, "dp": 2},
    {"tp": 1, "pp": 1, "cp": 2, "ep": 4, "dp": 4},
    {"tp": 1, "pp": 2, "ep": 2, "dp": 4},
    {"tp": 2, "pp": 1, "ep": 2, "dp": 4},
]
"""With context and expert parallelism: several places of a replica divide state together."""
TEXTS = ["tp=2,pp=1,dp=2", "tp=1,pp=2,dp=2", "tp=1,pp=1,dp=4", "tp=4,pp=1,dp=1", "tp=2,pp=2,dp=1", "tp=1,pp=1,dp=2"]
_MORE = ["cp=2,dp=2", "cp=2,dp=1", "cp=4,dp=1", "cp=2,pp=2,dp=1"]
_EXPERTS = [
    "ep=2,dp=2",
    "ep=2,dp=4",
    "ep=4,dp=4",
    "cp=2,ep=2,dp=2",
    "cp=2,ep=2,dp=1",
    "pp=2,ep=2,dp=2",
    "cp=2,ep=4,dp=2",
]
HISTORIES = [*product(LAYOUTS, range(6)), *product(SHARED, range(2))]
EXPERTS = replace(FACTS, experts=4, chosen=2, expert_inner=256, sequence_parallel=True, takes="cp,ep")


def texts_for(layout: dict[str, int]) -> list[str]:
    """Layouts that are commanded."""
    return TEXTS + (_MORE if {"cp", "ep"} & layout.keys() else []) + (_EXPERTS if "ep" in layout else [])


def launched(layout: dict[str, int], seed: int, sharded: bool) -> tuple[Histories, random.Random, bool]:
    """A job that trains, what its history is drawn from, and whether each rank has its own node."""
    rng = random.Random(seed)
    single = rng.random() < 0.5
    never, replicas = rng.choice(("auto", "never")), shape_of_layout(layout).replicas
    config = {
        "elastic": {"min": rng.choice((1, 1, replicas)), "max": replicas, "replace": never},
        "parallelism": {"min": 1, "replace": never},
    }
    world = Histories(layout, sharded=sharded, seed=seed, single=single, **config)
    world.launch()
    world.go_on()
    return world, rng, single


def run(layout: dict[str, int], seed: int, sharded: bool) -> Histories:
    world, rng, single = launched(layout, seed, sharded)
    job, extra = world.machine.job, 0
    for _ in range(rng.randint(2, 5)):
        for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13, 30))):
            if job.state in OVER or not world.step():
                break
            world.check_counted()
        living = sorted(world.living.intersection(job.ranks))
        if job.state in OVER or not living:
            break
        what, victim = rng.random(), rng.choice(living)
        if what < 0.15:
            world.machine.resize(rng.randint(1, 4), -1, world.now)
            world.collect()
        elif what < 0.35:
            world.machine.replan(rng.choice(texts_for(layout)), -1)
            world.collect()
        elif what < 0.45 and single:
            extra += 1
            world.join(f"extra{extra}", spare=True)
        elif what < 0.7 and single and job.ranks[victim].home:
            home = job.ranks[victim].home
            for rank in [rank for rank, record in job.ranks.items() if record.home == home]:
                world.lose(rank)
                world.inbox = [(other, command) for other, command in world.inbox if other != rank]
            world.machine.on_node_lost(home, "test", 0.0, world.now)
            world.collect()
        else:
            world.kill(victim)
        world.check_counted()
    for _ in range(3000):
        if job.state in OVER:
            break
        world.check_counted()
        if not world.step():
            world.now += 6.0
            world.machine.on_tick(world.now)
            world.collect()
    assert job.state in OVER, "it hangs"
    # A rank that has been restored, and was stopped before it went on, has something; the model does not say so.
    assert not [text for text in world.odd if "from one that has nothing" not in text]
    if job.state is State.FINISHED:
        assert len(job.shape.whole(job.ranks)) * job.shape.each == len(job.ranks)
    return world


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("layout", "seed"), HISTORIES, ids=str)
def test_all_of_the_state_is_there_in_every_layout(layout: dict[str, int], seed: int, sharded: bool) -> None:
    run(layout, seed, sharded)


def settle(world: Histories) -> bool:
    """All have taken steps since the last change, and none is under way. Returns whether the job still trains."""
    job, quiet = world.machine.job, 0
    for _ in range(3000):
        quiet = quiet + 1 if job.state is State.RUNNING and job.recovery is None and not world.inbox else 0
        if job.state in OVER or quiet > 2:
            break
        if not world.step():
            world.now += 6.0
            world.machine.on_tick(world.now)
            world.collect()
    return quiet > 2


def one_loss_after_the_other(layout: dict[str, int], seed: int, sharded: bool) -> Histories:
    """Of a rank, or of a node with one rank, each when all have taken steps since the last change."""
    world, rng, single = launched(layout, seed, sharded)
    job = world.machine.job
    while settle(world) and len(job.ranks) > 1:
        what, victim = rng.random(), rng.choice(sorted(job.ranks))
        if what < 0.2:
            world.machine.resize(rng.randint(1, 4), -1, world.now)
        elif what < 0.4:
            world.machine.replan(rng.choice(texts_for(layout)), -1)
        elif what < 0.7 and single:
            world.lose_node_of(victim)
        else:
            world.kill(victim)
        world.collect()
    return world


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("layout", "seed"), HISTORIES, ids=str)
def test_one_loss_after_the_other_never_ends_a_job(layout: dict[str, int], seed: int, sharded: bool) -> None:
    job = one_loss_after_the_other(layout, seed, sharded).machine.job
    assert job.state is State.FINISHED or len(job.ranks) == 1, job.failure_reason


def test_the_histories_are_not_empty() -> None:
    worlds = [run(layout, seed, True) for layout in LAYOUTS[:2] for seed in range(12)]
    events = Counter(type(event) for world in worlds for event in world.events)
    assert events[ev.JobReplanned] > 5 and events[ev.JobResized] > 5

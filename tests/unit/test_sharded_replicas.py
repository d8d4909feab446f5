"""Jobs whose state is sharded among replicas of several ranks: what is refused, and histories of losses through the
controller's machine, whose workers keep account of which rank has which part and whose copies."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.config import ElasticSettings, Settings
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import STRIDE_ENV
from flashrecovery.worker import registry
from flashrecovery.worker.consistency import all_equal
from flashrecovery.worker.replication import copies, policy
from flashrecovery.worker.reshard import elastic_checks
from tests.support.adapters import AdapterStandIn
from tests.unit.test_replicas import NEIGHBOURS, ReplicaWorld

APART = ReplicaShape(3, 1, 2)
OVER = (State.FAILED, State.FINISHED)

# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "nodes", "stride", "refused"),
    [
        (ReplicaShape(4, 2), 2, 4, ""),  # two replicas on each node
        (ReplicaShape(2, 4), 2, 4, ""),
        (ReplicaShape(3, 2), 3, 2, ""),
        (ReplicaShape(2, 1, 2), 2, 2, "rank 1 keeps the copies of what rank 0 has alone"),  # a stage on each node
        (ReplicaShape(4, 2, 2), 2, 8, "on the same node"),
        (ReplicaShape(3, 2), 2, 3, "on the same node"),  # a replica on both
        (ReplicaShape(2, 1, 2), 1, 1, ""),  # one node: only processes can be lost alone
        (ReplicaShape(1, 2, 2), 2, 2, ""),  # one replica: no copies
        (ReplicaShape(4), 2, 2, ""),
    ],
)
def test_copies_on_the_owners_node_are_refused(
    shape: ReplicaShape, nodes: int, stride: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = AdapterStandIn(shard_layout=lambda: "some", touch_mark=lambda: None, shards=list)
    of_rank: Any = SimpleNamespace(
        rank=0,
        world_size=shape.world,
        shape=shape,
        adapters=[adapter],
        batches=None,
        tensor_shards=list,
        unique_shards=list,
    )
    monkeypatch.setattr(policy, "placement", lambda: (stride, nodes))
    monkeypatch.setenv(STRIDE_ENV, str(stride))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(shape.world // nodes))
    monkeypatch.setattr(policy, "copied_shards", lambda *_: ["w#part=0/2"])
    monkeypatch.setattr(policy, "anywhere", lambda here: here)

    def allowed(*_: object) -> Any:
        raise StopIteration

    monkeypatch.setattr(policy, "choice", allowed)
    settings = Settings.model_validate({"elastic": {"min": 1, "max": max(shape.replicas, 2)}})
    with pytest.raises(UnsupportedError if refused else StopIteration, match=refused or None):
        copies.Copies(of_rank, settings, *[lambda *_: None] * 5)


@pytest.mark.parametrize(("size", "refused"), [(3, False), (6, True), (2, True)])
def test_a_division_among_others_than_the_replicas_is_refused(
    size: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 over all ranks, beside a model whose replicas have two."""
    adapter = AdapterStandIn(name="one", shard_layout=lambda: SimpleNamespace(size=size, sharers=lambda: None))
    of_rank: Any = SimpleNamespace(
        rank=0,
        world_size=6,
        shape=NEIGHBOURS,
        adapters=[adapter],
        find_replicas=lambda: None,
        sharers=NEIGHBOURS.peers,
    )
    monkeypatch.setattr(all_equal, "check_equal", lambda *_, **__: None)
    monkeypatch.setattr(elastic_checks.groups, "refuse_partial", lambda _: None)
    monkeypatch.setattr(elastic_checks.groups, "described", lambda _: [])
    elastic = ElasticSettings(min=1, max=3)
    settings = Settings(elastic=elastic)
    batches: Any = SimpleNamespace()
    if not refused:
        elastic_checks._check_replicas(of_rank, batches, settings, elastic)
        return
    with pytest.raises(UnsupportedError, match=f"the state of one is sharded among {size} ranks"):
        elastic_checks._check_replicas(of_rank, batches, settings, elastic)


def test_two_models_of_one_kind_with_other_replicas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Any:
        raise AssertionError

    found = registry.Registry(0, 6, never, never)
    found.adapters = [AdapterStandIn(name="ddp", replicas=lambda: (0, 2, 4))] * 2
    monkeypatch.setattr(registry.dist, "get_process_group_ranks", list)
    assert found.replicas() == (0, 2, 4)
    found.adapters.append(AdapterStandIn(name="ddp", replicas=lambda: (0, 1, 2)))
    with pytest.raises(UnsupportedError, match=r"ddp: \[0, 2, 4\], ddp: \[0, 2, 4\], ddp: \[0, 1, 2\]"):
        found.replicas()


# -- histories ----------------------------------------------------------------------------------------


class ShardedWorld(ReplicaWorld):
    """Workers with a part each of what those at their place have, and copies of another one's. ``odd``: what was wrong
    with what they were told."""

    def __init__(self, shape: ReplicaShape, **config: Any) -> None:
        self.layout: dict[int, tuple[int, ...]] = {}
        self.kept: dict[int, tuple[int, int]] = {}  # whose copies, of which version
        self.ready: dict[int, tuple[int, ...]] = {}
        self.empty: set[int] = set()  # they have no state yet
        self.living: set[int] = set()
        self.odd: list[str] = []
        self._told: tuple[int, pb.Command] = (0, pb.Command())
        super().__init__(shape, **config)
        replied, joined = self.machine.on_reply, self.machine.on_joined

        def on_reply(reply: pb.Reply, now: float) -> None:
            self._say_more(reply)
            replied(reply, now)

        def on_joined(message: pb.Joined, now: float, node: str = "") -> None:
            joined(self.joined(message.rank, message.generation), now, node)

        self.machine.on_reply, self.machine.on_joined = on_reply, on_joined  # type: ignore[method-assign]

    def part(self, rank: int, layout: tuple[int, ...]) -> list[str]:
        peers, model_rank = self.shape.peers(layout, rank), self.shape.model_rank(rank)
        return [f"w#part={peers.index(rank)}/{len(peers)},stand={model_rank}", f"flat#{len(peers)},stand={model_rank}"]

    def alone(self, rank: int, layout: tuple[int, ...]) -> list[str]:
        """What of its part no other rank has."""
        return self.part(rank, layout)[:1]

    def needs(self, rank: int, layout: tuple[int, ...]) -> list[pb.ShardNeed]:
        sharded = self.part(rank, layout) if rank in layout else []
        alike = [f"param/w#{self.shape.model_rank(rank)}", "common", f"capsule@{rank}"]
        return [pb.ShardNeed(name=name, nbytes=9, sharded=name in sharded) for name in [*sharded, *alike]]

    def joined(self, rank: int, generation: int) -> pb.Joined:
        found = super().joined(rank, generation)
        del found.needs[:]
        self.layout[rank] = tuple(range(self.shape.world))
        found.needs.extend(self.needs(rank, self.layout[rank]))
        self.kept.pop(rank, None)
        self.ready.pop(rank, None)
        self.empty.add(rank)
        self.living.add(rank)
        return found

    def _copy(self, rank: int) -> None:
        layout = self.layout[rank]
        ring, number = (
            self.shape.ring(layout, self.machine.job.stride, self.machine.job.config.nproc_per_node),
            layout.index(rank),
        )
        self.kept.pop(rank, None)
        if ring[number] != number:
            self.kept[rank] = layout[ring.index(number)], self.version[rank]

    def train(self) -> bool:
        before, going = dict(self.version), super().train()
        for rank in self.machine.job.ranks:
            if self.version[rank] != before[rank]:
                self.empty.discard(rank)
                self._copy(rank)
        return going

    def answer(self, rank: int, command: pb.Command) -> None:
        self._told = rank, command
        body = command.WhichOneof("body")
        if body == "replace" and not command.replace.joining and rank not in self.machine.job.ranks:
            return
        if body == "leave":
            self.living.discard(rank)
        if body == "regroup" and rank in self.empty:
            layout = tuple(command.regroup.layout)
            self.layout[rank] = layout if rank in layout else ()
        super().answer(rank, command)
        if body == "resume" and rank in self.living:
            self.layout[rank] = self.ready.pop(rank, self.layout[rank])
            self.empty.discard(rank)
            self._copy(rank)

    def lose(self, rank: int) -> None:
        """Its process is dead."""
        self.living.discard(rank)
        self.kept.pop(rank, None)
        self.ready.pop(rank, None)

    def kill(self, rank: int, kind: str = "killed", signal: int = 0) -> None:
        self.lose(rank)
        super().kill(rank, kind, signal)

    def lose_node_of(self, rank: int) -> None:
        self.lose(rank)
        self.inbox = [(other, command) for other, command in self.inbox if other != rank]
        self.machine.on_node_lost(self.machine.job.ranks[rank].home, "test", 0.0, self.now)
        self.collect()

    def _say_more(self, reply: pb.Reply) -> None:
        rank, command = self._told
        if command.HasField("stop"):
            ready = self.ready.pop(rank, None)
            if ready == tuple(command.stop.layout):
                self.layout[rank] = ready
                self._copy(rank)
            reply.needs.extend(self.needs(rank, self.layout[rank]))
            if rank in self.kept:
                owner, version = self.kept[rank]
                names = [*self.alone(owner, self.layout[rank]), f"capsule@{owner}"]
                reply.held.add(kind="copy", version=version, shards=names, nbytes=[9] * len(names))
        elif command.HasField("restore") and command.generation == self.machine.job.generation:
            self._restored(rank, command.restore, reply)

    def _restored(self, rank: int, restore: pb.Restore, reply: pb.Reply) -> None:
        for item in restore.transfers:
            if item.source == rank and item.kind == "copy" and rank not in self.kept:
                self.odd.append(f"rank {rank} has no copies, of {item.shard!r}")
            if item.dest == rank and item.kind == "live" and item.source in self.empty:
                self.odd.append(f"rank {rank} gets {item.shard!r} from one that has nothing")
        if not restore.HasField("reshape"):
            return
        before, after = tuple(restore.reshape.before), tuple(restore.reshape.after)
        if self.layout[rank] not in (before, ()):
            self.odd.append(f"rank {rank} is in {self.layout[rank]}, not in {before}")
        serving = {one.owner: one.holder for one in restore.reshape.custody}
        for owner in self.shape.peers(before, rank):
            holder = serving.get(owner, -1)
            if owner not in after and self.kept.get(holder) != (owner, restore.version) and holder in self.living:
                self.odd.append(f"what rank {owner} had is not with {holder}: {self.kept}")
            if owner not in after and holder not in after:
                self.odd.append(f"what rank {owner} had is with {holder}, which is no member")
        self.ready[rank] = after
        reply.next_needs.extend(self.needs(rank, after))


def launched(shape: ReplicaShape, *, replace: str, seed: int | None = None, single: bool = False) -> ShardedWorld:
    """``single``: each rank has its own node."""
    places = {"nproc": 1, "nnodes": shape.world, "controller": "h:1"} if single else {"nproc": shape.world}
    elastic = {"min": 1, "max": shape.replicas, "replace": replace}
    world = ShardedWorld(shape, steps=60, seed=seed, elastic=elastic, timeouts={"node_wait_s": 5.0}, **places)
    world.launch()
    world.go_on()
    return world


def test_a_replica_is_waited_for_whose_healthy_rank_alone_has_its_part() -> None:
    """Rank 5 is being filled again, which has kept the copies of rank 3's part. Then rank 2 loses its node, and there
    is no other one: rank 3 would leave with it."""
    world = launched(NEIGHBOURS, replace="auto", single=True)
    world.kill(5)
    world.lose_node_of(2)
    while world.inbox:
        assert world.step()
    assert world.machine.job.state is not State.FAILED, world.machine.job.failure_reason
    assert list(world.machine.job.ranks) == list(range(6)) and not world.resized()
    world.join("node9")
    world.go_on()
    assert world.run() is State.FINISHED and not world.resized() and not world.odd


def test_a_replica_does_not_leave_with_what_a_later_victim_had() -> None:
    """Rank 2 has lost its node, and its replica is about to leave. Rank 3 keeps the copies of what rank 1 has alone,
    which dies then and is filled again: rank 3 stays, and a node is waited for."""
    world = launched(NEIGHBOURS, replace="auto", single=True)
    world.lose_node_of(2)
    assert list(world.machine.job.ranks) == [0, 1, 3, 4, 5]
    world.kill(1)
    while world.inbox:
        assert world.step()
    assert world.machine.job.state is not State.FAILED, world.machine.job.failure_reason
    assert list(world.machine.job.ranks) == list(range(6)) and not world.resized()
    world.join("node9")
    world.go_on()
    assert world.run() is State.FINISHED and not world.resized() and not world.odd


def test_a_replica_leaves_if_a_later_victim_had_nothing_that_it_keeps() -> None:
    world = launched(ReplicaShape(4, 2), replace="auto", single=True)
    world.lose_node_of(2)
    world.kill(7)  # whose copies rank 1 keeps, and which keeps those of rank 5
    assert world.run() is State.FINISHED and not world.odd
    assert world.resized() == [(4, 3, [2, 3], [])]


@pytest.mark.parametrize("shape", [NEIGHBOURS, APART, ReplicaShape(4, 2), ReplicaShape(2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_parts_are_where_they_are_looked_for(shape: ReplicaShape, seed: int) -> None:
    """Ranks and nodes are lost one after the other, also in the middle of a change, and replicas go and come."""
    rng = random.Random(seed)
    single = rng.random() < 0.5
    world = launched(shape, replace=rng.choice(("auto", "never")), seed=seed, single=single)
    job = world.machine.job
    for _ in range(3):
        for _ in range(rng.choice((0, 1, 3, 8, 30))):
            if job.state in OVER or not world.step():
                break
        living = sorted(world.living.intersection(job.ranks))
        if job.state in OVER or not living:
            break
        if rng.random() < 0.4:
            world.resize(rng.randint(1, shape.replicas))
            continue
        victim = rng.choice(living)
        if single and job.ranks[victim].home and rng.random() < 0.5:
            world.lose_node_of(victim)
        else:
            world.kill(victim)
    for _ in range(3000):
        if job.state in OVER:
            break
        if not world.step():  # a node is waited for, which does not come
            world.now += 6.0
            world.machine.on_tick(world.now)
            world.collect()
    assert job.state in OVER and not world.odd
    if job.state is State.FINISHED:
        assert len(job.shape.whole(job.ranks)) * shape.each == len(job.ranks)

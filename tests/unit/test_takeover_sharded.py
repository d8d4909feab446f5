"""A controller that comes to an elastic job whose state is sharded, in a size that is not the launch's, and does not
know what a rank that has died needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from flashrecovery import events as ev
from flashrecovery.agent.agent import Agent
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.outbox import Send
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.events import RunDir
from flashrecovery.plan import Kind
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_impostors import ACCESS
from tests.unit.test_machine import World

VERSION = 7


def needs(rank: int, part: str) -> list[pb.ShardNeed]:
    return [
        pb.ShardNeed(name=f"w#shard={part}", nbytes=100, sharded=True),
        pb.ShardNeed(name="common", nbytes=10),
        pb.ShardNeed(name=f"capsule@{rank}", nbytes=5),
    ]


class Taken(World):
    """Four ranks were launched, and three go on, of which rank 2 has died before this controller has come. Each keeps
    the copies of the one before it, with the parts of three."""

    def __init__(
        self, *, found: Sequence[int] = (0, 1), kept: bool = True, said: str = "2/3", replace: str = "auto"
    ) -> None:
        super().__init__(4, elastic={"min": 1, "max": 4, "replace": replace})
        self.kept = kept
        register = pb.Register(node="n", host="h", slots=4, incarnation="i", generation=3, stride=1)
        register.members.extend([0, 1, 2])
        for rank in found:
            worker = pb.WorkerState(rank=rank, pid=rank + 1, resumed=True, stepping=True, committed=VERSION)
            worker.joined.CopyFrom(pb.Joined(rank=rank, steps=99, batches="global"))
            worker.joined.needs.extend(needs(rank, said if rank == 2 else f"{rank}/3"))
            register.workers.append(worker)
        self.machine.on_register(register, 0.0)
        self.now = self.config.timeouts.takeover_s + 1
        self.machine.on_tick(self.now)
        self.collect()

    def answer(self, rank: int, command: pb.Command) -> None:
        m, body = self.machine, command.WhichOneof("body")
        if rank < 0:
            return
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank)
        if body == "replace":
            m.on_started(pb.WorkerStarted(rank=rank, generation=command.generation, pid=100), "n", "h")
            joined = pb.Joined(rank=rank, generation=command.generation, steps=99, batches="global")
            joined.needs.extend(needs(rank, f"{rank}/4"))  # of the launch's size
            m.on_joined(joined, self.now)
            return
        if body == "hold":
            reply.position.CopyFrom(pb.Position(settled=True, version=VERSION))
        elif body == "stop":
            reply.live_version = VERSION
            reply.needs.extend(needs(rank, f"{rank}/3"))
            owner = (rank - 1) % 3
            names = [f"w#shard={owner}/3", f"capsule@{owner}"]
            if self.kept or owner != 2:
                reply.held.add(kind=Kind.COPY.value, version=VERSION, shards=names, nbytes=[100, 5])
            if command.stop.unsure:
                reply.layout.extend([0, 1, 2])
        elif body != "regroup":
            return
        m.on_reply(reply, self.now)
        self.collect()

    def restored(self) -> dict[int, set[str]]:
        """By rank, what it is to get from others."""
        found: dict[int, set[str]] = {}
        for rank, command in self.inbox:
            for item in command.restore.transfers:
                if item.dest == rank:
                    found.setdefault(rank, set()).add(item.shard)
        return found


def until_restored(world: Taken) -> None:
    while world.inbox and not any(command.HasField("restore") for _, command in world.inbox):
        world.answer(*world.inbox.pop(0))


def test_a_dead_ranks_part_is_known_from_its_copies() -> None:
    world = Taken()
    until_restored(world)
    assert world.machine.job.state is State.RESTORING, world.of(ev.JobFailed)
    assert world.restored() == {2: {"w#shard=2/3", "common", "capsule@2"}}
    record = world.machine.job.ranks[2]
    assert record.inventory.sharded == {"w#shard=2/3"} and not record.inventory.as_launched


def test_it_dies_once_more_before_all_are_stopped() -> None:
    """What its first replacement has said is of the launch's size, too."""
    world = Taken()
    index = next(i for i, (_, c) in enumerate(world.inbox) if c.HasField("replace"))
    world.answer(*world.inbox.pop(index))
    assert world.machine.job.ranks[2].place is Place.JOINED
    world.kill(2)
    until_restored(world)
    assert world.restored() == {2: {"w#shard=2/3", "common", "capsule@2"}}


def test_without_copies_the_job_ends() -> None:
    """It does not go on without the part."""
    world = Taken(kept=False)
    until_restored(world)
    (failed,) = world.of(ev.JobFailed)
    assert isinstance(failed, ev.JobFailed) and "w#shard=2/4" in failed.reason


@pytest.mark.parametrize("said", ["2/3", "2/4"])
def test_a_rank_dies_that_has_not_been_stopped_since(said: str) -> None:
    """It was a replacement in the new size itself, and has said at its first step what it needs in the launch's."""
    world = Taken(found=(0, 1, 2), said=said)
    assert world.machine.job.state is State.RUNNING
    world.kill(2)
    until_restored(world)
    assert world.restored() == {2: {"w#shard=2/3", "common", "capsule@2"}}, world.of(ev.JobFailed)


@pytest.mark.parametrize("said", ["2/3", "2/4"])
def test_it_dies_and_is_not_replaced(said: str) -> None:
    """Then its part goes to the others."""
    world = Taken(found=(0, 1, 2), said=said, replace="never")
    world.kill(2)
    until_restored(world)
    reshapes = [command.restore.reshape for _, command in world.inbox if command.HasField("restore")]
    assert reshapes, world.of(ev.JobFailed)
    assert [(c.owner, c.shard, c.holder) for c in reshapes[0].custody] == [(2, "w#shard=2/3", 0)]


def test_a_new_controller_of_a_job_without_a_rank_table_keeps_copies_on_another_node() -> None:
    """The first one was lost in the start, before agents had been told which rank keeps whose copies."""
    world = World(2, nnodes=2, controller="h:1")
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        workers = [pb.WorkerState(rank=rank, pid=rank + 1) for rank in ranks]
        world.join(node, workers=workers)
    told = {rank: c.replace.stride for rank, c in world.inbox if c.HasField("replace")}
    assert told == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize(("domains", "stride"), [((), 1), ((0, 0, 1, 1), 2), ((0, 1, 0, 1), 1)])
def test_and_in_another_failure_domain(domains: tuple[int, ...], stride: int) -> None:
    """As they were at the launch: else survivors of a change and replacements would come to different rings."""
    machine = Machine(RunConfig.model_validate({"nproc_per_node": 1, "nnodes": 4, "controller": "h:1"}))
    for rank, node in enumerate("abcd"):
        register = pb.Register(node=node, host=node, slots=1, node_rank=-1, incarnation=node, domains=domains)
        register.workers.add(rank=rank, pid=100 + rank)
        machine.on_register(register, 0.0)
    sent = [a.command for a in machine.job.take_actions() if isinstance(a, Send)]
    assert {c.replace.stride for c in sent if c.HasField("replace")} == {stride}


def test_a_node_that_was_fenced_does_not_say_who_belongs_to_the_job(tmp_path: Path) -> None:
    """It has been given a rank, and has heard of no members since; a rank that has come meanwhile would be asked to
    leave."""
    config = RunConfig.model_validate({"nproc_per_node": 1, "nnodes": 2, "controller": "127.0.0.1:1", "health": "none"})

    async def main() -> None:
        with closing(RunDir(tmp_path / "run")) as run_dir:
            agent = Agent(config, ["train.py"], run_dir, Identity.of(config, "127.0.0.1"), ACCESS)
            agent.connect(lambda _: None, lambda _: None)
            agent.handle(pb.Command(rank=0, generation=2, regroup=pb.Regroup(members=[0, 2])))
            assert list(agent.register().members) == [0, 2]
            agent.fence()
            assert not agent.register().members
            await agent.shutdown(None)

    asyncio.run(main())

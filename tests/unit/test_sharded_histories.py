"""Random histories of elastic jobs whose state is sharded, on nodes of one rank each: nodes and ranks die, the
controller dies in the middle of anything, nodes come. The controller's machine is the real one; workers are models that
know which part of which sharding they have, and whose.

What must hold: no one is asked to get, or to reshard, what is not there; no one goes on in another sharding than the
others; and the job is not lost while those that have taken steps have everything, live or in copies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from flashrecovery.agent.monitoring.reply_batching import singly
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.outbox import Publish, Send
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

Members = tuple[int, ...]


def needs(rank: int, part: str) -> list[pb.ShardNeed]:
    others = [pb.ShardNeed(name="common", nbytes=1), pb.ShardNeed(name=f"capsule@{rank}", nbytes=1)]
    return [pb.ShardNeed(name=part, nbytes=8, sharded=True), *others]


def part_of(rank: int, layout: Members) -> str:
    return f"part/{layout.index(rank)}of{len(layout)}"


def copies_among(members: Members, rank: int) -> dict[int, str]:
    """Of which ranks this one keeps copies, and of what."""
    if len(members) == 1:
        return {}
    owner = members[ring_of(members, 1, 1).index(members.index(rank))]
    return {owner: part_of(owner, members)}


@dataclass(eq=False)
class Worker:
    """One process of a rank. ``live``: the version of its part, -1: it has no content yet; ``ready``: the members and
    the version of what it has made ready."""

    rank: int
    pid: int
    layout: Members
    live: int
    fresh: bool
    joining: bool
    generation: int
    joined: pb.Joined
    members: Members = ()
    copies: dict[int, str] = field(default_factory=dict)
    copied: int = -1
    ready: tuple[Members, int] | None = None
    next_needs: list[pb.ShardNeed] = field(default_factory=list)
    pending: tuple[pb.Restore, pb.Reply] | None = None
    pause_at: int = -1
    paused: bool = False
    resumed: bool = False
    stepping: bool = False

    def has(self, shard: str, version: int) -> bool:
        own = [f"capsule@{self.rank}", "common", *([part_of(self.rank, self.layout)] if self.layout else [])]
        kept = [*self.copies.values(), *(f"capsule@{owner}" for owner in self.copies)]
        return (self.live == version and shard in own) or (self.copied == version and shard in kept)

    def say_needs(self, found: list[pb.ShardNeed]) -> None:
        del self.joined.needs[:]
        self.joined.needs.extend(found)

    def settle(self, members: Members) -> None:
        if self.ready is not None and self.ready[0] == members:
            self.layout, self.live = self.ready
            self.copies, self.copied = copies_among(members, self.rank), self.live
        self.ready = None


@dataclass
class Node:
    """One agent."""

    name: str
    incarnation: str
    spare: bool
    workers: dict[int, Worker] = field(default_factory=dict)
    members: Members = ()
    generation: int = 0
    stride: int = 0


class Job:
    """A job, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size, spares = self.random.choice((3, 4, 5)), self.random.choice((0, 0, 1, 2))
        elastic = {"min": 1, "max": self.size, "grow": self.random.choice(("auto", "never"))}
        self.config = RunConfig.model_validate(
            {"nproc_per_node": 1, "nnodes": self.size, "controller": "h:1", "elastic": elastic}
        )
        self.machine = Machine(self.config)
        self.now, self.pid, self.joins, self.version, self.saved = 0.0, 100, 0, 0, True
        self.inbox: list[tuple[str | None, pb.Command]] = []
        self.nodes: dict[str, Node] = {}
        self.names = [f"n{number}" for number in range(self.size + spares)]
        for number, name in enumerate(self.names):
            self.join(name, spare=number >= self.size)

    # -- agents -----------------------------------------------------------------------------------

    def join(self, name: str, *, spare: bool = False) -> None:
        self.joins += 1
        self.nodes[name] = Node(name, f"{name}.{self.joins}", spare)
        self.register(self.nodes[name])

    def register(self, node: Node) -> None:
        message = pb.Register(
            node=node.name,
            host=node.name,
            slots=1,
            node_rank=-1,
            peer_port=1,
            incarnation=node.incarnation,
            generation=node.generation,
            stride=node.stride,
            spare=node.spare,
            members=node.members,
        )
        for worker in node.workers.values():
            if worker.joining:
                message.joining.append(worker.rank)
                continue
            message.workers.add(
                rank=worker.rank,
                pid=worker.pid,
                resumed=worker.resumed,
                stepping=worker.stepping and worker.generation == node.generation,
                committed=worker.live,
                joined=worker.joined,
            )
        self.machine.on_register(message, self.now)
        self.collect()

    def collect(self) -> None:
        for action in self.machine.job.take_actions():
            if isinstance(action, Publish):
                for node in self.nodes.values():
                    node.stride = action.table.stride
            elif isinstance(action, Send):
                commands = singly(action.command) if action.command.ranks else [action.command]
                self.inbox += [(action.node, command) for command in commands]

    def workers(self) -> list[Worker]:
        return [worker for node in self.nodes.values() for worker in node.workers.values()]

    def member(self, rank: int) -> Worker | None:
        found = [worker for worker in self.workers() if worker.rank == rank and not worker.joining]
        return max(found, key=lambda worker: worker.pid, default=None)

    # -- commands ---------------------------------------------------------------------------------

    def deliver(self) -> None:
        """One command; those of one rank in their order."""
        rank = self.random.choice(self.inbox)[1].rank
        name, command = self.inbox.pop(next(i for i, (_, other) in enumerate(self.inbox) if other.rank == rank))
        node = self.nodes.get(name or "")
        if node is None:
            return
        node.generation = max(node.generation, command.generation)
        body = command.WhichOneof("body")
        if body == "fence":
            self.joins += 1
            node.workers, node.incarnation, node.members = {}, f"{node.name}.{self.joins}", ()
            self.register(node)
        elif body == "replace":
            self.fill(node, command)
        elif body == "leave":
            node.workers.pop(rank, None)
        elif rank in node.workers and command.generation >= node.workers[rank].generation:
            self.carry_out(node, node.workers[rank], command, body or "")

    def fill(self, node: Node, command: pb.Command) -> None:
        self.pid += 1
        rank, replace, launch = command.rank, command.replace, tuple(range(self.size))
        joined = pb.Joined(rank=rank, generation=command.generation, steps=10**6, batches="global")
        joined.needs.extend(needs(rank, part_of(rank, launch)))
        live, joining = -1 if replace.detached else 0, replace.joining > 0
        node.workers[rank] = Worker(
            rank, self.pid, launch, live, replace.detached, joining, command.generation, joined, launch
        )
        started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=self.pid, joining=replace.joining)
        self.machine.on_started(started, node.name, node.name)
        self.machine.on_joined(joined, self.now, node.name)
        self.collect()

    def carry_out(self, node: Node, worker: Worker, command: pb.Command, body: str) -> None:
        if body == "pause":
            worker.pause_at, worker.paused = command.pause.step, False
        if body not in ("hold", "stop", "regroup", "restore", "resume"):
            return
        worker.generation, worker.pending, worker.paused = command.generation, None, False
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank)
        if body == "hold":
            reply.position.CopyFrom(pb.Position(settled=worker.stepping, version=max(worker.live, 0)))
        elif body == "stop":
            self.stop(worker, command.stop, reply)
        elif body == "regroup":
            node.members = worker.members = tuple(command.regroup.members)
            worker.joining, layout = False, tuple(command.regroup.layout)
            if worker.fresh and worker.layout != layout:
                worker.layout = layout if worker.rank in layout else ()
                worker.live, worker.copied, worker.ready = -1, -1, None
        elif body == "restore" and not self.restore(worker, command.restore, reply):
            return
        elif body == "resume":
            if worker.ready is not None:
                worker.settle(worker.ready[0])
            assert worker.layout == worker.members, f"{worker.rank}: {worker.layout} of {worker.members}"
            worker.resumed, worker.stepping, worker.fresh = True, True, False
            pause = command.resume.pause
            worker.pause_at = pause.step if command.resume.HasField("pause") else -1
            if worker.next_needs:
                worker.say_needs(worker.next_needs)
            worker.next_needs = []
        self.machine.on_reply(reply, self.now)
        self.collect()

    def stop(self, worker: Worker, stop: pb.Stop, reply: pb.Reply) -> None:
        worker.stepping, worker.next_needs = False, []
        if not stop.unsure:
            worker.settle(tuple(stop.layout))
        elif worker.layout:
            reply.layout.extend(worker.layout)
            reply.ready.extend(worker.ready[0] if worker.ready is not None else ())
        reply.live_version = worker.live
        for owner, part in worker.copies.items() if worker.copied >= 0 else ():
            reply.held.add(kind="copy", version=worker.copied, shards=[part, f"capsule@{owner}"], nbytes=[8, 1])
        layout = worker.layout or tuple(range(self.size))
        reply.needs.extend(needs(worker.rank, part_of(worker.rank, layout)))
        worker.say_needs(list(reply.needs))

    def restore(self, worker: Worker, restore: pb.Restore, reply: pb.Reply) -> bool:
        """Whether it is done now: not if a rank has died meanwhile, or the others have to come to it, too."""
        coming = {item.shard: item for item in restore.transfers if item.dest == worker.rank}
        for shard, item in coming.items():
            source = self.member(item.source)
            if source is None or source.live < 0:
                return False
            assert item.kind == "lent" or source.has(shard, restore.version), f"{item} from {source}"
            reply.received_digests[shard] = "same"
        reply.sent_digests.update({item.shard: "same" for item in restore.transfers if item.source == worker.rank})
        if worker.layout and worker.live != restore.version:
            part = part_of(worker.rank, worker.layout)
            assert part in coming or part in restore.local, f"{worker} gets no {part} at {restore.version}"
        worker.live, worker.ready = restore.version, None
        if not restore.HasField("reshape"):
            return True
        worker.pending = (restore, reply)
        after = tuple(restore.reshape.after)
        everybody = [self.member(rank) for rank in after]
        there = [w for w in everybody if w is not None and w.pending and w.generation == worker.generation]
        if len(there) == len(after):
            self.divide(there, tuple(restore.reshape.before), after, restore)
        return False

    def divide(self, everybody: list[Worker], before: Members, after: Members, restore: pb.Restore) -> None:
        by_rank, serving = {w.rank: w for w in everybody}, {c.owner: c for c in restore.reshape.custody}
        for owner in before:
            if owner in by_rank:
                have = by_rank[owner]
                assert have.layout == before and have.live == restore.version, f"{before} to {after}: {have}"
            else:
                item = serving[owner]
                assert item.shard == part_of(owner, before) and by_rank[item.holder].has(item.shard, restore.version)
        for worker in everybody:
            assert worker.pending is not None
            (_, reply), worker.pending = worker.pending, None
            worker.ready = (after, restore.version)
            worker.next_needs = needs(worker.rank, part_of(worker.rank, after))
            reply.next_needs.extend(worker.next_needs)
            self.machine.on_reply(reply, self.now)
        self.collect()

    # -- time -------------------------------------------------------------------------------------

    def train(self) -> bool:
        """All members commit a step, and have copies made of it."""
        job = self.machine.job
        members = [worker for rank in job.ranks if (worker := self.member(rank)) is not None]
        if job.state is not State.RUNNING or len(members) < len(job.ranks) or not all(w.stepping for w in members):
            return False
        assert {w.layout for w in members} == {tuple(job.ranks)} and len({w.live for w in members}) == 1
        pausing = [w for w in members if 0 <= w.pause_at <= w.live]
        for worker in pausing:
            if not worker.paused:
                worker.paused = True
                paused = pb.Paused(rank=worker.rank, generation=worker.generation, version=worker.live)
                self.machine.on_paused(paused, self.now)
                return True
        if pausing:
            return False
        self.version = members[0].live + 1
        for worker in members:
            worker.live = worker.copied = self.version
            worker.copies = copies_among(worker.layout, worker.rank)
        ranks = [pb.RankHealth(rank=w.rank, pid=w.pid, committed=w.live, step_s=0.1) for w in members]
        self.machine.on_heartbeat(pb.Heartbeat(generation=job.generation, ranks=ranks), self.now)
        return True

    def all_there(self) -> bool:
        """Whether those that have taken steps have all of one sharding, live or in copies."""
        told = [worker for worker in self.workers() if worker.resumed and not worker.joining]

        def there(rank: int, layout: Members, version: int) -> bool:
            kept = any(w.copied == version and w.copies.get(rank) == part_of(rank, layout) for w in told)
            return kept or any(w.rank == rank and (w.layout, w.live) == (layout, version) for w in told)

        said = {(worker.layout, worker.live) for worker in told if worker.layout}
        ready = {worker.ready for worker in told if worker.layout}
        new = ready.pop() if len(ready) == 1 else None
        if new is not None and all(
            any(w.rank == rank or copies_among(new[0], w.rank).get(rank) for w in told if w.rank in new[0])
            for rank in new[0]
        ):
            return True
        return any(all(there(rank, layout, version) for rank in layout) for layout, version in said)

    def fault(self) -> None:
        kinds = ("node", "node", "rank", "controller", "controller's node", "node comes", "node comes", "size")
        kind = self.random.choice(kinds)
        holding = [node for node in self.nodes.values() if node.workers]
        if "node" in kind and kind != "node comes" and len(holding) > 1:
            lost = self.random.choice(holding).name
            del self.nodes[lost]
            if kind == "node":
                self.machine.on_node_lost(lost, "gone", 0.1, self.now)
        if "controller" in kind:
            self.machine, self.inbox = Machine(self.config), []
            if self.random.random() < 0.5:
                self.machine.takeover.inherit(self.now)
            for node in self.random.sample(list(self.nodes.values()), len(self.nodes)):
                self.register(node)
            if not self.machine.job.launched:
                self.now += self.config.timeouts.takeover_s + 1  # not all ranks have been found
        if kind == "rank":
            node = self.random.choice(holding)
            worker = node.workers.pop(self.random.choice(list(node.workers)))
            died = pb.Failure(rank=worker.rank, pid=worker.pid, kind="killed", failed_at=self.now, signal=9)
            self.machine.on_failure(died, self.now, node.name)
        if kind == "size":  # a smaller one would have ranks leave, with the copies that they keep for others
            self.machine.resize(self.size, -1, self.now)
        gone = [name for name in self.names if name not in self.nodes]
        if kind == "node comes" and gone:
            self.join(self.random.choice(gone))
        self.saved = self.saved and self.all_there()

    def run(self) -> str:
        """Until a while after the last fault: why the job has failed, "" if it has not."""
        faults, quiet = self.random.choice((1, 2, 3, 4, 5)), 0
        for _ in range(6000):
            job = self.machine.job
            if job.state is State.FAILED:
                return job.failure_reason
            self.now += 0.01
            if self.inbox and self.random.random() < 0.9:
                self.deliver()
            elif not self.inbox and not self.train():
                self.now += 0.3
            self.machine.on_tick(self.now)
            self.collect()
            if self.version > 2 and faults and self.random.random() < 0.03:
                faults -= 1
                self.fault()
                self.collect()
            calm = not faults and self.machine.job.state is State.RUNNING and self.machine.job.recovery is None
            quiet = quiet + 1 if calm and not self.inbox else 0
            if quiet > 10:
                return ""
        raise AssertionError(f"the job stands still, {self.machine.job.state}")


FOUND = (363,)
"""Histories in which jobs were lost: the old sharding was not whole any more, and all were ready for the new one."""


@pytest.mark.parametrize("seed", FOUND)
def test_jobs_that_were_lost(seed: int) -> None:
    job = Job(seed)
    why = job.run()
    assert not why or not job.saved, why


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_job_is_not_lost_while_its_state_is_there(first: int) -> None:
    ended = 0
    for seed in range(first, first + 20):
        job = Job(seed)
        why = job.run()
        ended += bool(why)
        assert not why or not job.saved, f"seed {seed}: {why}"
    assert ended < 12, "most go on"

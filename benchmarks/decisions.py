"""What a recovery costs the controller itself: all of its decisions, with its messages packed and unpacked.

The real machine, batches, rank table and protocol buffers, in one process and without a network: processor time, which
neither simulated agents nor anything else on the machine adds to. :mod:`scale` has the same with gRPC and agents.

    python decisions.py [--quick] [DEVICES,DEVICES,...]
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import harness
from flashrecovery.agent.monitoring.reply_batching import alike, singly
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.batches import Batches
from flashrecovery.controller.state.outbox import Publish, Send
from flashrecovery.controller.state.rank_table import Parts, RankTable, affected, row
from flashrecovery.proto import flashrecovery_pb2 as pb
from simulated_agents import SimulatedRank

PER_NODE = 8
HOST = "127.0.0.1"
ROUNDS = ("hold", "stop", "regroup", "restore", "resume")

Result = TypeVar("Result")


class Job:
    """A running job of ``devices`` ranks, and what the controller has used so far, by what for."""

    def __init__(self, devices: int) -> None:
        self.devices, self.nodes = devices, max(devices // PER_NODE, 1)
        settings = {"nproc_per_node": PER_NODE, "nnodes": self.nodes, "controller": f"{HOST}:1"}
        self.machine = Machine(RunConfig.model_validate(settings))
        self.used: dict[str, float] = {}
        self.ranks: dict[int, SimulatedRank] = {}
        self.table: Parts | None = None
        self.now = 1.0
        for node in range(self.nodes):
            name = f"node{node:05d}"
            register = pb.Register(
                node=name, host=HOST, node_rank=node, slots=PER_NODE, incarnation=name, peer_port=1, store_port=1
            )
            self.machine.on_register(register, self.now)
        self.turn("launch")
        self.turn("launch")
        self.used.clear()
        gc.set_threshold(200_000)  # as the controller does when the job runs
        gc.collect()
        gc.freeze()

    def timed(self, what: str, call: Callable[[], Result]) -> Result:
        began = time.process_time()
        result = call()
        self.used[what] = self.used.get(what, 0.0) + time.process_time() - began
        return result

    def lose(self, rank: int) -> None:
        failure = pb.Failure(
            rank=rank, pid=self.ranks[rank].pid, kind="killed", evidence="simulated", failed_at=self.now
        )
        self.timed("decide", lambda: self.machine.on_failure(failure, self.now))

    def turn(self, what: str) -> None:
        """What the machine wants goes out, every agent answers, the answers come in."""
        self.timed(f"{what} out", self.machine.check_before_acting)
        actions = self.machine.job.take_actions()
        sent = self.timed(f"{what} out", lambda: self._pack(a for a in actions if isinstance(a, Send)))
        for action in actions:
            if isinstance(action, Publish):
                self.timed("table", lambda table=action.table: self._publish(table))  # type: ignore[misc]
        answers = [a for node, command in sent for a in self._answers(node, command)]
        self.timed(f"{what} in", lambda: self._take(answers))

    def _pack(self, sends: Iterable[Send]) -> list[tuple[str, bytes]]:
        batches = Batches()
        for send in sends:
            batches.add(send.node or "", send.command)
        return [(node, command.SerializeToString()) for node, command in batches.take(self.nodes)]

    def _publish(self, table: RankTable) -> None:
        old, self.table = self.table, Parts(table)
        for node in affected(old, self.table) if old is not None else ():
            self.table.part_for(node)
        json.dumps([row(entry) for entry in table.entries])

    def _answers(self, node: str, packed: bytes) -> list[tuple[str, bytes]]:
        """Each with its node."""
        command = pb.Command.FromString(packed)
        commands = command.batch.commands if command.HasField("batch") else [command]
        messages, replies = [], []
        for one in (single for c in commands for single in (singly(c) if c.ranks else [c])):
            if one.HasField("replace"):
                messages += self._replace(one)
            else:
                replies.append(self._reply(one))
        if replies:
            messages.append(pb.AgentMessage(replies=pb.Replies(replies=alike(replies))))
        return [(node, message.SerializeToString()) for message in messages]

    def _replace(self, command: pb.Command) -> list[pb.AgentMessage]:
        rank = self.ranks[command.rank] = SimulatedRank(command.rank, self.devices)
        rank.pid, rank.version = 1 + command.rank + 100_000 * command.generation, 0
        started = pb.WorkerStarted(rank=rank.rank, generation=command.generation, pid=rank.pid)
        joined = pb.Joined(rank=rank.rank, generation=command.generation, needs=rank.needs(), steps=1 << 40)
        return [pb.AgentMessage(started=started), pb.AgentMessage(joined=joined)]

    def _reply(self, command: pb.Command) -> pb.Reply:
        rank = self.ranks[command.rank]
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank.rank)
        body = command.WhichOneof("body")
        if body == "hold":
            reply.position.CopyFrom(pb.Position(settled=True, version=rank.version))
        elif body == "stop":
            reply.live_version = rank.version
            reply.held.extend(rank.held())
            reply.needs.extend(rank.news(command))
        elif body == "restore":
            for item in command.restore.transfers:
                sums = reply.sent_digests if item.source == rank.rank else reply.received_digests
                sums[item.shard] = "0"
        return reply

    def _take(self, answers: Iterable[tuple[str, bytes]]) -> None:
        for node, packed in answers:
            message = pb.AgentMessage.FromString(packed)
            if message.HasField("started"):
                self.machine.on_started(message.started, node, HOST)
            elif message.HasField("joined"):
                self.machine.on_joined(message.joined, self.now)
            else:
                for reply in message.replies.replies:
                    self.machine.on_reply(reply, self.now)


def recovery(devices: int) -> dict[str, float]:
    """Processor time of one recovery, by round."""
    job = Job(devices)
    job.lose(devices // 2)
    for what in ROUNDS:
        job.turn(what)
    if job.machine.job.outbox.pending or job.machine.job.generation != 1:
        raise RuntimeError(f"the recovery of {devices} devices did not come to its end: {job.machine.job.state}")
    return job.used


def main() -> None:
    sizes = harness.numbers(__doc__, "devices", "32,256,1000,4000,8000,18000", quick="32,256,1000")
    harness.begin()
    found = []
    for devices in sizes:
        used = recovery(devices)
        first = used["decide"] + used["hold out"]
        by_round = [used[f"{what} out"] + used[f"{what} in"] for what in ROUNDS]
        found.append(
            (
                f"{devices:,}",
                f"{first:.3f}",
                *(f"{s:.3f}" for s in by_round),
                f"{used.get('table', 0.0):.3f}",
                f"{sum(used.values()):.2f}",
            )
        )
    harness.table(
        "The controller's own processor time in a recovery, seconds, without the network",
        ("devices", "until the last hold is ready", *ROUNDS, "rank table", "all"),
        found,
    )


if __name__ == "__main__":
    main()

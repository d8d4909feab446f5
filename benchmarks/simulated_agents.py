"""Thousands of agents without workers, for :mod:`scale`: they speak the real protocol and answer at once.

    python simulated_agents.py ADDRESS FIRST LAST RANKS_PER_NODE DEVICES

Each agent has a session with the controller, straight or, when it is told so, in the stream of another agent of this
process (the protocol of a real relay, without a task for each agent); heartbeats, which keep the real pace; and ranks
that report, hold, stop, regroup, restore and resume as soon as they are told. The agents of one process are a failure
domain. On standard input ``count`` asks for the number of heartbeats sent so far, ``kill RANK`` lets a rank die,
``silence NODE`` a whole node without a word, and ``report`` has lines ``NAME MONOTONIC_SECONDS`` written for what the
benchmark wants to know.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable

import grpc

from flashrecovery.agent.controller_link import backoff
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.runtime.link import Link
from simulated_beats import Beating, Beats

STEP_S = 1.0
AGAIN_S = 0.5
CONNECT_S = 0.01
"""From one agent of a process to the next."""
IMPORTS_S = 0.5e-3
"""Ranks come to their first step within this time, times the number of ranks: none does so at once."""
SHARD_BYTES = 1 << 30
GATHER_S = 1e-3
"""As a real relay."""
_ACCESS = Access()  # the controller listens on loopback, and has no token
_CONNECT_S = 60.0


beats = Beats()
here: dict[str, SimulatedAgent] = {}
"""The agents of this process, by name."""
silenced: set[str] = set()
"""Nodes of which nothing is heard any more, of whatever process."""
latest: dict[str, float] = {}
"""When any agent of this process last got a command of each kind."""


def say(what: str, when: float | None = None) -> None:
    print(what, f"{time.monotonic() if when is None else when:.6f}", flush=True)


class SimulatedRank:
    """A rank whose shards have one replica each, half the world away, and whose rank-local state its neighbour
    keeps."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.pid = 0
        self.generation = 0
        self.version = -1
        self.running = False
        self.resumed_at = 0.0

        self._told = 0

    def news(self, command: pb.Command) -> list[pb.ShardNeed]:
        """The needs in the answer to a stop: none if they are known, for they do not change here."""
        told, self._told = self._told, command.generation
        return [] if told and told == command.stop.needs_known else self.needs()

    def needs(self) -> list[pb.ShardNeed]:
        shard = self.rank % max(self.world // 2, 1)
        return [
            pb.ShardNeed(name=f"model/{shard}", nbytes=SHARD_BYTES),
            pb.ShardNeed(name="common", nbytes=1000),
            pb.ShardNeed(name=f"capsule@{self.rank}", nbytes=1000),
        ]

    def held(self) -> list[pb.Held]:
        kept = (self.rank - 8) % self.world
        local_state = f"capsule@{kept}"
        return [pb.Held(kind="copy", version=self.version, shards=[local_state], nbytes=[1000])]

    def committed(self) -> int:
        return self.version + int((time.monotonic() - self.resumed_at) / STEP_S) if self.running else self.version


class SimulatedAgent:
    """One node. What a real one does for each rank is done once for all of them, where it is the same."""

    def __init__(self, node: int, first: int, ranks: int, world: int, address: str) -> None:
        self.name = f"node{node:05d}"
        self.node, self.first = node, first
        self.slots = ranks
        self.world = world
        self.address = address
        self.link: Link[pb.AgentMessage, pb.Command] = Link()
        self.beating = Beating(self.link, self.look, self.beat_on_stream)
        self.trunk: Trunk | None = None
        self.ranks: dict[int, SimulatedRank] = {}
        self.generation = 0
        self.on_stream = 0
        self.through: SimulatedAgent | None = None
        self.silent = False

    async def run(self) -> None:
        """As a real one does: if the connection breaks, or the controller was too busy to take it, again."""
        await asyncio.sleep(CONNECT_S * (self.node - self.first))
        while not self.silent:
            through, self.through = self.through, None
            try:
                await (self.converse(through) if through is not None else self.converse_straight())
            except grpc.aio.AioRpcError as e:
                print(f"# {self.name}: {e.code().name}: {e.details()}", flush=True)
            if self.through is None:
                await asyncio.sleep(AGAIN_S if through is None else backoff.AGAIN_S)

    async def converse_straight(self) -> None:
        async with _ACCESS.dial(self.address, CONTROLLER, _CONNECT_S) as channel:
            call = rpc.ControllerStub(channel).Session(self.messages())
            async for command in call:
                self.hear(command)
                if self.through is not None:
                    call.cancel()
                    return

    async def converse(self, through: SimulatedAgent) -> None:
        if through.trunk is None or through.trunk.over.is_set():
            through.trunk = Trunk(through.name, self.address)
        through.trunk.carry(self)
        await through.trunk.over.wait()

    def hear(self, command: pb.Command) -> None:
        if self.silent:
            return
        self.beating.heard_at = time.monotonic()
        if self.link.accept(command):
            self.handle(command)

    def register(self) -> pb.AgentMessage:
        register = pb.Register(
            node=self.name,
            host="127.0.0.1",
            node_rank=self.node,
            slots=self.slots,
            incarnation=self.name,
            peer_port=1,
            domain=f"process{self.first}",
        )
        return pb.AgentMessage(register=register)

    async def messages(self) -> AsyncIterator[pb.AgentMessage]:
        yield self.register()
        async for message in self.link.outgoing():
            yield message

    def look(self) -> pb.Heartbeat:
        health = [
            pb.RankHealth(rank=r.rank, pid=r.pid, tag=r.committed(), committed=r.committed(), step_s=STEP_S)
            for r in self.ranks.values()
        ]
        return pb.Heartbeat(generation=self.generation, ranks=health)

    def beat_on_stream(self, heartbeat: pb.Heartbeat) -> None:
        self.link.send_now_or_never(pb.AgentMessage(heartbeat=heartbeat))
        self.on_stream += 1

    def send(self, **body: object) -> None:
        if not self.silent:
            self.link.send(pb.AgentMessage(age_base=time.monotonic(), **body))  # type: ignore[arg-type]

    def handle(self, command: pb.Command) -> None:
        self.generation = max(self.generation, command.generation)
        self.beating.changed()
        body = command.WhichOneof("body")
        if body == "batch":
            replies = [reply for one in command.batch.commands for reply in self.carry_out(one)]
        else:
            replies = list(self.carry_out(command))
        if len(replies) == 1:
            self.send(reply=replies[0])
        elif replies:
            self.send(replies=pb.Replies(replies=replies))

    def carry_out(self, command: pb.Command) -> Iterable[pb.Reply]:
        """One command; what its ranks answer."""
        body = command.WhichOneof("body")
        if body == "heartbeat":
            if command.heartbeat.port:
                beats.invited(self.beating, "127.0.0.1", command.heartbeat)
        elif body == "go_through":
            self.through = here.get(command.go_through.node)
        elif body == "replace":
            self.replace(command)
        elif body == "probe":
            seen = command.probe.node not in silenced
            self.send(probed=pb.Probed(node=command.probe.node, reachable=seen, evidence="" if seen else "simulated"))
        elif body in ("hold", "stop", "regroup", "restore", "resume"):
            latest[body] = time.monotonic()
            return self.replies(command, body)
        elif body == "shutdown":
            sys.exit(0)
        return ()

    def replace(self, command: pb.Command) -> None:
        rank = self.ranks[command.rank] = SimulatedRank(command.rank, self.world)
        rank.pid, rank.generation = 1000 + command.rank + 100_000 * command.generation, command.generation
        started = pb.WorkerStarted(rank=rank.rank, generation=command.generation, pid=rank.pid)
        self.send(started=started)
        if not command.replace.detached:
            rank.version = 0
        joined = pb.Joined(rank=rank.rank, generation=command.generation, needs=rank.needs(), steps=1 << 40)
        delay_s = 0.0 if command.replace.detached else IMPORTS_S * self.world * random.random()
        asyncio.get_running_loop().call_later(delay_s, lambda: self.send(joined=joined))

    def replies(self, command: pb.Command, body: str) -> list[pb.Reply]:
        """Of all ranks that the command is for: one for all where they say the same."""
        said: list[pb.Reply] = []
        for number in command.ranks or (command.rank,):
            rank = self.ranks[number]
            version = self.obey(rank, command, body)
            same = body in ("hold", "regroup", "resume") or (body == "restore" and not command.restore.transfers)
            if same and said and said[0].position.version == version:
                said[0].also.append(number)
                continue
            if body == "stop" and said and said[0].live_version == version:
                said[0].also.append(number)
                said[0].own.add(rank=number, held=rank.held(), needs=rank.news(command))
                continue
            reply = pb.Reply(serial=command.serial, generation=command.generation, rank=number)
            if body in ("hold", "stop"):
                reply.position.CopyFrom(pb.Position(settled=True, version=version))
            if body == "stop":
                reply.live_version = version
                reply.own.add(rank=number, held=rank.held(), needs=rank.news(command))
            for item in command.restore.transfers if body == "restore" else ():
                sums = reply.sent_digests if item.source == number else reply.received_digests
                sums[item.shard] = "0"
            said.append(reply)
        return said

    def obey(self, rank: SimulatedRank, command: pb.Command, body: str) -> int:
        """Returns the version at which the rank stands then, as far as its answer says it."""
        if body in ("hold", "stop"):
            rank.version, rank.running = rank.committed(), False
            if body == "stop":
                rank.version = max(rank.version, command.stop.finish_to)
            return rank.version
        if body == "restore":
            rank.version = command.restore.version
        elif body == "resume":
            rank.version, rank.running, rank.resumed_at = command.resume.version, True, time.monotonic()
        return 0

    def die(self, rank: SimulatedRank) -> None:
        rank.running = False
        now = time.monotonic()
        self.send(failure=pb.Failure(rank=rank.rank, pid=rank.pid, kind="killed", evidence="simulated", failed_at=now))


class Trunk:
    """One agent's stream for the others that it carries: a line for each."""

    def __init__(self, relay: str, address: str) -> None:
        self._lines: dict[int, SimulatedAgent] = {}
        self._frames: list[tuple[int, SimulatedAgent, pb.AgentMessage]] = []
        self._wake = asyncio.Event()
        self.over = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(relay, address))

    @property
    def lines(self) -> int:
        """How many agents it carries now."""
        return 0 if self.over.is_set() else len(self._lines)

    def carry(self, agent: SimulatedAgent) -> None:
        """A new line, until the stream ends."""
        line = len(self._lines) + 1
        self._lines[line] = agent
        self._put(line, agent, agent.register())
        agent.link.attach(lambda message: self._put(line, agent, message))

    def _put(self, line: int, agent: SimulatedAgent, message: pb.AgentMessage | None) -> None:
        if message is not None:
            self._frames.append((line, agent, message))
            self._wake.set()

    async def _run(self, relay: str, address: str) -> None:
        try:
            async with _ACCESS.dial(address, CONTROLLER, _CONNECT_S) as channel:
                async for downward in rpc.ControllerStub(channel).Trunk(self._upward(relay)):
                    for frame in downward.frames:
                        if not frame.ended:
                            self._lines[frame.line].hear(frame.command)
        except grpc.aio.AioRpcError as e:
            print(f"# the stream of {relay}: {e.code().name}: {e.details()}", flush=True)
        finally:
            self.over.set()

    async def _upward(self, relay: str) -> AsyncIterator[pb.Upward]:
        """What several agents say within a moment goes up as one message."""
        first = relay
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            frames, self._frames = self._frames, []
            upward = pb.Upward(relay=first)
            for line, agent, message in frames:
                upward.frames.add(line=line).message.CopyFrom(agent.link.stamp(message))
            yield upward
            first = ""


async def main() -> None:
    os.nice(3)  # the controller is what is measured
    gc.disable()  # for a minute
    address, first, last, per_node, world = sys.argv[1], *map(int, sys.argv[2:6])
    agents = [SimulatedAgent(node, first, per_node, world, address) for node in range(first, last)]
    here.update({a.name: a for a in agents})
    beats.agents = [a.beating for a in agents]
    beating = asyncio.ensure_future(beats.run())
    running = [asyncio.ensure_future(a.run()) for a in agents]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        if line[0] == "kill":
            for agent in agents:
                if int(line[1]) in agent.ranks:
                    say("failed")
                    agent.die(agent.ranks[int(line[1])])
        elif line[0] == "count":
            say("beats", beats.sent)
        elif line[0] == "silence":
            silenced.add(line[1])
            if line[1] in here:
                here[line[1]].silent = True
                beats.agents = [a.beating for a in agents if not a.silent]
                say("silenced")
        elif line[0] == "report":
            for name, when in latest.items():
                say(name, when)
            say("heartbeats-on-stream", sum(a.on_stream for a in agents))
            say("carried", sum(a.trunk.lines for a in agents if a.trunk is not None))
            say("reported")
        elif line[0] == "vanish":  # the whole process: all of its nodes fall silent
            say("vanished")
            beating.cancel()
            for task in running:
                task.cancel()
            return


if __name__ == "__main__":
    asyncio.run(main())

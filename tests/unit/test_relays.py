"""Which agent speaks to the controller through which; and a real controller with real sessions that go through relays,
on loopback: every message arrives once, and the loss of a relay costs no one anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import grpc
import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.session import ControllerSession
from flashrecovery.agent.peers.client import CONTROLLER_KEY
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.connections import AgentConnection
from flashrecovery.controller.service.relays import Relays
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.controller.state.nodes import NodeRecord, NodeState
from flashrecovery.events import EventLog, RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, agent_at
from flashrecovery.runtime.link import Link
from tests.support.peers import peer_service
from tests.unit.test_session_heartbeats import ACCESS, NoWorkers, no_lead, no_leave

DIRECT = 2
PATIENT = {"node_silence_s": 4.0, "node_probe_s": 3.0, "lease_s": 1.8}
"""One process is the controller and all agents here: a busy one answers late, and no one is to be lost for that."""


# -- who goes through whom ----------------------------------------------------------------------------


def nodes_of(domains: str) -> dict[str, NodeRecord]:
    """Nodes a, b, c, ... in these failure domains."""
    letters = "abcdefghijklmnop"
    registers = [pb.Register(node=letters[i], host="h", domain=d, incarnation="1") for i, d in enumerate(domains)]
    return {r.node: NodeRecord.of(r) for r in registers}


def connections(nodes: dict[str, NodeRecord], via: dict[str, str]) -> list[AgentConnection]:
    return [AgentConnection(name, Link(), via.get(name, "")) for name in nodes]


def test_nobody_goes_through_a_relay_as_long_as_there_are_few() -> None:
    nodes = nodes_of("xxyy")
    assert Relays(4).moves(connections(nodes, {}), nodes, 0.0) == []


def test_each_goes_through_a_relay_of_its_own_failure_domain() -> None:
    nodes = nodes_of("xxxyyyz")
    assert Relays(2).moves(connections(nodes, {}), nodes, 0.0) == [
        ("b", "a"), ("c", "a"), ("e", "d"), ("f", "d"), ("g", "a"),
    ]  # fmt: skip


def test_who_was_told_is_not_told_again_at_once_and_then_another_one() -> None:
    nodes, relays = nodes_of("xxxx"), Relays(2)
    assert relays.moves(connections(nodes, {}), nodes, 0.0) == [("c", "a"), ("d", "b")]
    old, new, other = (AgentConnection(n, Link(), via) for n, via in (("c", ""), ("c", "a"), ("a", "")))
    assert relays.is_moving(old, 1.0) and not relays.is_moving(old, 3.0)
    assert not relays.is_moving(new, 1.0) and not relays.is_moving(other, 1.0)
    assert relays.moves(connections(nodes, {}), nodes, 30.0) == []
    assert relays.moves(connections(nodes, {}), nodes, 90.0) == [("c", "b"), ("d", "a")]


def test_who_carries_others_stays_and_the_load_is_even() -> None:
    nodes = nodes_of("xxxxxx")
    via = {"a": "", "b": "f", "c": "f", "d": "", "e": ""}
    assert Relays(2).moves(connections(nodes, via), nodes, 0.0) == [("d", "a"), ("e", "a")]


def test_neither_the_controllers_node_nor_one_with_a_warning_carries_others() -> None:
    nodes = nodes_of("xxxxx")
    nodes["b"].suspect = "its disk is full"
    assert {relay for _, relay in Relays(3, "a").moves(connections(nodes, {}), nodes, 0.0)} == {"c"}
    assert Relays(1, "a").moves(connections(nodes, {}), nodes, 0.0) == []


def test_a_lost_node_is_not_told() -> None:
    nodes = nodes_of("xxx")
    nodes["c"].state = NodeState.LOST
    assert Relays(1).moves(connections(nodes, {}), nodes, 0.0) == [("b", "a")]


# -- real sessions ------------------------------------------------------------------------------------


class Node:
    """An agent without workers, with its session and what it does for others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.agent = NoWorkers(name)

    async def start(self, address: str, settings: RunConfig) -> None:
        agent = cast(Agent, self.agent)
        self.session = ControllerSession(address, ACCESS, agent, settings.timeouts, no_lead, no_leave)
        self.peers = peer_service(ACCESS, self.session)
        await self.peers.start("127.0.0.1")
        self.tasks = [asyncio.create_task(self.session.run(self.peers.port)), asyncio.create_task(self.agent.run())]

    async def stop(self) -> None:
        """Its process is gone: every connection ends."""
        if not self.agent.finished.done():
            self.agent.finished.set_result(None)
        self.tasks[1].cancel()
        await asyncio.wait(self.tasks)
        await self.peers.stop()

    def got(self) -> list[str]:
        """The faults of the commands that have come, in order."""
        return [c.fault.fault for c in self.agent.handled if c.HasField("fault")]


class Scene:
    def __init__(self, service: ControllerService, run_dir: RunDir, address: str) -> None:
        self.service, self.run_dir, self.address = service, run_dir, address
        self.nodes: dict[str, Node] = {}

    async def add(self, *names: str) -> None:
        for name in names:
            node = self.nodes[name] = Node(name)
            await node.start(self.address, self.service._config)
            await self.until(lambda: self.service._agents.is_connected(name))  # noqa: B023 - awaited here

    def via(self) -> dict[str, str]:
        return {c.node: c.via for c in self.service._agents.newest()}

    def relays(self) -> set[str]:
        return {relay for relay in self.via().values() if relay}

    def carried(self, count: int) -> bool:
        """All are connected, that many through others."""
        via = self.via()
        return len(via) == len(self.nodes) and sum(bool(relay) for relay in via.values()) == count

    async def until(self, condition: Callable[[], bool]) -> None:
        """An agent that could not move within a second, because all of this shares one busy process, is told again
        after 60 s."""
        deadline = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < deadline, (self.via(), self.kinds())
            await asyncio.sleep(0.02)

    def tell(self, node: str, word: str) -> None:
        self.service._agents.post(node, pb.Command(rank=0, fault=pb.Fault(fault=word)))

    def say(self, node: str, word: str) -> None:
        self.nodes[node].agent.send(pb.AgentMessage(notice=pb.Notice(kind="test", text=word)))

    def heard(self) -> list[str]:
        lines = (e for e in self.run_dir.events_path.read_text().splitlines() if '"kind":"test"' in e)
        return [line.split('"text":"')[1].split('"')[0] for line in lines]

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run_dir.events_path.read_text().splitlines()]

    def kinds(self) -> list[object]:
        return [event["event"] for event in self.events()]


def play(tmp_path: Path, act: Callable[[Scene], Awaitable[None]], **config: object) -> None:
    async def main() -> None:
        with closing(RunDir(tmp_path / "run")) as run_dir, closing(EventLog(run_dir.events_path)) as log:
            given = {
                "nnodes": 9,
                "controller": "127.0.0.1:1",
                "max_direct_agents": DIRECT,
                "timeouts": PATIENT,
                **config,
            }
            service = ControllerService(RunConfig.model_validate(given), ACCESS, log, run_dir)
            port = await service.start("127.0.0.1", 0)
            scene = Scene(service, run_dir, f"127.0.0.1:{port}")
            try:
                await act(scene)
            finally:
                for node in scene.nodes.values():
                    await node.stop()
                await service.stop()

    asyncio.run(main())


def test_agents_go_through_others_and_nothing_is_lost_or_comes_twice(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"abcdef")
        words = [str(i) for i in range(300)]
        for word in words:  # while they move
            for name in "abcdef":
                scene.tell(name, word)
                scene.say(name, name + word)
            await asyncio.sleep(0.002)
        await scene.until(lambda: scene.carried(4))
        await scene.until(lambda: all(len(scene.nodes[n].got()) >= len(words) for n in "abcdef"))
        assert all(scene.nodes[n].got() == words for n in "abcdef")
        await scene.until(lambda: len(scene.heard()) >= 6 * len(words))
        for name in "abcdef":
            assert [w for w in scene.heard() if w[0] == name] == [name + word for word in words]
        await scene.until(lambda: all(link.settled() for link in scene.service._agents.links.values()))
        assert "node_lost" not in scene.kinds() and not any(n.agent.halted for n in scene.nodes.values())

    play(tmp_path, act)


def test_large_messages_go_through_a_relay(tmp_path: Path) -> None:
    """What thousands of shards are called, say: more than the 4 MiB that gRPC takes by itself."""

    async def act(scene: Scene) -> None:
        await scene.add(*"abcd")
        await scene.until(lambda: scene.carried(2))
        carried = [n for n, relay in scene.via().items() if relay]
        for name in carried:
            scene.tell(name, name * (6 << 20))
            scene.say(name, name * (6 << 20))
        await scene.until(lambda: all(scene.nodes[n].got() == [n * (6 << 20)] for n in carried))
        await scene.until(lambda: sorted(scene.heard()) == [n * (6 << 20) for n in sorted(carried)])
        assert scene.carried(2)

    play(tmp_path, act)


def test_whom_a_lost_relay_has_carried_comes_straight_and_is_not_lost(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"abcdef")
        await scene.until(lambda: scene.carried(4))
        lost = min(scene.relays())
        children = [n for n, relay in scene.via().items() if relay == lost]
        await scene.nodes.pop(lost).stop()
        for name in children:
            scene.tell(name, "after")
        await scene.until(lambda: all(scene.nodes[n].got() == ["after"] for n in children))
        assert not {scene.via()[n] for n in children} & {lost}
        await scene.until(lambda: not scene.service.machine.job.nodes[lost].alive)
        assert scene.kinds().count("node_lost") == 1

    play(tmp_path, act)


def test_a_relay_that_swallows_everything_is_left_when_it_is_lost(tmp_path: Path) -> None:
    """As a host whose power is gone: no connection breaks, and nothing comes through."""

    async def act(scene: Scene) -> None:
        await scene.add(*"abcdef")
        await scene.until(lambda: scene.carried(4))
        dead = min(scene.relays())
        children = [n for n, relay in scene.via().items() if relay == dead]
        relay = scene.nodes[dead].session.relay
        assert relay._stream is not None
        relay._stream._lines = {}  # what comes down concerns no one, ...
        relay._stream.put = lambda frame: None  # type: ignore[method-assign]  # ... and nothing goes up
        liveness = scene.service._liveness
        heard, answered = liveness.heard, liveness.answered

        def unheard(node: str, now: float) -> None:
            if node != dead:
                heard(node, now)

        def unreached(observer: str, suspect: str, reachable: bool, evidence: str) -> None:
            answered(observer, suspect, reachable and suspect != dead, evidence)

        liveness.heard, liveness.answered = unheard, unreached  # type: ignore[method-assign]
        for name in children:
            scene.tell(name, "after")
        await scene.until(lambda: all(scene.nodes[n].got() == ["after"] for n in children))
        await scene.until(lambda: "node_lost" in scene.kinds())
        assert {e["node"] for e in scene.events() if e["event"] == "node_lost"} == {dead}

    play(tmp_path, act)


def test_with_a_new_connection_an_agent_is_straight_again(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"abc")
        await scene.until(lambda: scene.carried(1))
        (child,) = [n for n, relay in scene.via().items() if relay]
        scene.nodes[child].session.drop()
        await scene.until(lambda: scene.via().get(child) == "")
        scene.tell(child, "here")
        await scene.until(lambda: scene.nodes[child].got() == ["here"])
        assert "node_lost" not in scene.kinds()

    play(tmp_path, act)


def test_an_agent_that_ends_by_way_of_a_relay_is_lost(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"abc")
        await scene.until(lambda: scene.carried(1))
        (child,) = [n for n, relay in scene.via().items() if relay]
        await scene.nodes.pop(child).stop()
        await scene.until(lambda: not scene.service.machine.job.nodes[child].alive)
        await scene.until(lambda: "node_lost" in scene.kinds())
        # not by its silence alone: the end of its line says it
        assert "connection has broken" in scene.run_dir.events_path.read_text()

    play(tmp_path, act)


async def lose_line(scene: Scene) -> str:
    """The relay takes an agent that it carries for gone. Its name; it does not know it."""
    ((child, relay),) = [(n, relay) for n, relay in scene.via().items() if relay]
    stream = scene.nodes[relay].session.relay._stream
    assert stream is not None
    (line,) = stream._lines
    stream.end(line)
    while child in scene.via():
        await asyncio.sleep(0.001)
    return child


def test_an_agent_whose_relay_takes_it_for_gone_comes_straight_at_once(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"abc")
        await scene.until(lambda: scene.carried(1))
        child, began = await lose_line(scene), time.monotonic()
        await scene.until(lambda: scene.via().get(child) == "")
        assert time.monotonic() - began < 15, "it has not waited for the silence"
        assert "node_lost" not in scene.kinds() and not scene.nodes[child].agent.halted

    play(tmp_path, act, timeouts={"node_silence_s": 30.0})


def test_the_end_of_the_job_waits_for_who_is_just_connecting_again(tmp_path: Path) -> None:
    """It would wait for another controller for ten minutes."""

    async def act(scene: Scene) -> None:
        await scene.add(*"abc")
        await scene.until(lambda: scene.carried(1))
        child = await lose_line(scene)
        connect = scene.nodes[child].session._connect

        async def late() -> None:
            await asyncio.sleep(1.0)  # the others know by then
            await connect()

        scene.nodes[child].session._connect = late  # type: ignore[method-assign]
        scene.service.request_stop("enough")
        await scene.service.dismissed(5)
        assert any(c.HasField("shutdown") for c in scene.nodes[child].agent.handled)

    play(tmp_path, act)


def test_the_end_of_the_job_waits_for_whom_a_relay_has_not_told(tmp_path: Path) -> None:
    """The relay knows, and leaves."""

    async def act(scene: Scene) -> None:
        await scene.add(*"abc")
        await scene.until(lambda: scene.carried(1))
        ((child, relay),) = [(n, relay) for n, relay in scene.via().items() if relay]
        stream = scene.nodes[relay].session.relay._stream
        assert stream is not None
        stream._lines = {}  # what comes down is lost
        scene.service.request_stop("enough")
        await scene.until(lambda: any(c.HasField("shutdown") for c in scene.nodes[relay].agent.handled))
        dismissed = asyncio.create_task(scene.service.dismissed(5))
        await scene.nodes.pop(relay).stop()
        await dismissed
        assert any(c.HasField("shutdown") for c in scene.nodes[child].agent.handled)

    play(tmp_path, act)


def test_a_refusal_comes_through_a_relay(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add(*"ab")
        known = ((CONTROLLER_KEY, scene.service._incarnation),)
        peer = f"127.0.0.1:{scene.nodes['a'].peers.port}"
        async with ACCESS.dial(peer, agent_at(peer), 5.0) as channel:
            call = rpc.PeerStub(channel).Relay(metadata=known)
            register = pb.Register(node="c", host="127.0.0.1", incarnation="1", settings={"nnodes": "77"})
            await call.write(pb.AgentMessage(register=register))
            refused = (await call.read()).refused
        assert refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert "nnodes = 77" in refused.reason
        assert "c" not in scene.service.machine.job.nodes

    play(tmp_path, act)


def test_an_agent_that_follows_another_controller_carries_nobody(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add("a")
        peer = f"127.0.0.1:{scene.nodes['a'].peers.port}"
        async with ACCESS.dial(peer, agent_at(peer), 5.0) as channel:
            call = rpc.PeerStub(channel).Relay(metadata=((CONTROLLER_KEY, "another one"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    play(tmp_path, act)


def test_who_is_no_node_of_the_job_cannot_be_a_relay(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add("a")
        async with ACCESS.dial(scene.address, CONTROLLER, 5.0) as channel:
            call = rpc.ControllerStub(channel).Trunk()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.write(pb.Upward(relay="nobody"))
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    play(tmp_path, act)

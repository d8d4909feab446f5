"""A real controller and an agent's real session with it, on loopback: heartbeats move from the stream to datagrams and
back, and no node falls silent meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.session import ControllerSession
from flashrecovery.agent.peers.client import Asking
from flashrecovery.agent.peers.election import Election
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.events import EventLog, RunDir
from flashrecovery.plan.membership.leases import works_for_s
from flashrecovery.plan.membership.membership import NodeStatus
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.runtime.link import Link
from flashrecovery.util.clock import lease_clock

ACCESS = Access("the-token-of-this-test-job")
PERIOD_S = 0.25


class NoWorkers:
    """What a session needs of an agent; says that it lives, and does nothing."""

    generation = 0

    def __init__(self, node: str = "a") -> None:
        self.finished: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.commands: list[str] = []
        self.handled: list[pb.Command] = []
        self.halted = 0
        self.gone_on = 0
        self.lent_until = 0.0
        self.fenced = 0
        self.node = node
        self.settings: dict[str, str] = {}
        self._incarnation = "first"

    def connect(self, send: Callable[[pb.AgentMessage], None], beat: Callable[[pb.AgentMessage], None]) -> None:
        self.send, self.beat = send, beat

    def register(self, peer_port: int = 0) -> pb.Register:
        return pb.Register(
            node=self.node,
            host="127.0.0.1",
            slots=1,
            node_rank=-1,
            incarnation=self._incarnation,
            peer_port=peer_port,
            settings=self.settings,
        )

    def handle(self, command: pb.Command) -> None:
        self.commands.append(command.WhichOneof("body") or "")
        self.handled.append(command)

    def neighbours(self) -> list[str]:
        return []

    def incarnation(self) -> str:
        return self._incarnation

    def halt(self) -> None:
        self.halted += 1

    def controller_heard(self, heard: bool) -> None:
        pass

    def go_on(self) -> None:
        self.gone_on += 1

    def lend(self, until: float) -> None:
        self.lent_until = until

    def fence(self) -> None:
        self.fenced += 1
        self._incarnation = "second"

    async def run(self) -> None:
        while True:
            self.beat(pb.AgentMessage(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(PERIOD_S)


class Scene:
    def __init__(self, service: ControllerService, agent: NoWorkers, session: ControllerSession, address: str) -> None:
        self.service, self.agent, self.session, self.address = service, agent, session, address

    def by_datagram(self) -> bool:
        return self.service._heartbeats.gets_through("a", lease_clock())

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    async def oldest_heartbeat(self, seconds: float) -> float:
        """The longest silence of the agent in the next ``seconds``."""
        oldest, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            oldest = max(oldest, self.service._liveness.age("a", lease_clock()))
            await asyncio.sleep(0.02)
        return oldest


async def no_lead(election: Election, term: int) -> str:
    raise AssertionError("there are no electors")


async def no_leave() -> None:
    pass


def play(tmp_path: Path, act: Callable[[Scene], Awaitable[None]], **config: object) -> None:
    async def main() -> None:
        with closing(RunDir(tmp_path / "run")) as run_dir, closing(EventLog(run_dir.events_path)) as log:
            settings = RunConfig.model_validate({"nnodes": 2, "controller": "127.0.0.1:1", **config})
            service = ControllerService(settings, ACCESS, log, run_dir)
            port = await service.start("127.0.0.1", 0)
            agent = NoWorkers()
            address = f"127.0.0.1:{port}"
            session = ControllerSession(address, ACCESS, cast(Agent, agent), settings.timeouts, no_lead, no_leave)
            tasks = [asyncio.create_task(session.run()), asyncio.create_task(agent.run())]
            try:
                await act(Scene(service, agent, session, address))
            finally:
                agent.finished.set_result(None)
                tasks[1].cancel()
                await asyncio.wait(tasks)
                await service.stop()

    asyncio.run(main())


def test_heartbeats_move_to_datagrams_and_back(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        scene.agent.commands.clear()
        assert await scene.oldest_heartbeat(1.0) < 0.75
        assert "heartbeat" not in scene.agent.commands[1:]  # none on the stream but for the one that was on its way
        scene.service._heartbeats.close()  # the way for datagrams is closed
        scene.agent.commands.clear()
        assert await scene.oldest_heartbeat(1.5) < 0.75
        assert scene.agent.commands.count("heartbeat") >= 3
        assert not scene.by_datagram() and scene.service.machine.job.nodes["a"].alive and not scene.agent.halted

    play(tmp_path, act)


def test_messages_are_acknowledged_by_datagram(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        scene.agent.send(pb.AgentMessage(notice=pb.Notice(kind="test", text="heard")))
        scene.service._agents.links["a"].send(pb.Command(rank=-1, ping=pb.Ping()))
        await scene.until(lambda: scene.service._agents.links["a"].settled() and "ping" in scene.agent.commands)

    play(tmp_path, act)


def test_without_datagrams_all_is_as_ever(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.agent.commands.count("heartbeat") >= 4)
        assert not scene.by_datagram() and await scene.oldest_heartbeat(0.5) < 0.75

    play(tmp_path, act, datagrams=False)


def test_nothing_is_left_of_connections_that_end_in_a_row(tmp_path: Path) -> None:
    """Tasks and generators that no one ended would complain when they are collected."""
    complaints: list[str] = []

    async def act(scene: Scene) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(str(context)))
        for number in range(12):
            await scene.until(scene.by_datagram)
            if number % 3 == 0:
                scene.service._agents.end("a")
            elif number % 3 == 1:
                scene.session.drop()
            else:
                scene.session._link = Link()  # as for a new controller
                scene.session.drop()
            await scene.until(lambda: not scene.by_datagram())
            gc.collect()
        connected = [t for t in asyncio.all_tasks() if "_speak" in str(t.get_coro())]
        assert len(connected) <= 1

    play(tmp_path, act)
    gc.collect()
    assert not complaints, complaints


def test_a_newer_connection_of_the_same_agent_ends_the_one_before(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        ended: list[str] = []

        async def other(name: str) -> None:
            async with ACCESS.dial(scene.address, CONTROLLER, 5.0) as channel:
                call = rpc.ControllerStub(channel).Session()
                register = pb.Register(node="b", host="127.0.0.1", slots=1, node_rank=-1, incarnation="b")
                await call.write(pb.AgentMessage(register=register))
                async for _ in call:
                    ended.append(f"{name} is heard")
                ended.append(f"{name} ends")

        first = asyncio.create_task(other("first"))
        await scene.until(lambda: bool(ended))
        second = asyncio.create_task(other("second"))
        await asyncio.wait({first}, timeout=5)
        assert first.done() and "first ends" in ended and not second.done()
        second.cancel()
        await asyncio.wait({second})

    play(tmp_path, act)


def test_a_node_that_is_taken_for_lost_hears_of_it(tmp_path: Path) -> None:
    """Also where it hears the controller, but not the other way round: its stream is closed, and then it is fenced."""

    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        scene.service._liveness.disconnected("a")  # no node vouches for it, because there is no other node
        scene.service._heartbeats.forget("a")
        scene.agent.beat = lambda message: None
        await scene.until(lambda: scene.agent.fenced > 0)
        await scene.until(lambda: scene.service.machine.job.nodes["a"].incarnation == "second")

    play(tmp_path, act, timeouts={"node_wait_s": 0.5})


def test_answers_on_the_stream_count_from_the_sending_of_the_heartbeat(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.agent.commands.count("heartbeat") >= 2 or scene.session._fresh)
        link = scene.session._link
        await scene.until(lambda: link.echoed_at > 0.0 and scene.session._hearing.heard_at == link.echoed_at)
        sent = []
        stamp = link.stamp

        def stamped(message: pb.AgentMessage) -> pb.AgentMessage:
            sent.append(stamp(message).sent_at)
            return message

        link.stamp = stamped  # type: ignore[method-assign]
        await scene.until(lambda: len(sent) >= 3 and scene.session._hearing.heard_at in sent)
        limits = scene.session._limits
        await scene.until(lambda: scene.session._hearing.silent_s < 0.1)
        assert scene.agent.lent_until == scene.session._hearing.heard_at + works_for_s(limits.node_silence_s)
        link = scene.service._agents.links["a"]
        echoed_at = link.echoed_at
        await scene.until(lambda: link.echoed_at > echoed_at)
        assert lease_clock() - link.echoed_at < 1.0, "and the controller knows when it was heard"

    play(tmp_path, act, datagrams=False)


def test_an_answer_that_was_long_on_its_way_restores_nothing(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session, agent = scene.session, scene.agent
        now = lease_clock()
        agent.gone_on, session._lookout.node_status, session._hearing.heard_at = 0, NodeStatus.CUT_OFF, now - 9.0
        session._hearing.cut_off()
        agent.lent_until = 0.0
        session._heard_at_least_at(now - 1.0)
        assert agent.gone_on == 0 and session._lookout.node_status is NodeStatus.CUT_OFF and agent.lent_until < now
        session._heard_at_least_at(now - 0.1)
        assert agent.gone_on == 1 and session._lookout.node_status is NodeStatus.MEMBER  # type: ignore[comparison-overlap]

    play(tmp_path, act)


def test_a_controller_that_gathers_restores_nothing(tmp_path: Path) -> None:
    """It does not know yet whether the one before it has given the ranks of a node away that was cut off."""

    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session, agent = scene.session, scene.agent
        now = lease_clock()
        agent.gone_on, session._lookout.node_status, agent.lent_until = 0, NodeStatus.CUT_OFF, 0.0
        session._hearing.cut_off()
        session._gathering = True
        session._heard_at_least_at(now)
        assert agent.gone_on == 0 and session._lookout.node_status is NodeStatus.CUT_OFF and agent.lent_until == 0.0
        session._gathering = False
        session._heard_at_least_at(now)
        assert agent.gone_on == 1 and session._lookout.node_status is NodeStatus.MEMBER  # type: ignore[comparison-overlap]
        assert agent.lent_until > now

    play(tmp_path, act)


def test_another_controller_gathers_until_it_says_otherwise(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        assert not scene.session.gathering
        scene.session.follow(0, scene.address)
        assert scene.session.gathering
        await scene.until(lambda: not scene.session.gathering)

    play(tmp_path, act)


def test_before_a_controller_hears_of_a_node_its_workers_time_has_become_shorter(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session, register = scene.session, scene.service.machine.on_register
        left: list[float] = []

        def on_register(message: pb.Register, now: float) -> None:
            left.append(scene.agent.lent_until - lease_clock())
            register(message, now)

        session._hearing.excused_until = lease_clock() + 60.0
        session._lookout.lend()
        assert scene.agent.lent_until > lease_clock() + 50.0
        scene.service.machine.on_register = on_register  # type: ignore[method-assign, assignment]
        session.drop()
        await scene.until(lambda: bool(left))
        assert left[0] <= works_for_s(session._limits.node_silence_s)

    play(tmp_path, act)


def test_what_a_node_passes_on_for_another_one_is_answered_by_the_controller(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(scene.by_datagram)
        session, last = scene.session, scene.service._liveness._last_heard["a"]
        assert await session.vouch(Asking("a", "first"), 5.0) and last.voucher == "a"
        last.voucher = ""
        assert not await session.vouch(Asking("a", "another life"), 5.0) and not last.voucher
        assert not await session.vouch(Asking("stranger", "first"), 5.0)
        session._hearing.heard_at -= session._limits.lease_s
        assert not await session.vouch(Asking("a", "first"), 5.0), "it may be cut off itself"

    play(tmp_path, act)


def test_a_link_knows_up_to_when_it_has_been_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    here: Link[pb.AgentMessage, pb.Command] = Link()
    there: Link[pb.Command, pb.AgentMessage] = Link()
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: 100 * 10**9)
    first = here.stamp(pb.AgentMessage())
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: 101 * 10**9)
    second = here.stamp(pb.AgentMessage())
    there.accept(second)
    there.accept(first)  # comes late
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: 7 * 10**9)  # another machine's clock
    assert here.echoed_at == 0.0
    here.accept(there.stamp(pb.Command()))
    assert here.echoed_at == 101.0 and there.echoed_at == 0.0
    there.accept(here.stamp(pb.AgentMessage()))
    assert there.echoed_at == 7.0


def test_a_second_node_of_a_job_of_one_is_refused(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: scene.session.joined)
        async with ACCESS.dial(scene.address, CONTROLLER, 5.0) as channel:
            call = rpc.ControllerStub(channel).Session()
            register = pb.Register(node="b", host="127.0.0.1", slots=1, node_rank=-1, incarnation="b")
            await call.write(pb.AgentMessage(register=register))
            said = [command async for command in call]
        assert [c.WhichOneof("body") for c in said] == ["refused"] and "which is a" in said[0].refused.reason
        assert set(scene.service.machine.job.nodes) == {"a"}

    play(tmp_path, act, nnodes=1)

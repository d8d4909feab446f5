"""Any process that does not know the job's token can neither register, report, command nor look; and nothing of it does
harm.

Real services on loopback. Not among the integration tests, which fork their ranks: once gRPC's asyncio side has run in
a process, its forks hang.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest

from flashrecovery import events as ev
from flashrecovery.agent.peers.client import fetch_from, probe
from flashrecovery.config import RunConfig, Timeouts
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import EventLog, RunDir
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.rpc.handshake import Caller, job_key
from flashrecovery.rpc.message_auth import CHALLENGE_KEY, SealedChannel
from flashrecovery.rpc.token import job_token
from tests.support.peers import peer_service

TOKEN = "the-token-of-this-test-job"
ACCESS = Access(TOKEN)
KILL = pb.InjectRequest(rank=0, fault="sigkill")
STRANGER = Access("another-token-of-this-length")
LONG_S = 120.0
"""For what comes by itself, however busy the machine is."""


async def with_controller(folder: Path, use: Callable[[ControllerService, str], Awaitable[None]]) -> None:
    run_dir = RunDir(folder / "run")
    log = EventLog(run_dir.events_path)
    service = ControllerService(RunConfig(nproc_per_node=1), ACCESS, log, run_dir)
    # These nodes send no heartbeats; how long ago they were heard depends on how busy the machine is.
    with patch.object(service, "_look_around"), patch.object(service._liveness, "silent", return_value=False):
        port = await service.start("127.0.0.1", 0)
        try:
            await use(service, f"127.0.0.1:{port}")
        finally:
            await service.stop()
            log.close()
            run_dir.close()


def register(name: str = "node", incarnation: str = "") -> pb.AgentMessage:
    message = pb.Register(node=name, host="h", slots=1, node_rank=-1, incarnation=incarnation or name)
    return pb.AgentMessage(register=message)


async def sent(*messages: pb.AgentMessage) -> AsyncIterator[pb.AgentMessage]:
    for message in messages:
        yield message
    await asyncio.Event().wait()  # the caller ends it


async def status_of(call: Awaitable[object]) -> grpc.StatusCode:
    """With which it is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code()


async def session(address: str, access: Access, *messages: pb.AgentMessage) -> pb.Command:
    """The first command that comes of a session that begins with ``messages``."""

    async with access.dial(address, CONTROLLER, LONG_S) as channel:
        async for command in rpc.ControllerStub(channel).Session(sent(*messages)):
            first: pb.Command = command
            return first
    raise AssertionError("the session ended without a command")


@pytest.mark.parametrize("token", ["", "another-token-of-this-length", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_opens_nothing(token: str, tmp_path: Path) -> None:
    """Any process that dials with it finds that the controller is none of its own. If it calls all the same, it is
    refused."""

    async def use(service: ControllerService, address: str) -> None:
        with pytest.raises(StrangerError, match=f"{address} says that it is a FlashRecovery 'controller', but.*token"):
            await session(address, Access(token), register())
        async with grpc.aio.insecure_channel(address) as channel:
            entrance = rpc.EntranceStub(channel)
            caller = Caller(job_key(token), CONTROLLER)
            answer = await entrance.Hello(pb.Challenge(), metadata=((CHALLENGE_KEY, caller.nonce),), timeout=LONG_S)
            caller._session, caller._nonce = b"whatever", answer.nonce  # it does not care what the proof is
            stub = rpc.ControllerStub(SealedChannel(channel, caller))
            for call in (stub.Status(pb.StatusRequest(), timeout=LONG_S), stub.Inject(KILL, timeout=LONG_S)):
                assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(stub.Session(sent(register())).read()) is grpc.StatusCode.UNAUTHENTICATED
            bare_stub = rpc.ControllerStub(channel)
            for bare in (bare_stub.Status(pb.StatusRequest()), bare_stub.Inject(KILL)):
                assert await status_of(bare) is grpc.StatusCode.UNAUTHENTICATED
        assert not service.machine.job.nodes and service.machine.job.state is State.STARTING

    asyncio.run(with_controller(tmp_path, use))


@pytest.mark.parametrize("handler", ["on_exited", "on_register"])
def test_an_error_of_the_controllers_own_ends_the_job_and_is_told(handler: str, tmp_path: Path) -> None:
    """Else the connection would go on, with no one who reads it, and the job would wait for ever."""

    def raises(*_: object) -> None:
        raise KeyError("a mistake")

    async def use(service: ControllerService, address: str) -> None:
        with patch.object(Machine, handler, raises):
            async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
                messages = sent(register(), pb.AgentMessage(exited=pb.Exited(rank=0)))
                said = []
                async for command in rpc.ControllerStub(channel).Session(messages):
                    said.append(command)
                    if command.HasField("shutdown"):
                        break
        reason = said[-1].shutdown.reason or said[-1].refused.reason
        assert re.search(r"an error in the controller \(.+\): KeyError: 'a mistake'", reason)
        assert service.machine.job.state is State.FAILED and service.over.is_set()

    asyncio.run(asyncio.wait_for(with_controller(tmp_path, use), LONG_S))


def test_a_terminal_that_is_gone_does_not_end_the_job(tmp_path: Path) -> None:
    class Gone:
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        flush = write

    async def use(service: ControllerService, _: str) -> None:
        job = service.machine.job
        job.emit(ev.FailureDetected(rank=0, kind="killed"))
        with patch.object(sys, "stderr", Gone()), service.deciding():
            service.act()
        assert job.state is State.STARTING
        assert ev.FailureDetected in {type(event) for event in ev.read_events(service.run_dir.events_path)}

    asyncio.run(with_controller(tmp_path, use))


def test_the_right_token_opens_everything(tmp_path: Path) -> None:
    async def use(service: ControllerService, address: str) -> None:
        first = await session(address, ACCESS, register())
        assert first.HasField("heartbeat")
        async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
            status = await rpc.ControllerStub(channel).Status(pb.StatusRequest(), timeout=LONG_S)
        assert [n.name for n in status.nodes] == ["node"]

    asyncio.run(with_controller(tmp_path, use))


def test_a_session_must_begin_with_who_it_is(tmp_path: Path) -> None:
    async def use(service: ControllerService, address: str) -> None:
        first = await session(address, ACCESS, pb.AgentMessage(heartbeat=pb.Heartbeat()))
        assert first.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]

    asyncio.run(with_controller(tmp_path, use))


def test_two_agents_cannot_be_the_same_node(tmp_path: Path) -> None:
    """Two hosts of one host name would throw each other out; an agent that is restarted takes its place."""

    async def use(service: ControllerService, address: str) -> None:
        async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
            call = rpc.ControllerStub(channel).Session()
            await call.write(register())
            await call.read()
            refused = (await session(address, ACCESS, register(incarnation="another"))).refused
            assert re.search(r"at h, is node node already.*--node-name", refused.reason)
            assert refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
            assert service.machine.job.nodes["node"].incarnation == "node"
        while service._agents.connected():
            await asyncio.sleep(0.01)
        await session(address, ACCESS, register(incarnation="another"))
        assert service.machine.job.nodes["node"].incarnation == "another"

    asyncio.run(with_controller(tmp_path, use))


def test_a_node_with_other_settings_is_refused(tmp_path: Path) -> None:
    async def use(service: ControllerService, address: str) -> None:
        other = register("other")
        other.register.settings.update(RunConfig(nproc_per_node=2, timeouts=Timeouts(lease_s=0.45)).shared())
        said = "node other has nproc_per_node = 2 (here 1), timeouts.lease_s = 0.45 (here 0.4)"
        refused = (await session(address, ACCESS, other)).refused
        assert said in refused.reason and refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert not service.machine.job.nodes
        same = register("same")
        same.register.settings.update(RunConfig(nproc_per_node=1, standby=3, node_rank=0).shared())
        assert (await session(address, ACCESS, same)).HasField("heartbeat")

    asyncio.run(with_controller(tmp_path, use))


def test_garbage_on_the_port_does_no_harm(tmp_path: Path) -> None:
    async def use(service: ControllerService, address: str) -> None:
        host, port = address.split(":")
        for garbage in (
            b"",
            b"\0" * 64,
            os.urandom(4096),
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            with socket.create_connection((host, int(port)), timeout=LONG_S) as s:
                s.sendall(garbage)
        async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
            # well-formed gRPC, with the right token, that is no message of ours
            call = channel.unary_unary("/flashrecovery.v1.Controller/Status", bytes, bytes)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff" * 1000, timeout=LONG_S)
        assert (await session(address, ACCESS, register())).HasField("heartbeat")

    asyncio.run(with_controller(tmp_path, use))


def test_an_oversized_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = (("grpc.max_receive_message_length", 1 << 20),)
    monkeypatch.setattr("flashrecovery.rpc.channel.SERVER_OPTIONS", limit)

    async def use(service: ControllerService, address: str) -> None:
        async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
            request = pb.InjectRequest(rank=0, fault="x" * (2 << 20))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.ControllerStub(channel).Inject(request, timeout=LONG_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(with_controller(tmp_path, use))


def test_messages_of_a_lost_node_and_of_old_generations_change_nothing(tmp_path: Path) -> None:
    async def use(service: ControllerService, address: str) -> None:
        assert (await session(address, ACCESS, register())).HasField("heartbeat")
        machine = service.machine
        (record,) = machine.job.ranks.values()
        started = pb.WorkerStarted(rank=0, generation=0, pid=77)
        machine.on_started(started, "node", "h")
        machine.on_node_lost("node", "test", 0.0, time.monotonic())
        machine.job.take_actions()
        before = (machine.job.state, machine.job.generation, record.place)
        late = pb.AgentMessage(sequence=1, done=pb.Done(rank=0, generation=0, version=5))
        fenced = await session(address, ACCESS, register(), late)
        assert fenced.HasField("fence")
        assert (machine.job.state, machine.job.generation, record.place) == before

    asyncio.run(with_controller(tmp_path, use))


def test_agents_ask_each_other_for_the_token_too() -> None:
    async def main() -> None:
        peer = peer_service(ACCESS)
        await peer.start("127.0.0.1")
        try:
            address = f"127.0.0.1:{peer.port}"
            assert (await probe(address, ACCESS, LONG_S)).reachable
            refused = await probe(address, STRANGER, LONG_S)
            assert not refused.reachable and "does not know this job's token" in refused.evidence
            with pytest.raises(StrangerError):
                await fetch_from(address, STRANGER, 0)
        finally:
            await peer.stop()

    asyncio.run(main())


def test_a_token_is_needed_where_others_can_reach_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHRECOVERY_TOKEN", raising=False)
    assert job_token(None, host="127.0.0.1") == ""
    with pytest.raises(ConfigError, match="FLASHRECOVERY_TOKEN"):
        job_token(None, host="10.1.2.3")
    short = tmp_path / "token"
    short.write_text("short\n")
    with pytest.raises(ConfigError, match="this one has 5"):
        job_token(short, host="10.1.2.3")
    with pytest.raises(ConfigError, match="No such file"):
        job_token(tmp_path / "missing", host="10.1.2.3")
    short.write_text(TOKEN + "\n")
    assert job_token(short, host="10.1.2.3") == TOKEN


def test_an_agent_that_comes_after_the_end_is_told(tmp_path: Path) -> None:
    """It would wait for a controller for ten minutes."""

    async def use(service: ControllerService, address: str) -> None:
        service.machine.job.state, service.machine.job.launched = State.FINISHED, True
        said = []
        async with ACCESS.dial(address, CONTROLLER, LONG_S) as channel:
            async for command in rpc.ControllerStub(channel).Session(sent(register())):
                said.append(command.WhichOneof("body"))
                if len(said) == 2:
                    break
        assert said == ["heartbeat", "shutdown"]

    asyncio.run(with_controller(tmp_path, use))

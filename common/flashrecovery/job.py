"""One node's part of a job: the agent, and on a single node the controller, in one process and on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc

from flashrecovery.agent.agent import Agent
from flashrecovery.config import RunConfig
from flashrecovery.controller.service import TOKEN_KEY, ControllerService
from flashrecovery.controller.states import State
from flashrecovery.events import EventLog, RunDir
from flashrecovery.proto import CHANNEL_OPTIONS
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc


async def run_job(config: RunConfig, command: list[str], run_dir: RunDir) -> tuple[int, str]:
    """Run the job to its end. Returns the exit code and, if it is not 0, the reason.

    Raises:
        ConfigError: a port is in use.
    """
    token = secrets.token_hex(16)
    log = EventLog(run_dir.events_path)
    outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
    agent = Agent(config, command, run_dir, outgoing.put_nowait)
    service = ControllerService(config, token, log, agent.store_address, str(run_dir.path))
    try:
        port = await service.start("127.0.0.1", 0)
        address = f"127.0.0.1:{port}"
        run_dir.write_controller(address=address, pid=os.getpid(), token=token)
        for number in (signal.SIGINT, signal.SIGTERM):
            name = signal.Signals(number).name
            asyncio.get_running_loop().add_signal_handler(number, service.request_stop, f"stopped by {name}")
        _arm(config, service)
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            session = asyncio.create_task(_session(channel, token, agent, outgoing))
            reason = await _first(agent.finished, session)
            session.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await session
    finally:
        await agent.shutdown("the agent ended")
        await service.stop()
        log.close()
    state = service.machine.state
    return (0, "") if state is State.FINISHED else (1, service.machine.failure_reason or reason or "stopped")


async def _first(finished: asyncio.Future[str | None], session: asyncio.Task[None]) -> str | None:
    ends: set[asyncio.Future[Any]] = {finished, session}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if finished.done():
        return finished.result()
    session.result()  # raises what ended the stream
    return "the controller ended the stream"


async def _session(
    channel: grpc.aio.Channel, token: str, agent: Agent, outgoing: asyncio.Queue[pb.AgentMessage]
) -> None:
    """The agent's stream to the controller."""

    async def messages() -> AsyncIterator[pb.AgentMessage]:
        while True:
            yield await outgoing.get()

    agent.register()
    call = rpc.ControllerStub(channel).Session(messages(), metadata=((TOKEN_KEY, token),))
    async for received in call:
        agent.handle(received)


def _arm(config: RunConfig, service: ControllerService) -> None:
    """Faults of the command line go to their ranks with the first resume."""
    for spec in config.inject:
        service.arm(spec)

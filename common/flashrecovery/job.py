"""One node's part of a job: its agent, and on one of the nodes the controller, in one process and on one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.identity import Identity
from flashrecovery.agent.peers import PeerService
from flashrecovery.agent.session import ControllerSession
from flashrecovery.config import RunConfig
from flashrecovery.controller.service import ControllerService
from flashrecovery.controller.states import State
from flashrecovery.events import EventLog, RunDir
from flashrecovery.net import address_towards, is_free, is_here, resolve, split_address
from flashrecovery.observe import Observer
from flashrecovery.security import job_token, new_token

LOOPBACK = "127.0.0.1"
_DISMISS_S = 5.0
"""For the last word of an ending controller to its agents."""


@dataclass(frozen=True)
class Place:
    """Where the controller listens, the address of this node, and the token of the job."""

    controller: str
    port: int
    here: str
    token: str
    embeds: bool


def place_of(config: RunConfig) -> Place:
    """From the configuration. Raises ConfigError."""
    if config.controller is None:
        return Place(LOOPBACK, 0, LOOPBACK, new_token(), True)
    host, port = split_address(config.controller, "--controller")
    address = resolve(host, "--controller")
    token = job_token(config.token_file, host=address)
    here = config.node_address or address_towards(address, port)
    # Where something listens already, it is a controller of its own, or that of an agent on the same host.
    embeds = config.embed_controller and not config.spare and is_here(address) and is_free(address, port)
    return Place(address, port, here, token, embeds)


async def run_job(config: RunConfig, command: list[str], path: Path) -> tuple[int, str]:
    """Run this node's part of the job to its end. Returns the exit code and, if it is not 0, the reason.

    The controller's events and the rank table are in ``path``, what each agent writes in ``path/nodes/<name>`` if there
    are several; so they may share one directory.

    Raises:
        ConfigError: an address or a directory cannot be used, no controller is found, or a trace is asked for and its
            library is missing.
    """
    place = place_of(config)
    async with AsyncExitStack() as stack:
        identity = Identity.of(config, place.here)
        own = path / "nodes" / identity.name if config.several_nodes else path
        agents_dir = stack.enter_context(closing(RunDir(own)))
        agent, peers = await stack.enter_async_context(_agent(config, command, agents_dir, identity, place.token))
        if not place.embeds:
            observer = Observer(config.observe, agent=agent, node_rank=config.node_rank or 0, run_dir=str(own))
            await stack.enter_async_context(_observed(observer))
            _on_signals(lambda reason: _leave(agent, reason))
            address = f"{place.controller}:{place.port}"
            reason = await ControllerSession(address, place.token, agent, peers, config.timeouts).run()
            return (0, "") if reason is None else (1, reason)
        run_dir = agents_dir if own == path else stack.enter_context(closing(RunDir(path)))
        service, port = await stack.enter_async_context(_controller(config, place, run_dir, agent))
        for spec in config.inject:
            service.arm(spec)
        address = f"{place.controller}:{port}"
        reason = await ControllerSession(address, place.token, agent, peers, config.timeouts).run()
        await service.dismissed(_DISMISS_S)
        return _outcome(service, reason)


async def run_controller(config: RunConfig, path: Path) -> tuple[int, str]:
    """Only the controller, to the job's end. Returns as :func:`run_job`."""
    place = place_of(config)
    with closing(RunDir(path)) as run_dir:
        async with _controller(config, place, run_dir, None) as (service, _):
            await service.over.wait()
            await service.dismissed(_DISMISS_S)
            return _outcome(service, None)


def _outcome(service: ControllerService, reason: str | None) -> tuple[int, str]:
    finished = service.machine.state is State.FINISHED
    return (0, "") if finished else (1, service.machine.failure_reason or reason or "stopped")


@asynccontextmanager
async def _controller(
    config: RunConfig, place: Place, run_dir: RunDir, agent: Agent | None
) -> AsyncIterator[tuple[ControllerService, int]]:
    """The controller, and where it listens. ``agent``: that of the same process."""
    with closing(EventLog(run_dir.events_path)) as events:
        service = ControllerService(config, place.token, events, run_dir)
        node_rank = config.node_rank or 0
        observer = Observer(
            config.observe, service=service, log=events, agent=agent, node_rank=node_rank, run_dir=str(run_dir.path)
        )
        async with _observed(observer) as url:
            try:
                port = await service.start(place.controller, place.port)
                address = f"{place.controller}:{port}"
                run_dir.write_controller(address=address, pid=os.getpid(), token=place.token, observe=url)
                _on_signals(service.request_stop)
                yield service, port
            finally:
                await service.stop()


@asynccontextmanager
async def _agent(
    config: RunConfig, command: list[str], run_dir: RunDir, identity: Identity, token: str
) -> AsyncIterator[tuple[Agent, PeerService | None]]:
    """This node's agent, and what it does for others where there are any."""
    peers: PeerService | None = None
    if config.several_nodes:
        peers = PeerService(lambda: agent.incarnation(), token)
        await peers.start(identity.host)
    agent = Agent(config, command, run_dir, identity, token, peers)
    try:
        yield agent, peers
    finally:
        await agent.shutdown("the agent ended")
        if peers is not None:
            await peers.stop()


@asynccontextmanager
async def _observed(observer: Observer) -> AsyncIterator[str]:
    try:
        yield await observer.start()
    finally:
        await observer.stop()


def _leave(agent: Agent, reason: str) -> None:
    """This node goes; to the controller it is a lost one."""
    task = asyncio.ensure_future(agent.shutdown(reason))
    task.add_done_callback(lambda t: t.exception())


def _on_signals(stop: Callable[[str], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, f"stopped by {signal.Signals(number).name}")

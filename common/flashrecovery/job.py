"""One node's part of a job: its agent, and on one of the nodes the controller, in one process and on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.session import ControllerSession, answers
from flashrecovery.agent.monitoring import preemption
from flashrecovery.agent.peers.election import Election
from flashrecovery.agent.peers.service import PeerDuties, PeerService
from flashrecovery.agent.processes.process_manager import Places
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService, new_machine
from flashrecovery.controller.storage.node_failure_file import marks_path
from flashrecovery.errors import ConfigError
from flashrecovery.events import ControllerStarted, EventLog, RunDir, RunFiles
from flashrecovery.kinds import NoticeKind
from flashrecovery.observe import Observer
from flashrecovery.plan.membership.quorum import Quorum
from flashrecovery.plan.transitions import State
from flashrecovery.plan.words import ranks_text
from flashrecovery.rpc import tls
from flashrecovery.rpc.channel import Access
from flashrecovery.rpc.token import job_token, new_token
from flashrecovery.runtime import early_signals
from flashrecovery.runtime.addresses import address_towards, is_free, is_here, resolve, split_address
from flashrecovery.snapshot.files import LAST_CHECKPOINT
from flashrecovery.util.clock import lease_clock

if TYPE_CHECKING:
    from flashrecovery.controller.machine import Machine
    from flashrecovery.observe.recorder import Recorder

LOOPBACK = "127.0.0.1"
_DISMISS_S = 5.0
"""Seconds that the agents have to take the last message of an ending controller."""
_ELSEWHERE_S = 1.0
"""How often (seconds) a node that waits for a running job looks whether another controller was elected."""
_GATHER_S = 2.0
"""An elected controller's electors, which are on their way to it, count as heard for so long."""

log = logging.getLogger("flashrecovery")


@dataclass(frozen=True)
class Rendezvous:
    """Where the controller listens, the address of this node, and what it takes to belong to the job."""

    controller: str
    port: int
    here: str
    access: Access
    embeds: bool


def rendezvous_of(config: RunConfig) -> Rendezvous:
    """The rendezvous that the configuration asks for. Raises ConfigError."""
    if config.controller is None:
        return Rendezvous(LOOPBACK, 0, LOOPBACK, Access(new_token()), True)
    host, port = split_address(config.controller, "--controller")
    address = resolve(host, "--controller")
    access = Access(job_token(config.token_file, host=address))
    here = config.node_address or address_towards(address, port)
    # If something listens already, it is a stand-alone controller, or that of an agent on the same host.
    embeds = config.embed_controller and not config.spare and is_here(address) and is_free(address, port)
    return Rendezvous(address, port, here, access, embeds)


def with_tls(rendezvous: Rendezvous, config: RunConfig, path: Path) -> Rendezvous:
    """``rendezvous`` with certificates, if these are configured. ``path``: the run directory. Raises ConfigError."""
    found = (
        tls.made(path / "tls", (rendezvous.here, "localhost"))
        if config.tls.auto
        else tls.given(config.tls, rendezvous.here)
    )
    return rendezvous if found is None else replace(rendezvous, access=replace(rendezvous.access, tls=found))


async def _moved_to(path: Path, rendezvous: Rendezvous) -> Rendezvous | None:
    """Where the running job's controller is now, if another node was elected while this one was away.

    Only a node that shares the run directory learns of it; others are given the new ``--controller``.
    """
    for directory in (*sorted(path.glob("term*"), reverse=True), path):
        found = RunFiles(directory).controller()
        if found is None or found["address"] == f"{rendezvous.controller}:{rendezvous.port}":
            continue
        if await answers(found["address"], rendezvous.access):
            log.warning("the job's controller is at %s now", found["address"])
            host, port = split_address(found["address"], str(directory / "controller.json"))
            return replace(rendezvous, controller=host, port=port, embeds=False)
    return None


def check_directory(path: Path | None) -> None:
    """Where fallback checkpoints go. Raises ConfigError if nothing can be written there."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise ConfigError(f"checkpoint.dir = {str(path)!r} cannot be written: {e.strerror}") from e


def check_last(path: Path, *, resume: bool) -> None:
    """Raises ConfigError if an earlier launch in this run directory has left its state, and it is not said what to do
    with that."""
    folder = path / LAST_CHECKPOINT
    if folder.exists() and not resume:
        raise ConfigError(
            f"{folder} has the state in which an earlier launch has ended, and it would be lost: give --resume to go "
            f"on from there, choose another --run-dir, or remove {folder}"
        )


async def run_job(config: RunConfig, command: list[str], path: Path, places: Places | None = None) -> tuple[int, str]:
    """Run this node's part of the job to its end. Returns the exit code and, if it is not 0, the reason. ``places``:
    what has made room for this node's ranks, if it is not the agent.

    The controller's events and the rank table are in ``path``, what each agent writes in ``path/nodes/<name>`` if there
    are several; so they may share one directory.

    Raises:
        ConfigError: an address or a directory cannot be used, no controller is found, or a trace is asked for and its
            library is missing.
    """
    preemption.check(config.notice)
    check_directory(config.checkpoint.dir)
    check_last(path, resume=config.resume)
    rendezvous = with_tls(rendezvous_of(config), config, path)
    if config.several_nodes and (moved := await _moved_to(path, rendezvous)) is not None:
        rendezvous = moved
    async with AsyncExitStack() as stack:
        # With a single node the store listens on loopback only, even if other hosts can reach the controller's address.
        identity = Identity.of(config, rendezvous.here if config.several_nodes else LOOPBACK)
        own = path / "nodes" / identity.name if config.several_nodes else path
        agents_dir = stack.enter_context(closing(RunDir(own)))
        serving = await stack.enter_async_context(AsyncExitStack())  # others are served until the agent has ended
        started = _agent(config, command, agents_dir, identity, rendezvous.access, places)
        agent = await stack.enter_async_context(started)
        lead = Leadership(config, rendezvous, path, agents_dir, agent)
        stack.push_async_callback(lead.end)
        address = await lead.begin() if rendezvous.embeds else f"{rendezvous.controller}:{rendezvous.port}"
        if not rendezvous.embeds:
            await lead.only_follow()
        limits = config.timeouts
        alone = not config.several_nodes
        session = ControllerSession(address, rendezvous.access, agent, limits, lead.elected, lead.leave, alone=alone)
        peer_port = 0
        if config.several_nodes:
            peers = _peer_service(agent, session, rendezvous.access)
            await peers.start(identity.host)
            serving.push_async_callback(peers.stop)
            peer_port = peers.port
            await stack.enter_async_context(lead.looking_elsewhere(session))
        agent.measure_speed()
        await stack.enter_async_context(lead.hearing_notices())
        reason = await session.run(peer_port)
        if lead.service is None:
            return (0, "") if reason is None else (1, reason)
        await lead.service.dismissed(_DISMISS_S)
        code, why = _outcome(lead.service, reason)
        if code == 0 and config.resume:
            shutil.rmtree(path / LAST_CHECKPOINT, ignore_errors=True)  # from which it has gone on, to its end
        return code, why


async def run_controller(config: RunConfig, path: Path) -> tuple[int, str]:
    """Run a stand-alone controller, to the job's end. Returns as :func:`run_job`."""
    rendezvous = with_tls(rendezvous_of(config), config, path)
    with closing(RunDir(path)) as run_dir:
        async with controller(config, rendezvous, run_dir, None, Quorum(""), path) as (service, _):
            _on_signals(partial(_end_job, service, None), lambda number: log.warning("%s is ignored", number.name))
            await service.over.wait()
            await service.dismissed(_DISMISS_S)
            return _outcome(service, None)


def _outcome(service: ControllerService, reason: str | None) -> tuple[int, str]:
    finished = service.machine.job.state is State.FINISHED
    return (0, "") if finished else (1, service.machine.job.failure_reason or reason or "stopped")


def recorder_of(machine: Machine, run_dir: RunDir) -> Recorder:
    """What writes down the course of the job. An agent without a controller does not pay for the import."""
    from flashrecovery.observe.recorder import Recorder

    return Recorder(machine, run_dir)


@asynccontextmanager
async def controller(
    config: RunConfig, rendezvous: Rendezvous, run_dir: RunDir, agent: Agent | None, quorum: Quorum, home: Path
) -> AsyncIterator[tuple[ControllerService, str]]:
    """The controller, and where it listens (HOST:PORT). ``agent``: that of the same process. ``home``: the job's run
    directory, in which ``run_dir`` may be one of several."""
    with closing(EventLog(run_dir.events_path)) as events:
        machine = new_machine(config, run_dir)
        recorder = recorder_of(machine, run_dir)
        service = ControllerService(
            *(config, rendezvous.access, events, run_dir, quorum, marks_path(config.node_failure_log, home), home),
            machine=machine,
            course=recorder.course_json,
        )
        async with observed(config, run_dir, agent, service, events, recorder) as url:
            try:
                directory = config.checkpoint.dir
                kept_in = str(directory.resolve()) if directory is not None else ""
                events.write(ControllerStarted(world_size=config.world_size, checkpoint_dir=kept_in))
                port = await service.start(rendezvous.controller, rendezvous.port)
                address = f"{rendezvous.controller}:{port}"
                known = rendezvous.access
                ca, name = (known.tls.ca.decode(), known.tls.name) if known.tls is not None else ("", "")
                run_dir.write_controller(address, os.getpid(), known.token, url, ca, name)
                yield service, address
            finally:
                await service.stop()


class Leadership:
    """The controller in an agent's process: there from the beginning, or since this node was elected."""

    def __init__(self, config: RunConfig, rendezvous: Rendezvous, path: Path, agents_dir: RunDir, agent: Agent) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._path = path
        self._agents_dir = agents_dir
        self._agent = agent
        self._stack = AsyncExitStack()
        self.service: ControllerService | None = None

    async def begin(self) -> str:
        """Start the controller as the job's first one. Returns where it listens."""
        service, address = await self._start(self._rendezvous, self._path, Quorum(self._agent.node))
        for spec in self._config.inject:
            service.arm(spec)
        _on_signals(partial(_end_job, service, self._agent), partial(_pass_on, service, self._agent))
        return address

    async def only_follow(self) -> None:
        """The controller is elsewhere; only what this agent sees is served."""
        self._leave_on_signals()
        await self._stack.enter_async_context(observed(self._config, self._agents_dir, self._agent))

    @asynccontextmanager
    async def hearing_notices(self) -> AsyncIterator[None]:
        """For as long as this agent runs, hear whether this node is about to be taken away."""
        hearing = asyncio.create_task(preemption.watch(self._config.notice, self._agent.warning, self._warned))
        try:
            yield
        finally:
            hearing.cancel()
            await asyncio.wait({hearing})
            if not hearing.cancelled():
                hearing.result()

    def _warned(self, seen: str) -> bool:
        if self.service is None:
            return self._agent.warned(seen)
        self._agent.tell_leaving()
        why = "it runs the job's controller, which has to stay"
        text = f"node {self._agent.node} is to leave, because {seen}; but {why}"
        self._agent.notice(-1, NoticeKind.NODE_LEAVES, text)
        return True

    @asynccontextmanager
    async def looking_elsewhere(self, session: ControllerSession) -> AsyncIterator[None]:
        """For as long as this agent runs, look for the controller that was elected while this node was away, if the job
        has not begun where the agent is.

        Without that, three kinds of agents would wait in vain where nodes are started again after the controller was
        lost and before another one is elected: one that waits at the lost controller's address; that of the lost
        controller's own node, which begins as the job's first one and waits for all the others; and one that has come
        to that node before it went to the others.
        """
        looking = asyncio.create_task(self._look_elsewhere(session))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})
            if not looking.cancelled():
                looking.result()

    async def _look_elsewhere(self, session: ControllerSession) -> None:
        while True:
            await asyncio.sleep(_ELSEWHERE_S)
            if not self._waits(session):
                continue
            moved = await _moved_to(self._path, self._rendezvous)
            if moved is None or not self._waits(session) or not session.join(f"{moved.controller}:{moved.port}"):
                continue
            if self.service is not None:
                await self.leave()
                await self.only_follow()

    def _waits(self, session: ControllerSession) -> bool:
        """Whether this agent waits for a job that may have begun elsewhere."""
        if self.service is not None:
            return not (self.service.machine.takeover.begun or self.service.over.is_set())
        return session.stranded

    async def elected(self, election: Election, term: int) -> str:
        """Start a controller that the electors have elected for this term. Returns where it listens.

        It writes into the directory of the controller before, unless that one, cut off, still holds it.
        """
        await self.leave()
        here = replace(self._rendezvous, controller=self._rendezvous.here, port=0)
        until = lease_clock() + _GATHER_S
        quorum = Quorum.elected(self._agent.node, term, election.electors, election.before, until)
        try:
            service, address = await self._start(here, self._path, quorum)
        except ConfigError as e:
            path = self._path / f"term{term}"
            log.warning("%s; the new controller writes to %s", e, path)
            service, address = await self._start(here, path, quorum)
        service.take_over(f"node {self._agent.node} has been elected as controller of term {term}")
        self._leave_on_signals()
        return address

    async def _start(self, rendezvous: Rendezvous, path: Path, quorum: Quorum) -> tuple[ControllerService, str]:
        same = path == self._agents_dir.path
        run_dir = self._agents_dir if same else self._stack.enter_context(closing(RunDir(path)))
        started = controller(self._config, rendezvous, run_dir, self._agent, quorum, self._path)
        service, address = await self._stack.enter_async_context(started)
        self.service = service
        return service, address

    async def leave(self) -> None:
        """Stop what this node serves as a controller: another node leads."""
        if self.service is not None:
            self._leave_on_signals()
        self.service = None
        await self.end()

    def _leave_on_signals(self) -> None:
        """SIGINT: at once. Others: once its ranks have been handed over, unless this node leads."""
        limit_s = self._config.timeouts.handoff_s

        def told(number: signal.Signals, again: bool) -> None:
            reason = f"stopped by {number.name}"
            if number is signal.SIGINT or self.service is not None or not self._agent.ask_to_drain(reason):
                _leave(self._agent, reason)
                return
            late = f"{reason}; its ranks have not been handed over within {limit_s:g} s (timeouts.handoff_s)"
            asyncio.get_running_loop().call_later(limit_s, _leave, self._agent, late)

        _on_signals(told, lambda number: _said(self._agent.pass_on(number), number))

    async def end(self) -> None:
        """Close everything. Idempotent."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()


@asynccontextmanager
async def _agent(
    config: RunConfig,
    command: list[str],
    run_dir: RunDir,
    identity: Identity,
    access: Access,
    places: Places | None,
) -> AsyncIterator[Agent]:
    """This node's agent."""
    agent = Agent(config, command, run_dir, identity, access, places)
    try:
        yield agent
    finally:
        await agent.shutdown("the agent ended")
        await agent.end_snapshots()


def _peer_service(agent: Agent, session: ControllerSession, access: Access) -> PeerService:
    """What this node does for other agents."""
    duties = PeerDuties(
        election=session.election,
        relay=session.relay,
        vouch=session.vouch,
        generation=lambda: agent.generation,
        keep_log=agent.keep_setup_log,
        log_of=agent.setup_log,
        staging=agent.staging,
    )
    return PeerService(access, duties)


@asynccontextmanager
async def observed(
    config: RunConfig,
    run_dir: RunDir,
    agent: Agent | None,
    service: ControllerService | None = None,
    log: EventLog | None = None,
    recorder: Recorder | None = None,
) -> AsyncIterator[str]:
    """What this process shows of its agent and its controller, which writes to ``log``, and whose job's course
    ``recorder`` writes down. Gives the page's URL."""
    observer = Observer(
        config.observe,
        service=service,
        log=log,
        recorder=recorder,
        agent=agent,
        node_rank=config.node_rank or 0,
        run_dir=str(run_dir.path),
    )
    try:
        yield await observer.start()
    finally:
        await observer.stop()


def _end_job(service: ControllerService, agent: Agent | None, number: signal.Signals, again: bool) -> None:
    """End the job. Scripts that handle the signal get it first, and time to end by themselves. Ctrl-C comes from a
    user who is waiting: the second one ends everything at once."""
    handled = number is not signal.SIGINT and not again and agent is not None and agent.pass_on(number)
    service.request_stop(
        f"stopped by {number.name}", by_itself=bool(handled), at_once=again and number is signal.SIGINT
    )


def _pass_on(service: ControllerService, agent: Agent, number: signal.Signals) -> None:
    """A notice is the script's business. Without a handler it is what it would be without this launcher: the end."""
    ranks = agent.pass_on(number)
    if ranks:
        _said(ranks, number)
    else:
        service.request_stop(f"stopped by {number.name}, for which the script has no handler")


def _said(ranks: list[int], number: signal.Signals) -> None:
    whom = f"passed on to {ranks_text(ranks)}" if ranks else "ignored: no rank here has a handler for it"
    log.warning("flashrecovery: %s %s", number.name, whom)


def _leave(agent: Agent, reason: str) -> None:
    """End this node's agent; to the controller, the node is lost."""
    task = asyncio.ensure_future(agent.shutdown(reason))
    task.add_done_callback(lambda t: t.exception())


_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send some time before that (`sbatch --signal=USR1@120`)."""


def _on_signals(told: Callable[[signal.Signals, bool], None], noticed: Callable[[signal.Signals], None]) -> None:
    """``told``: called with a signal that is to end the job, and whether it is a repeated request. ``noticed``: called
    with other signals. Ignored signals (``nohup``) stay ignored, except Ctrl-C, which shells ignore for background
    jobs."""
    loop = asyncio.get_running_loop()
    seen: set[signal.Signals] = set()

    def end(number: signal.Signals) -> None:
        again = number in seen
        seen.add(number)
        told(number, again)

    for number in (*early_signals.ENDING, *_NOTICES):
        if signal.getsignal(number) is signal.SIG_IGN and number is not signal.SIGINT:
            continue
        loop.add_signal_handler(number, end if number in early_signals.ENDING else noticed, number)
    for held in early_signals.release():
        loop.call_soon(end, signal.Signals(held))

"""One simulated job: hosts with the real agents and controllers on them, model workers, and the laws they must keep."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrecovery import events as ev
from flashrecovery.agent.agent import Agent
from flashrecovery.config import RunConfig
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.job import Rendezvous, run_controller, run_job
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.rpc.channel import Access
from tests.simulation.content import TOKEN, Reference, Script
from tests.simulation.fabric import Fabric
from tests.simulation.laws import Laws, Violation
from tests.simulation.loop import Idle, Process, VirtualLoop
from tests.simulation.network import Host, Network, Weather
from tests.simulation.process import SimWorkerProcess
from tests.simulation.worker import ModelWorker

PORT = 29400


_SHORTER = {
    "hang_step_s": 15.0,
    "node_wait_s": 120.0,
    "rendezvous_s": 60.0,
    "controller_gone_s": 60.0,
    "replacement_s": 60.0,
    "startup_s": 60.0,
}
"""Only those whose length no rule depends on: a history shall not take a simulated hour."""


_LIMITS = ("max_failures_per_step", "max_kills_per_step", "max_restarts")


@dataclass(frozen=True)
class Shape:
    """The job: how many nodes and ranks, where the controller is. ``checkpoint_s``: from one fallback checkpoint to the
    next (0: none). ``limits``: a crash loop ends it, as it would in earnest. ``elastic``: the least number of ranks (0:
    it has all of them, always); ``replace``: of such a job; ``each``: ranks of one of its replicas, of which
    ``elastic`` is the least number then, and of which ``inner`` follow on each other; ``beyond``: that many replicas
    more than at the launch it may have."""

    nodes: int
    nproc: int
    spares: int = 0
    external: bool = False
    max_direct_agents: int = 64
    standby: int = 0
    checkpoint_s: float = 0.0
    limits: bool = False
    elastic: int = 0
    replace: str = "auto"
    each: int = 1
    inner: int = 1
    beyond: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.nproc

    @property
    def replicas(self) -> ReplicaShape:
        return ReplicaShape(self.world // self.each, self.inner, self.each // self.inner)


class Disk:
    """Where checkpoints are, which every node can read."""

    def __init__(self, world: int) -> None:
        self.published: dict[str, dict[int, Any]] = {}
        self._parts: dict[tuple[int, int], dict[int, Any]] = {}
        self._world = world

    def write(self, version: int, generation: int, rank: int, part: Any) -> str:
        """Returns the checkpoint's path if this has made it whole."""
        parts = self._parts.setdefault((version, generation), {})
        parts[rank] = part
        if len(parts) < self._world:
            return ""
        path = f"/simulated/checkpoint/{version:06d}"
        self.published[path] = parts
        for old in sorted(self.published)[:-2]:
            del self.published[old]
        return path if path in self.published else ""


@dataclass
class Outcome:
    """How a history has ended."""

    violation: Violation | None
    trace: list[str]
    state: str
    seconds: float
    handled: int
    recoveries: int = 0
    reason: str = ""


@dataclass
class World:
    """Everything. ``random`` decides what the faults of a history leave open."""

    seed: int
    shape: Shape
    script: Script
    weather: Weather
    timeouts: dict[str, float] = field(default_factory=dict)
    tolerated: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._unhandled)
        self.network = Network(self.loop, random.Random(self.seed + 1), self.weather)
        self.config = self._config()
        self.fabric = Fabric(self.network, random.Random(self.seed + 2), self.shape.world)
        self.slow_disk = random.Random(self.seed + 3)
        self.slow_start = random.Random(self.seed + 4)
        self.reference = Reference(self.script, self.shape.world)
        self.size = self.shape.world
        self.members = set(range(self.size))
        """The ranks of which the job consists, as its controllers have said last."""
        self.pids = itertools.count(1000)
        self.workers: dict[int, SimWorkerProcess] = {}
        self.agents: dict[str, Process] = {}
        self.agent_of: dict[Process, Agent] = {}
        self.disk = Disk(self.size) if self.shape.checkpoint_s else None
        self.processes: list[Process] = []
        self.services: list[tuple[Process, ControllerService]] = []
        self.addresses: list[str] = []
        self.over = False
        self.on_moment: Callable[[str], None] = lambda name: None
        self.trace: list[str] = []
        self.laws = Laws(self)
        self.network.seen = self.laws.sent
        self.hosts: dict[str, Host] = {}
        self.ended_ranks: set[int] = set()
        self.endings: dict[str, tuple[int, str]] = {}
        names = [f"n{i}" for i in range(self.shape.nodes + self.shape.spares)]
        for i, name in enumerate([*names, *(["ctl"] if self.shape.external else [])]):
            clock = 1000.0 * (i + 1)
            self.hosts[name] = self.network.add(Host(name, f"10.0.0.{i + 1}", clock, clock))
        self.controller_host = self.hosts["ctl" if self.shape.external else "n0"]

    def _config(self) -> RunConfig:
        several = self.shape.nodes + self.shape.spares > 1 or self.shape.external
        return RunConfig.model_validate(
            {
                "nproc_per_node": self.shape.nproc,
                "nnodes": self.shape.nodes,
                "spare_nodes": self.shape.spares,
                "controller": f"10.0.0.99:{PORT}" if several else None,
                "max_direct_agents": self.shape.max_direct_agents,
                "standby": self.shape.standby,
                "start_method": "spawn",  # where processes come from is no part of the model
                "snapshots": {"keep": "never"},  # nor what outlives them
                **({} if self.shape.limits else dict.fromkeys(_LIMITS, 1000)),
                "checkpoint": {"dir": "/simulated", "interval_s": self.shape.checkpoint_s}
                if self.shape.checkpoint_s
                else {},
                **(
                    {
                        "elastic": {
                            "min": self.shape.elastic,
                            "max": self.shape.replicas.replicas + self.shape.beyond,
                            "replace": self.shape.replace,
                        }
                    }
                    if self.shape.elastic
                    else {}
                ),
                "log": "none",
                "timeouts": {**_SHORTER, **self.timeouts},
            }
        )

    # -- time, words ----------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Into the trace."""
        self.trace.append(f"{self.loop.now:9.4f}  {text}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.over:
            return
        error = context.get("exception")
        if isinstance(error, (asyncio.CancelledError,)):
            return
        self.laws.broken("unhandled", f"{context.get('message')}: {error!r}", error)

    # -- nodes ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Every node's agent, and the controller."""
        if self.shape.external:
            self.start_controller()
        for i in range(self.shape.nodes + self.shape.spares):
            self.start_agent(f"n{i}", delay_s=0.02 * self.random.random() * i)

    def start_controller(self) -> None:
        process = Process(self.loop, self.controller_host, "controller")
        self.processes.append(process)
        self.controller_host.processes.append(process)
        self.agents["ctl"] = process
        self.note("the controller starts")
        process.start(self._run("ctl", process, lambda: run_controller(self.config, Path("/simulated"))))

    def start_agent(self, name: str, delay_s: float = 0.0) -> None:
        host = self.hosts[name]
        index = int(name[1:])
        spare = index >= self.shape.nodes
        config = self.config.model_copy(update={"node_name": name, "spare": spare})
        process = Process(self.loop, host, name)
        self.processes.append(process)
        host.processes.append(process)
        self.agents[name] = process

        async def run() -> tuple[int, str]:
            await asyncio.sleep(delay_s)
            return await run_job(config, ["train.py"], Path("/simulated"))

        self.note(f"the agent of {name} starts")
        process.start(self._run(name, process, run))

    async def _run(self, name: str, process: Process, main: Callable[[], Any]) -> None:
        try:
            code, reason = await main()
        except Exception as e:  # noqa: BLE001 - what a user would see as a traceback
            code, reason = 1, f"{type(e).__name__}: {e}"
            if not self.over:
                self.laws.agent_raised(name, e)
        self.note(f"{name} ends with code {code}: {reason}")
        if not self.over:
            self.endings[name] = (code, reason)
            self.laws.agent_ended(name, code, reason)
            process.end()

    def rendezvous_of(self, config: RunConfig) -> Rendezvous:
        """In place of :func:`flashrecovery.job.rendezvous_of`."""
        from tests.simulation.loop import current

        host = current().host
        if config.controller is None:
            return Rendezvous(host.ip, 0, host.ip, Access(TOKEN), True)
        here = host is self.controller_host and PORT not in host.listeners
        return Rendezvous(self.controller_host.ip, PORT, host.ip, Access(TOKEN), here)

    # -- what the model and the patches tell ----------------------------------------------------------

    def event(self, process: Process, event: ev.Event) -> None:
        """A controller has written this."""
        self.note(f"[{process.name}] {words(event)}")
        self.laws.event(process, event)
        self.on_moment(event.kind if isinstance(event, ev.Notice) else event.event)

    def pid_of(self, process: Process) -> str:
        return process.name.removeprefix("pid")

    def exits(self, process: Process, code: int) -> None:
        self.workers[int(self.pid_of(process))].exits(code)

    def committed(self, worker: ModelWorker) -> None:
        self.laws.committed(worker)

    def settled(self, worker: ModelWorker, version: int) -> None:
        self.laws.settled(worker, version)

    def resumed(self, worker: ModelWorker, version: int) -> None:
        self.laws.resumed(worker, version)

    def mutates(self, worker: ModelWorker, held_for: int) -> None:
        self.laws.mutates(worker, held_for)

    def ended_well(self, worker: ModelWorker) -> None:
        self.ended_ranks.add(worker.rank)
        self.laws.ended(worker)

    def living(self) -> list[SimWorkerProcess]:
        """Workers that could take a step."""
        return [w for w in self.workers.values() if w.process.runs]

    def controllers(self) -> list[tuple[Process, ControllerService]]:
        return [(p, s) for p, s in self.services if not p.dead and not s.over.is_set()]

    # -- running --------------------------------------------------------------------------------------

    def run(self, until_s: float, plan: Callable[[World], None]) -> Outcome:
        """The whole history, to the job's end or ``until_s``."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._history(until_s, plan))
        except Violation as e:
            self.laws.violation = self.laws.violation or e
        except Idle:
            self.laws.violation = self.laws.violation or Violation("idle", "nothing will ever happen again")
        outcome = self._outcome()
        self._clean_up()
        return outcome

    async def _history(self, until_s: float, plan: Callable[[World], None]) -> None:
        self.start()
        plan(self)
        while not self.laws.finished():
            await asyncio.sleep(0.25)
            if self.laws.violation is not None:
                return
            if self.loop.now > until_s:
                self.laws.too_late()
                return
        self.laws.at_the_end()

    def _outcome(self) -> Outcome:
        states = [s.machine.job.state.value for _, s in self.services]
        recoveries = sum(len(s.machine.job.history) for _, s in self.services)
        return Outcome(
            self.laws.violation,
            self.trace,
            states[-1] if states else "",
            self.loop.now,
            self.loop.handled,
            recoveries,
            self.laws.reason,
        )

    def _clean_up(self) -> None:
        """Let every coroutine end, in no time and without a network."""
        self.over = self.loop.over = True
        self.loop.after = None
        self.network.over = True
        for _ in range(6):
            never, self.loop.never = self.loop.never, []
            self.loop.requeue(deque(never))
            for process in self.processes:
                process.release()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)
            with suppress(Exception):
                self.loop.run_forever()
        for worker in self.workers.values():
            worker.close()
        asyncio.set_event_loop(None)
        self.loop.close()


def words(event: ev.Event) -> str:
    """One event in one line."""
    facts = event.model_dump(exclude={"time", "monotonic", "event", "traceback"}, exclude_defaults=True)
    return f"{event.event} " + " ".join(f"{k}={v}" for k, v in facts.items())

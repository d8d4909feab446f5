"""Facts from a live controller and from a live agent. Called on their event loop; only reads."""

from __future__ import annotations

import time

from flashrecovery.agent.agent import Agent
from flashrecovery.controller.service.service import ControllerService
from flashrecovery.controller.state.history import PHASE_OF, HistoryEntry
from flashrecovery.observe.facts import (
    AgentFacts,
    CheckpointFacts,
    ControllerFacts,
    JobFacts,
    NodeFacts,
    NodeWorkers,
    RecoveryFacts,
    WorkerFacts,
)
from flashrecovery.observe.tally import Tally
from flashrecovery.plan.transitions import State


def controller_facts(service: ControllerService, tally: Tally) -> ControllerFacts:
    """The facts of a controller in this process."""

    def look() -> JobFacts:
        now = time.monotonic()
        counts = tally.counts()
        machine = service.machine
        saved = machine.job.checkpoint
        status = service.status()
        return JobFacts(
            status=status,
            nodes=tuple(
                NodeFacts(i, n.name, n.host, tuple(n.ranks), n.heartbeat_age_s, n.suspect)
                for i, n in enumerate(status.nodes)
            ),
            recovery=None
            if machine.job.recovery is None
            else recovery_facts(machine.job.recovery, machine.job.state, now),
            checkpoint=None if saved is None else CheckpointFacts(saved[0], counts.checkpoint_saved_at),
            counts=counts,
        )

    return look


def recovery_facts(recovery: HistoryEntry, state: State, now: float) -> RecoveryFacts:
    """How far a recovery has come at ``now`` (CLOCK_MONOTONIC seconds).

    Phases follow each other, so the present one has had what the others leave, and with it the milliseconds that the
    report of the failure took to the controller.
    """
    seconds = max(now - recovery.failed_at, 0.0)
    return RecoveryFacts(
        generation=recovery.generation,
        victims=tuple(recovery.victims),
        cause=recovery.cause,
        seconds=seconds,
        phases=dict(recovery.phases),
        phase=PHASE_OF.get(state, ""),
        phase_s=max(seconds - sum(recovery.phases.values()), 0.0),
    )


def agent_facts(agent: Agent, node_rank: int) -> AgentFacts:
    """The facts of an agent in this process, straight from its workers' pages."""

    def look() -> NodeWorkers:
        now = time.monotonic()
        workers = []
        for process in agent.workers():
            health = process.page.health()
            workers.append(
                WorkerFacts(
                    rank=process.place,
                    pid=process.pid,
                    generation=process.generation,
                    tag=health.tag,
                    committed=health.committed,
                    progress=health.progress,
                    progress_age_s=now - health.progress_at if health.progress_at else None,
                    step_s=health.step_s,
                    overhead_s=health.overhead_s,
                    kept=health.kept,
                    kept_age_s=now - health.kept_at if health.kept >= 0 else 0.0,
                )
            )
        ready, starting = agent.standbys()
        workers.sort(key=lambda w: w.rank)
        return NodeWorkers(agent.node, node_rank, tuple(workers), ready, starting)

    return look

"""Facts as the JSON that ``/api/status`` and ``/api/history`` serve, and that the page draws."""

from __future__ import annotations

import dataclasses
from typing import Any

from flashrecovery.observe.facts import JobFacts, NodeWorkers, PastRecovery
from flashrecovery.proto import flashrecovery_pb2 as pb

SLOW_S = 10.0
"""Without progress for so long, and for ``SLOW_STEPS`` usual steps, a rank is drawn as slow. Only a colour: what
a hang is is decided in :mod:`flashrecovery.plan.hang`."""
SLOW_STEPS = 5.0
SILENT_S = 2.0
"""An agent says something four times a second; one that has been silent for so long is drawn as silent."""

_MOVING = frozenset({"starting", "joined", "stopping", "stopped", "recovering"})


def health_of(state: str, age_s: float, step_s: float) -> str:
    """How a rank is drawn: ``ok``, ``slow``, ``moving`` (not training, but on its way) or ``down``."""
    if state == "empty":
        return "down"
    if state in _MOVING:
        return "moving"
    if state == "running" and age_s > max(SLOW_S, SLOW_STEPS * step_s):
        return "slow"
    return "ok"


def status_view(job: JobFacts | None, node: NodeWorkers | None) -> dict[str, Any]:
    """``/api/status``. ``job`` is null where no controller is, ``agent`` where no agent is."""
    return {
        "job": None if job is None else _job_view(job),
        "agent": None if node is None else _agent_view(node),
    }


def _agent_view(node: NodeWorkers) -> dict[str, Any]:
    """An agent's workers; whether they train is the controller's to say, so only their progress colours them."""
    plain = dataclasses.asdict(node)
    for worker in plain["workers"]:
        worker["health"] = health_of("running", worker["progress_age_s"] or 0.0, worker["step_s"])
    return plain


def _job_view(job: JobFacts) -> dict[str, Any]:
    status, counts = job.status, job.counts
    late = {rank: node.heartbeat_age_s for node in job.nodes for rank in node.ranks}
    place = {rank: node.node_rank for node in job.nodes for rank in node.ranks}
    return {
        "state": status.state,
        "generation": status.generation,
        "run_dir": status.run_dir,
        "uptime_s": status.uptime_s,
        "standby_ready": status.standby_ready,
        "standby_starting": status.standby_starting,
        "last_failure": status.last_failure,
        "failure_reason": status.failure_reason,
        "failures": sum(counts.failures.values()),
        "recoveries": sum(counts.recoveries.values()),
        "checkpoint": None if job.checkpoint is None else dataclasses.asdict(job.checkpoint),
        "recovery": None if job.recovery is None else dataclasses.asdict(job.recovery),
        "nodes": [
            {
                "node_rank": n.node_rank,
                "name": n.name,
                "host": n.host,
                "heartbeat_age_s": n.heartbeat_age_s,
                "silent": n.heartbeat_age_s > SILENT_S,
                "suspect": n.suspect,
            }
            for n in job.nodes
        ],
        "ranks": [_rank_view(r, late.get(r.rank, 0.0), place.get(r.rank, 0)) for r in status.ranks],
    }


def _rank_view(rank: pb.RankStatus, late_s: float, node_rank: int) -> dict[str, Any]:
    age_s = rank.progress_age_s + late_s
    return {
        "rank": rank.rank,
        "node_rank": node_rank,
        "pid": rank.pid,
        "state": rank.state,
        "health": "slow" if rank.straggler else health_of(rank.state, age_s, rank.step_s),
        "tag": rank.tag,
        "iteration": rank.iteration - 1,
        "committed": rank.committed,
        "progress_age_s": age_s,
        "step_s": rank.step_s,
        "own_s": rank.own_s,
        "overhead_s": rank.overhead_s,
        "copy": _copy_view(rank),
        "generation": rank.generation,
    }


def _copy_view(rank: pb.RankStatus) -> dict[str, Any] | None:
    """The newest whole copy of its state that another rank keeps."""
    if not rank.copied:
        return None
    return {"version": rank.copied - 1, "rank": rank.copied_by, "age_s": rank.copy_age_s}


def history_view(job: JobFacts | None) -> dict[str, Any]:
    """``/api/history``: the latest recoveries, newest first."""
    latest = () if job is None else job.counts.latest
    return {"recoveries": [_recovery_view(r) for r in reversed(latest)]}


def _recovery_view(recovery: PastRecovery) -> dict[str, Any]:
    plain = dataclasses.asdict(recovery)
    if recovery.restore is not None:
        plain["restore"] = recovery.restore.as_dict()
    return plain

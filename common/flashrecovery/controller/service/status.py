"""The whole job at one look, as the rpc ``Status`` answers it."""

from __future__ import annotations

import time

from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.util.clock import lease_clock

_CHEAP_S = 0.005


class StatusBoard:
    """Answers requests for the job's status. In a very large job, requests that come close together get the same
    answer, so that answering takes a tenth of a core at most."""

    def __init__(self, machine: Machine, liveness: Liveness, run_dir: str) -> None:
        self._machine, self._liveness, self._run_dir = machine, liveness, run_dir
        self._began = time.monotonic()
        self._newest, self._until = pb.JobStatus(), 0.0

    def look(self, standbys: tuple[int, int]) -> pb.JobStatus:
        """The status now, which the caller must not change. ``standbys`` as for :func:`job_status`."""
        now = time.monotonic()
        if now >= self._until:
            status = job_status(self._machine, self._liveness, standbys, now, lease_clock())
            status.run_dir, status.uptime_s = self._run_dir, now - self._began
            self._newest, took = status, time.monotonic() - now
            self._until = now + 10 * took if took > _CHEAP_S else 0.0
        return self._newest


def job_status(
    machine: Machine, liveness: Liveness, standbys: tuple[int, int], now: float, lease_now: float
) -> pb.JobStatus:
    """The status of the whole job. ``standbys``: (ready, starting) of all nodes. ``now``: CLOCK_MONOTONIC seconds,
    ``lease_now``: those of ``liveness``."""
    ready, starting = standbys
    job = machine.job
    return pb.JobStatus(
        state=job.state.value,
        generation=job.generation,
        standby_ready=ready,
        standby_starting=starting,
        last_failure=job.last_failure,
        failure_reason=job.failure_reason,
        ranks=[
            _rank(machine, job.ranks[rank], job.ranks.get(keeper), now)
            for rank, keeper in job.keepers_of_copies().items()
        ],
        recoveries=[
            pb.RecoverySummary(
                generation=x.generation,
                victims=x.victims,
                resume_step=x.resume_step,
                total_s=x.total_s,
                kind=x.cause,
                iteration=x.iteration + 1,
            )
            for x in job.history
        ],
        nodes=_nodes(machine, liveness, lease_now),
        changes=[f"{what}: {state.value}" for what, state in machine.under_way().items()],
    )


def _rank(machine: Machine, r: RankRecord, keeper: RankRecord | None, now: float) -> pb.RankStatus:
    found = pb.RankStatus(
        rank=r.rank,
        pid=r.process.pid,
        node=r.process.node,
        state=r.place.value,
        tag=r.health.tag,
        progress_age_s=r.health.progress_age_s,
        generation=r.process.joined_generation,
        committed=r.committed,
        step_s=r.health.step_s,
        own_s=r.health.own_s,
        straggler=r.rank in machine.watch.stragglers.slow,
        overhead_s=r.health.overhead_s,
        iteration=machine.job.counting.iteration(max(r.health.tag, r.committed)) + 1,
    )
    if keeper is not None and keeper.health.kept >= 0:
        found.copied, found.copied_by = keeper.health.kept + 1, keeper.rank
        found.copy_age_s = keeper.health.kept_age_s + max(now - keeper.health.heard_at, 0.0)
    return found


def _nodes(machine: Machine, liveness: Liveness, now: float) -> list[pb.NodeStatus]:
    held: dict[str, list[int]] = {}
    for record in machine.job.ranks.values():
        held.setdefault(record.home, []).append(record.rank)
    return [
        pb.NodeStatus(
            name=n.name,
            host=n.host,
            heartbeat_age_s=liveness.age(n.name, now),
            ranks=held.get(n.name, []),
            suspect=n.doubt,
        )
        for n in machine.job.nodes.values()
    ]

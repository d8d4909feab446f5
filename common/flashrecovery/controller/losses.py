"""What an elastic job does about ranks that are lost: are they replaced, and can it do without them?"""

from __future__ import annotations

from collections.abc import Collection

from flashrecovery.controller.job_state import JobState
from flashrecovery.plan.resize import ReplicaRange, leaving
from flashrecovery.plan.transitions import State


def never_replaced(job: JobState) -> bool:
    """Whether no rank that is lost gets another process (``elastic.replace: never``, ``replan.replace: never``)."""
    settings = job.config.elastic or job.config.replan
    return settings is not None and settings.replace == "never" and job.state is not State.STARTING


def leaving_without(job: JobState, lost: Collection[int]) -> tuple[int, ...]:
    """Those of the ``lost`` ranks, which cannot be replaced, that leave the job: all or none. None if it is not
    elastic, has not begun yet, or too few would be left. (Where as many as are left are not allowed, more leave when
    all are stopped: :meth:`~flashrecovery.controller.resizing.Resizing.leave_at`.)"""
    if job.config.elastic is None or not lost or job.state is State.STARTING:
        return ()
    found = leaving(list(job.ranks), lost, allowed_sizes(job))
    return tuple(rank for rank in found if rank in lost)


def allowed_sizes(job: JobState) -> ReplicaRange:
    """How many replicas an elastic job may have: as it was launched, and as its ranks have said its batch, or a
    framework's configuration, allows."""
    elastic = job.config.elastic
    assert elastic is not None
    said = next((record.sizes for record in job.in_order if record.sizes), None)
    return ReplicaRange(elastic.min, elastic.max, said)

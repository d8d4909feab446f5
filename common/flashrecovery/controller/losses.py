"""What an elastic job does about ranks that are lost: are they replaced, and can it do without them?"""

from __future__ import annotations

from collections.abc import Collection

from flashrecovery.controller.job_state import JobState
from flashrecovery.plan.resize import ReplicaRange, leaving
from flashrecovery.plan.transitions import State


def never_replaced(job: JobState) -> bool:
    """Whether no rank that is lost gets another process (``elastic.replace: never``)."""
    elastic = job.config.elastic
    return elastic is not None and elastic.replace == "never" and job.state is not State.STARTING


def leaving_without(job: JobState, lost: Collection[int]) -> tuple[int, ...]:
    """The ranks that leave the job if ``lost`` ones cannot be replaced; none if it is not elastic, has not begun yet,
    or too few would be left."""
    elastic = job.config.elastic
    if elastic is None or not lost or job.state is State.STARTING:
        return ()
    return leaving(list(job.ranks), lost, ReplicaRange(elastic.min, elastic.max))

"""What an elastic job does about ranks that are lost: are they replaced, and can it do without them?"""

from __future__ import annotations

from collections.abc import Collection

from flashrecovery.controller.state.custody import sharded
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import BUILT_UP
from flashrecovery.plan.elastic.resize import ReplicaRange, filling, leaving
from flashrecovery.plan.transitions import State


def never_replaced(job: JobState) -> bool:
    """Whether no rank that is lost gets another process (``elastic.replace: never``, ``parallelism.replace:
    never``)."""
    settings = (job.config.elastic, job.config.parallelism)
    never = any(one is not None and one.replace == "never" for one in settings)
    return never and job.state is not State.STARTING


def leaving_without(job: JobState, lost: Collection[int]) -> tuple[int, ...]:
    """Those of the ``lost`` ranks, which cannot be replaced, that leave the job: all or none. None if it is not
    elastic, has not begun yet, or too few replicas, or not all of the state, would be left. (Where as many as are left
    are not allowed, more leave when all are stopped, and so do the other ranks of their replicas:
    :meth:`~flashrecovery.controller.elastic.resizing.Resizing.leave_at`.)"""
    if (
        job.config.elastic is None
        or not lost
        or job.state is State.STARTING
        or not job.membership.awaited.isdisjoint(lost)
    ):
        return ()
    found = leaving(job.ranks.keys(), lost, allowed_sizes(job), job.shape)
    if found and not _others_have_all(job, lost):
        return ()
    return tuple(rank for rank in found if rank in lost)


def _others_have_all(job: JobState, lost: Collection[int]) -> bool:
    """Whether the staying ranks hold all state: with a lost rank the other ranks of its replica leave, too, and one of
    them may alone have what a rank needs that is just being filled again, or its own part, whose copies were there."""
    shape, leaving_anyway = job.shape, left_of_replicas(job)
    going = {shape.replica(rank) for rank in lost}
    living = [r for r in job.in_order if r.place not in BUILT_UP and r.rank not in leaving_anyway]
    left = {record.model_rank for record in living if shape.replica(record.rank) not in going}
    if not left.issuperset(record.model_rank for record in living):
        return False
    if not sharded(job.in_order) or shape.each == 1:
        return True
    # A part that exists only once has its copy on one rank: that rank and the owner must not both be gone afterwards.
    alive = {record.rank for record in living}
    staying = {rank for rank in alive if shape.replica(rank) not in going}
    of_parts = [{rank, keeper} for rank, keeper in job.keepers_of_parts().items()]
    if any(alive.isdisjoint(some) for some in of_parts):
        return True  # something is lost anyway
    return not any(staying.isdisjoint(some) for some in of_parts)


def worth_filling(job: JobState, lost: Collection[int], room: int) -> list[int]:
    """Those of the ``lost`` ranks that get what room there is, if there is not enough for all of them and an elastic
    job can go on without the others."""
    if (
        job.config.elastic is None
        or room < 1
        or job.state is State.STARTING
        or not job.membership.awaited.isdisjoint(lost)
    ):
        return []
    return filling(job.ranks.keys(), lost, room, allowed_sizes(job), job.shape)


def left_of_replicas(job: JobState) -> list[int]:
    """The ranks of an elastic job that are of no use any more, because others of their replica have left."""
    if job.config.elastic is None:
        return []
    whole = set(job.shape.whole(job.ranks))
    return [rank for rank in job.ranks if job.shape.replica(rank) not in whole]


def allowed_sizes(job: JobState) -> ReplicaRange:
    """How many replicas an elastic job may have: as it was launched, or has changed its parallel layout last, and as
    its ranks have said its batch, or a framework's configuration, allows. Another job has those that it has."""
    elastic = job.config.elastic
    if elastic is None:
        return ReplicaRange(job.replicas, job.replicas)
    said = next((record.sizes for record in job.in_order if record.sizes), None)
    sizes = ReplicaRange(elastic.min, elastic.max, said)
    return sizes.of_layout(job.shape.replicas) if job.parallel.text else sizes

"""Ranks beyond the launch: an elastic job grows beyond the number of replicas that it was launched with. Pure.

Their numbers follow those of the launch, replica by replica. No process has taken part in the script's set-up
collectives as such a rank. So its process runs the script up to the first step as a launched rank with the same model
rank: in the launch's world, with that rank's number and the recorded results of its collectives. It gets its own number
when it joins, as any rank gets a new one after a change of size.

The process groups and shards of the launched rank determine those of the new one. Where a group spans the replicas, the
new rank is a further member; where a group lies within one replica, it is a member of its own replica's group.

In the process groups all ranks are numbered as in a job that is launched with this many replicas
(:meth:`.ReplicaShape.in_order`). Where a replica's ranks are not consecutive, as with pipeline stages, a rank beyond
the launch is numbered among the launched ranks of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashrecovery.plan.elastic.replicas import ReplicaShape


def members_of(launched: Sequence[int], members: Collection[int], me: int, shape: ReplicaShape) -> tuple[int, ...]:
    """The ranks of a job of these ``members`` that have what ``launched`` ones had, a process group or a shard, as seen
    from rank ``me``: :meth:`.ReplicaShape.in_order`. Where the launch has one replica of several ranks, it is not known
    whether what they all have spans replicas (:func:`tells_apart`)."""
    there = {*members}
    staying = [rank for rank in launched if rank in there and rank < shape.world]
    beyond = [rank for rank in there if rank >= shape.world]
    if not beyond:
        return tuple(staying)
    model_ranks = {shape.model_rank(rank) for rank in launched}
    if len(shape.by_replica(launched)) > 1:
        return tuple(shape.in_order([*staying, *(rank for rank in beyond if shape.model_rank(rank) in model_ranks)]))
    if me < shape.world:
        return tuple(staying)
    mine = shape.replica(me)
    return tuple(shape.in_order(r for r in beyond if shape.replica(r) == mine and shape.model_rank(r) in model_ranks))


def tells_apart(shape: ReplicaShape) -> bool:
    """Whether, in a job that is launched like this, objects that span replicas (a process group, a shard) can be told
    from those within one: not if one replica is all that there is, and has several ranks."""
    return shape.replicas > 1


def stand_in(rank: int, shape: ReplicaShape) -> int:
    """In whose place ``rank`` runs the script to its first step, whenever it does: its own, if the launch has had it,
    else that of the rank at the same place in one of the launch's replicas. Not in the first or the last one if there
    are others: to these scripts give things to do for all, such as to open a log."""
    return rank if rank < shape.world else shape.rank(shape.replicas // 2, shape.model_rank(rank))


def missing(shape: ReplicaShape, members: Collection[int], most: int) -> list[int]:
    """The replicas that a job of ``members`` does not have, up to ``most`` in all: the launch's first."""
    there = {shape.replica(rank) for rank in members}
    return [replica for replica in range(max(most, shape.replicas)) if replica not in there]

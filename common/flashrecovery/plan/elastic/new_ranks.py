"""Ranks that no launch has had: an elastic job grows beyond the number of replicas that it was launched with. Pure.

Their numbers follow on those of the launch, replica by replica. Nobody has ever taken part in the set-up collectives of
the script as such a rank. So its process runs the script to the first step in the place of a rank of the launch that
has its model rank: in the launch's world, under that one's number, with the record of what that one's collectives had
returned. It has its own number from when it comes in, as any rank has another one after a change.
What a rank of the launch has made in its script, process groups and shards, says also what is this one's: what spans
the replicas has it as a further member, and of what is within one replica it has its own replica's.

In the process groups all ranks are counted as in a job that is launched with as many replicas
(:meth:`.ReplicaShape.in_order`): where a replica's ranks do not follow on each other, as with pipeline stages, one
beyond the launch comes among those of the launch that have its stage.
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
    """Whether in a job that is launched so what spans the replicas (a process group, a shard) can be told from what is
    within one: not if one replica is all that there is, and has several ranks."""
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

"""Other members for the groups that there are: a job that loses replicas for good, or gets some back, goes on in them.

Handles stay valid, as over any recovery: the stock ``ProcessGroup`` and our backend in it are given another rank and
size while they are detached, and what is connected afterwards is of that size. Of each group those members go on that
the job still has, in the order of the launch; ranks beyond it (:mod:`flashrecovery.plan.elastic.new_ranks`) are the
last ones. So a group within one replica stays as it is, and only the global numbers of its ranks are others; a group
across the replicas has as many ranks less as replicas have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashrecovery.errors import UnsupportedError
from flashrecovery.groups import native_build, torch_private
from flashrecovery.groups.registry import ManagedGroup, groups
from flashrecovery.groups.state import STATE
from flashrecovery.plan.elastic.new_ranks import members_of
from flashrecovery.plan.elastic.replicas import ReplicaShape


def refuse_partial(shape: ReplicaShape) -> None:
    """Raises UnsupportedError, by name, if there is a group of which it is not known who belongs to it in another
    size."""
    for group in groups():
        if not shape.follows(group.launched, group.among or range(shape.world)):
            ranks = ", ".join(map(str, group.launched))
            raise UnsupportedError(
                f"an elastic job with a process group of {group.size} of its {shape.world} ranks ({group.name!r}: "
                f"ranks {ranks}), which has {shape.text}: which of them belong to it in another size is not known; "
                "groups of all ranks are allowed, of ranks of one replica, and of the same places in every replica"
            )


def described(shape: ReplicaShape) -> list[str]:
    """A description of this rank's groups that is equal on all ranks with the same place in a replica."""
    found = []
    for group in groups():
        by_replica = shape.by_replica(group.launched)
        model_ranks = [shape.model_rank(rank) for rank in next(iter(by_replica.values()))]
        found.append(f"{'in each replica' if len(by_replica) == 1 else 'over all replicas'}: places {model_ranks}")
    return found


def resize(members: Sequence[int], me: int, shape: ReplicaShape) -> None:
    """Have the groups consist of those of ``members`` (ranks as the job was launched, in order) that belong to them;
    ``me`` is this process, ``shape`` that of the launch. To be called while the groups are detached, on all members,
    before they are attached again.

    Raises UnsupportedError if a group was made when the job was smaller than it is to be.
    """
    number = {rank: place for place, rank in enumerate(members)}
    for group in groups():
        if group.among is not None and not set(members) <= set(group.among):
            raise UnsupportedError(
                f"an elastic job in which process group {group.name!r} was made when there were fewer replicas: those "
                "that come do not have it; make groups before the first step"
            )
        _resize(group, number, me, shape)
    STATE.resized(tuple(members), me, shape)


def numbers() -> dict[int, int]:
    """The number that each rank of the job, as it was launched, has now; {}: it has not changed its size."""
    return {rank: number for number, rank in enumerate(STATE.members)}


def numbers_now(launched: Sequence[int]) -> list[int]:
    """Translate a list of ranks as launched (a group's, for example) to the current numbers, in a job that has changed
    its size."""
    return (
        [numbers()[rank] for rank in members_of(launched, STATE.members, STATE.me, STATE.shape)] if STATE.shape else []
    )


def _resize(group: ManagedGroup, number: dict[int, int], me: int, shape: ReplicaShape) -> None:
    pg, outer = group.process_group(), group.outer()
    if pg is None or outer is None:
        return
    if group.among is None:
        staying = members_of(group.launched, number, me, shape)
    else:  # made when the job had changed its size: by ranks that all have it
        staying = tuple(rank for rank in group.launched if rank in number)
    if staying != group.ranks:
        rank, size = staying.index(me), len(staying)
        if group.size == 1:  # no stop has detached it, because it has no other member
            native_build.native().exchange(outer, [], [])
        native_build.native().renumber(pg, outer, rank, size)
        group.became(replace(group.request, ranks=staying, rank=rank, size=size))
    torch_private.renumber(pg, [number[rank] for rank in staying])

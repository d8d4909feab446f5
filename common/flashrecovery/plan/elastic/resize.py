"""Which replicas remain when lost ranks cannot be placed on any node, and how many replicas can join. Pure.

A *replica* is all ranks of one data-parallel coordinate, of every tensor, context and pipeline position. If one of its
ranks cannot be filled again, the replica leaves as a whole. The others are renumbered in their order, without gaps.
Replicas that join come last. So a rank's position in its replica never changes, and neither does the order of those
that stay. :func:`~flashrecovery.plan.reshard.plan.plan_reshard` then decides which state is sent where, and
:mod:`.sample_order` which replica computes which samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from flashrecovery.errors import ConfigError
from flashrecovery.plan.elastic.replicas import ReplicaShape, singles


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """How many replicas a job may have. ``allowed``: only these (DeepSpeed's elasticity); None: all between."""

    least: int
    most: int
    allowed: frozenset[int] | None = None

    @staticmethod
    def parse(text: str, option: str = "--elastic") -> ReplicaRange:
        """``2:8``. Raises ConfigError."""
        least, colon, most = text.partition(":")
        if not colon or not least.isdecimal() or not most.isdecimal() or not 1 <= int(least) <= int(most):
            raise ConfigError(f"{option} {text}: MIN:MAX is allowed, two numbers of replicas, 1 <= MIN <= MAX")
        return ReplicaRange(int(least), int(most))

    def of_layout(self, replicas: int) -> ReplicaRange:
        """The range for a job that has changed to a parallel layout with this many ``replicas``. MIN and MAX are
        numbers of replicas in any layout. A layout never has more replicas than it began with. If these are fewer than
        MIN, none of them leaves: a loss is then answered by another layout."""
        return replace(self, least=min(self.least, replicas), most=replicas)

    def largest(self, most: int) -> int:
        """The largest number of replicas up to ``most`` that is allowed; 0: none."""
        for size in range(min(most, self.most), self.least - 1, -1):
            if self.allowed is None or size in self.allowed:
                return size
        return 0


def why_too_few(sizes: ReplicaRange, left: int) -> str:
    """Why a job cannot go on with the replicas that are ``left``, and with how many it could."""
    replicas = f"{left} replica{'' if left == 1 else 's'} left"
    if left < sizes.least:
        return f"with {replicas} there would be fewer than elastic.min = {sizes.least}"
    fitting = sorted(size for size in sizes.allowed or () if size <= sizes.most)
    known = ", ".join(map(str, fitting)) or "no other number"
    return (
        f"with {replicas} no number from elastic.min = {sizes.least} to {left} divides the job's batch ({known} would)"
    )


def leaving(
    members: Collection[int], lost: Collection[int], sizes: ReplicaRange, shape: ReplicaShape | None = None
) -> tuple[int, ...]:
    """The ranks that leave a job when ``lost`` ones of its ``members`` (as it was launched) cannot be replaced: all of
    their replicas (``shape`` None: each rank is one), and what there is of replicas that have lost ranks before. None
    if too few replicas would be left."""
    shape = shape or singles(members)
    staying = _going_on(members, lost, 0, sizes, shape)
    return tuple(rank for rank in sorted(members) if shape.replica(rank) not in staying) if staying else ()


def filling(
    members: Collection[int], lost: Collection[int], room: int, sizes: ReplicaRange, shape: ReplicaShape
) -> list[int]:
    """Where there is no room for all of the ``lost`` members: those for which there is, so that as many replicas as
    possible go on. None if the job could not go on without the others."""
    staying = _going_on(members, lost, room, sizes, shape)
    filled = [rank for rank in shape.in_order(members) if rank in lost and shape.replica(rank) in staying]
    return filled if len(filled) < _lacking(members, lost, shape).total() else []


def coming(replicas: int, room: int, sizes: ReplicaRange, each: int) -> int:
    """How many more replicas, of ``each`` ranks, a job can have if nodes have room for ``room`` ranks."""
    return max(sizes.largest(replicas + room // each) - replicas, 0)


def _lacking(members: Collection[int], lost: Collection[int], shape: ReplicaShape) -> Counter[int]:
    """How many of its ranks each replica has lost that was whole."""
    whole = set(shape.whole(members))
    return Counter(replica for replica in map(shape.replica, set(lost).intersection(members)) if replica in whole)


def _going_on(
    members: Collection[int], lost: Collection[int], room: int, sizes: ReplicaRange, shape: ReplicaShape
) -> frozenset[int]:
    """The replicas that go on; none if too few would be left. Those that lack the fewest ranks are filled first. Where
    that many are not allowed, one that would have to be filled is given up before a whole one, and of whole ones the
    last."""
    whole, lacking = shape.whole(members), _lacking(members, lost, shape)
    if lacking.total() <= room:
        return frozenset(whole)
    staying = [replica for replica in whole if replica not in lacking]
    for replica, ranks in sorted(lacking.items(), key=lambda item: (item[1], item[0])):
        if ranks <= room:
            staying.append(replica)
            room -= ranks
    order = sorted(staying, key=lambda replica: (replica in lacking, replica))
    return frozenset(order[: sizes.largest(len(order))])

"""What becomes of the replicas when ranks are lost and no node is left for them, or when nodes come back. Pure.

A *replica* is all ranks of one data-parallel coordinate, of every tensor, context and pipeline position. Where one of
its ranks cannot be filled again, it is of no use and leaves as a whole; the others are counted anew, in their order,
without a gap. Replicas that come are the last ones. So a rank's position in its replica never changes, and neither does
the order of those that stay. Which state goes where then is :func:`~flashrecovery.plan.reshard.plan_reshard`'s matter,
which samples :mod:`.sample_order`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from flashrecovery.errors import ConfigError
from flashrecovery.plan.layouts import RankGrid
from flashrecovery.plan.replicas import ReplicaShape, singles
from flashrecovery.plan.words import ranks_text


class Remedy(str, Enum):
    """What to do after a loss."""

    FILL = "fill"
    """Other nodes have room for all that is lost."""
    WAIT = "wait"
    """A node is expected soon enough."""
    SHRINK = "shrink"
    """Replicas leave; some may be filled."""
    REPLAN = "re-plan"
    """No number of replicas will do: the job has to be laid out in another way."""
    GIVE_UP = "give up"
    """Nothing is left but to write down what there is."""


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
        """Of a job that has changed to a parallel layout of so many ``replicas``: MIN and MAX are numbers of replicas
        in whatever layout. A layout's most are those with which it has begun, and where these are fewer than MIN, none
        of them leaves: what is lost there is answered by another layout."""
        return replace(self, least=min(self.least, replicas), most=replicas)

    def largest(self, most: int, micro_batches: int, *, uneven: bool) -> int:
        """The largest number of replicas up to ``most`` that is allowed and gives everybody something to do; 0: none.
        ``uneven``: replicas may compute one micro-batch more than others."""
        for size in range(min(most, self.most, micro_batches), self.least - 1, -1):
            if (self.allowed is None or size in self.allowed) and (uneven or micro_batches % size == 0):
                return size
        return 0


def why_too_few(sizes: ReplicaRange, left: int) -> str:
    """Why a job cannot go on with the replicas that are ``left``, in words, and with how many it could."""
    replicas = f"{left} replica{'' if left == 1 else 's'} left"
    if left < sizes.least:
        return f"with {replicas} there would be fewer than elastic.min = {sizes.least}"
    fitting = sorted(size for size in sizes.allowed or () if size <= sizes.most)
    known = ", ".join(map(str, fitting)) or "no other number"
    return (
        f"with {replicas} no number from elastic.min = {sizes.least} to {left} divides the job's batch ({known} would)"
    )


@dataclass(frozen=True)
class Loss:
    """Ranks that are lost for good, and what there is instead.

    Attributes:
        grid: the job as it is.
        lost: ranks without a node.
        room: ranks that other nodes could take now.
        sizes: None: the job is not elastic.
        micro_batches: of a step, on all replicas together.
        uneven: as in :meth:`ReplicaRange.largest`.
        expected_s: until a node with room comes, in seconds; None: none is known of.
        patience_s: for so long it is better to wait than to shrink.
        can_replan: a way to lay the job out on what is left is known.
    """

    grid: RankGrid
    lost: frozenset[int]
    room: int = 0
    sizes: ReplicaRange | None = None
    micro_batches: int = 1
    uneven: bool = True
    expected_s: float | None = None
    patience_s: float = 0.0
    can_replan: bool = False


@dataclass(frozen=True)
class Resolve:
    """What is done about a loss.

    Attributes:
        filled: lost ranks that get another process.
        leaving: data-parallel coordinates, of the grid as it was, that leave.
        grid: the job afterwards.
        reason: in words.
    """

    remedy: Remedy
    filled: tuple[int, ...]
    leaving: tuple[int, ...]
    grid: RankGrid
    reason: str


def resolve(loss: Loss) -> Resolve:
    """What to do after a loss. Deterministic. Where replicas leave, those that lack the fewest ranks are filled first,
    and of whole ones that have to leave for the number to be allowed, the last ones do."""
    grid, lost = loss.grid, sorted(loss.lost)
    who = ranks_text(lost) if lost else "no rank"
    if len(lost) <= loss.room:
        return Resolve(Remedy.FILL, tuple(lost), (), grid, f"other nodes have room for {who}")
    if loss.expected_s is not None and loss.expected_s <= loss.patience_s:
        text = f"a node for {who} is expected within {loss.expected_s:g} s, and that is worth the wait"
        return Resolve(Remedy.WAIT, tuple(lost), (), grid, text)
    if loss.sizes is None:
        text = f"there is no node for {who}, and the job is not elastic"
        return Resolve(Remedy.GIVE_UP, (), (), grid, text)
    by_replica: dict[int, list[int]] = {}
    for rank in lost:
        by_replica.setdefault(position(grid, rank).dp, []).append(rank)
    filled: list[int] = []
    kept = set(range(grid.dp)) - by_replica.keys()
    for dp, ranks in sorted(by_replica.items(), key=lambda item: (len(item[1]), item[0])):
        if len(filled) + len(ranks) <= loss.room:
            filled += ranks
            kept.add(dp)
    size = loss.sizes.largest(len(kept), loss.micro_batches, uneven=loss.uneven)
    if size == 0:
        least = loss.sizes.least
        text = (
            f"{len(kept)} replicas can go on without {who}, and no number of them up to that is allowed (MIN {least})"
        )
        remedy = Remedy.REPLAN if loss.can_replan else Remedy.GIVE_UP
        return Resolve(remedy, (), (), grid, text)
    # A replica that would have to be filled first is given up before a whole one.
    order = sorted(kept, key=lambda dp: (dp in by_replica, dp))
    stay = set(order[:size])
    filled = [rank for rank in sorted(filled) if position(grid, rank).dp in stay]
    leaving = tuple(dp for dp in range(grid.dp) if dp not in stay)
    text = f"there is no node for {who}: {grid.dp - size} of {grid.dp} replicas leave, {size} go on"
    if size < len(kept):
        text += f"; {len(kept)} would be left, but that is no allowed number"
    return Resolve(Remedy.SHRINK, tuple(filled), leaving, replace(grid, dp=size), text)


def leaving(
    members: Collection[int], lost: Collection[int], sizes: ReplicaRange, shape: ReplicaShape | None = None
) -> tuple[int, ...]:
    """The ranks that leave a job when ``lost`` ones of its ``members`` (as it was launched) cannot be replaced: all of
    their replicas (``shape`` None: each rank is one), and what there is of replicas that have lost ranks before. None
    if too few replicas would be left."""
    shape = shape or singles(members)
    found = _resolved(members, lost, 0, sizes, shape)[1]
    if found.remedy not in (Remedy.SHRINK, Remedy.FILL):
        return ()
    replicas = shape.whole(members)
    staying = {replica for number, replica in enumerate(replicas) if number not in found.leaving}
    return tuple(rank for rank in sorted(members) if shape.replica(rank) not in staying)


def filling(
    members: Collection[int], lost: Collection[int], room: int, sizes: ReplicaRange, shape: ReplicaShape
) -> list[int]:
    """Where there is no room for all of the ``lost`` members: those for which there is, so that as many replicas as
    possible go on. None if the job could not go on without the others."""
    whole, found = _resolved(members, lost, room, sizes, shape)
    return [whole[place] for place in found.filled] if found.remedy is Remedy.SHRINK else []


def _resolved(
    members: Collection[int], lost: Collection[int], room: int, sizes: ReplicaRange, shape: ReplicaShape
) -> tuple[list[int], Resolve]:
    """The members whose replicas are whole, as they are counted without the others, and what is done about a loss, in
    which ranks are their places."""
    replicas = shape.whole(members)
    whole = shape.in_order(rank for rank in members if shape.replica(rank) in replicas)
    places = frozenset(place for place, rank in enumerate(whole) if rank in lost)
    grid = shape.grid(len(replicas))
    return whole, resolve(Loss(grid, places, room, sizes, micro_batches=len(replicas)))


@dataclass(frozen=True)
class Growth:
    """Whether replicas come. ``grid``: the job afterwards, the same if none does."""

    coming: int
    grid: RankGrid
    reason: str


def growth(grid: RankGrid, room: int, sizes: ReplicaRange, micro_batches: int, *, uneven: bool = True) -> Growth:
    """How many replicas can come where other nodes have room for so many ranks."""
    each = grid.size // grid.dp
    possible = grid.dp + room // each
    size = sizes.largest(possible, micro_batches, uneven=uneven)
    if size > grid.dp:
        text = f"there is room for {room} ranks: {size - grid.dp} replicas come, of {each} ranks each"
        return Growth(size - grid.dp, replace(grid, dp=size), text)
    if possible == grid.dp:
        text = f"there is room for {room} ranks, but a replica has {each}"
    elif grid.dp >= sizes.most:
        text = f"the job has {grid.dp} replicas, the most that are allowed"
    else:
        text = f"none of {grid.dp + 1} to {possible} replicas is allowed and divides {micro_batches} micro-batches"
    return Growth(0, grid, text)


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's coordinates."""

    tp: int
    cp: int
    dp: int
    pp: int


def position(grid: RankGrid, rank: int) -> Position:
    """Where a rank is. Raises ValueError for a rank that is not in the grid."""
    number = rank - grid.first
    if not 0 <= number < grid.size:
        raise ValueError(f"rank {rank}: {grid.first} to {grid.first + grid.size - 1} is allowed")
    number, tp = divmod(number, grid.tp)
    number, cp = divmod(number, grid.cp)
    pp, dp = divmod(number, grid.dp)
    return Position(tp, cp, dp, pp)


def renumbered(grid: RankGrid, leaving: Collection[int], size: int | None = None) -> dict[int, int]:
    """The new rank of each old one that stays, when these data-parallel coordinates leave. ``size``: replicas
    afterwards, if others come; these get the ranks that nobody has. What ``plan_reshard`` takes as ``becomes``.

    Raises ValueError if more stay than there are afterwards.
    """
    staying = [dp for dp in range(grid.dp) if dp not in set(leaving)]
    after = replace(grid, dp=len(staying) if size is None else size)
    if len(staying) > after.dp:
        raise ValueError(f"{len(staying)} replicas stay: at least as many afterwards are allowed, not {after.dp}")
    return {
        grid.rank(tp=tp, cp=cp, dp=dp, pp=pp): after.rank(tp=tp, cp=cp, dp=new, pp=pp)
        for new, dp in enumerate(staying)
        for pp in range(grid.pp)
        for cp in range(grid.cp)
        for tp in range(grid.tp)
    }


def groups(grid: RankGrid) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """The ranks of each group, by what is the same in it: as Megatron makes them, in the same order."""
    names = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp-cp": ("cp", "dp"), "pp": ("pp",), "tp-pp": ("tp", "pp")}
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, varying in names.items():
        by_rest: dict[tuple[int, ...], list[int]] = {}
        for rank in range(grid.first, grid.first + grid.size):
            at = position(grid, rank)
            rest = tuple(getattr(at, axis) for axis in ("pp", "dp", "cp", "tp") if axis not in varying)
            by_rest.setdefault(rest, []).append(rank)
        found[name] = [tuple(ranks) for ranks in by_rest.values()]
    return found

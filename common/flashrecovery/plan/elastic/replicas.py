"""Which ranks of a job make up a replica: all that share a data-parallel coordinate. Pure.

As the job was launched, ranks are numbered along axes: some within a replica (tensor parallelism, HSDP's shards), then
the data-parallel one, then perhaps others (pipeline stages). So three numbers say which ranks belong together, and they
are the same on all ranks. A rank's *model rank* is its number within its replica: ranks with the same model rank have
the same state, apart from what is sharded among them. Replicas leave and come as a whole, so model ranks never change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flashrecovery.plan.membership.placement import ring_of


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """How the ranks of a launch make up replicas.

    Attributes:
        replicas: at the launch.
        inner: ranks of one replica whose numbers follow on each other; the next rank is the next replica's.
        outer: how many such runs a replica has.
    """

    replicas: int
    inner: int = 1
    outer: int = 1

    @property
    def each(self) -> int:
        """Ranks of a replica."""
        return self.inner * self.outer

    @property
    def world(self) -> int:
        """Ranks of the launch."""
        return self.replicas * self.each

    def replica(self, rank: int) -> int:
        """The number of the replica to which a rank, as launched, belongs. Those beyond the launch (:mod:`.new_ranks`)
        follow on its own, replica by replica."""
        if rank >= self.world:
            return rank // self.each
        return rank // self.inner % self.replicas

    def model_rank(self, rank: int) -> int:
        """The rank's number within its replica."""
        if rank >= self.world:
            return rank % self.each
        return rank // (self.inner * self.replicas) * self.inner + rank % self.inner

    def rank(self, replica: int, model_rank: int) -> int:
        """Which rank has this model rank in this replica."""
        if replica >= self.replicas:
            return replica * self.each + model_rank
        run, at = divmod(model_rank, self.inner)
        return (run * self.replicas + replica) * self.inner + at

    def ranks(self, replica: int) -> list[int]:
        """The ranks of a replica, in order."""
        return [self.rank(replica, model_rank) for model_rank in range(self.each)]

    def in_order(self, ranks: Iterable[int]) -> list[int]:
        """The ranks as they are counted in a job that is launched with all of these replicas: those beyond the launch
        among the others, run by run. Of the launch alone that is by number. So a process group has the same order,
        and sums in it are the same bit for bit, whether a replica was there at the launch or has come later."""

        def at(rank: int) -> tuple[int, int, int]:
            run, place = divmod(self.model_rank(rank), self.inner)
            return run, self.replica(rank), place

        return sorted(ranks, key=at)

    def by_replica(self, members: Iterable[int]) -> dict[int, list[int]]:
        """The members of each replica that has any, in order."""
        found: dict[int, list[int]] = {}
        for rank in sorted(members):
            found.setdefault(self.replica(rank), []).append(rank)
        return dict(sorted(found.items()))

    def whole(self, members: Iterable[int]) -> list[int]:
        """The replicas all of whose ranks are among ``members``."""
        return [replica for replica, ranks in self.by_replica(members).items() if len(ranks) == self.each]

    def follows(self, ranks: Collection[int], members: Collection[int]) -> bool:
        """Whether it is known which of these ranks (a process group's, made when the job consisted of ``members``)
        there are in any size: all are of one replica, or they have the same model ranks in every replica."""
        return len(self.by_replica(ranks)) == 1 or self.everywhere(ranks, members)

    def everywhere(self, ranks: Collection[int], members: Collection[int]) -> bool:
        """Whether these ranks have the same model ranks in every replica that ``members`` make up."""
        by_replica = self.by_replica(ranks)
        model_ranks = {tuple(sorted(map(self.model_rank, some))) for some in by_replica.values()}
        return len(model_ranks) == 1 and by_replica.keys() == self.by_replica(members).keys()

    def now(self, members: Collection[int]) -> ReplicaShape:
        """The shape of the job that consists of these ranks, renumbered without gaps."""
        return ReplicaShape(len(self.by_replica(members)), self.inner, self.outer)

    def unlike(self, other: ReplicaShape) -> bool:
        """Whether replicas consist of other ranks. With one replica alone it cannot be told which of its ranks follow
        on each other where there are several."""
        one = 1 in (self.replicas, other.replicas)
        return self.each != other.each or (not one and self.inner != other.inner)

    def peers(self, members: Iterable[int], rank: int) -> list[int]:
        """Those of ``members`` that have the model rank of ``rank``, in the order of their replicas."""
        model_rank = self.model_rank(rank)
        return [other for other in sorted(members) if self.model_rank(other) == model_rank]

    def ring(
        self,
        members: Sequence[int],
        stride: int,
        per_node: int,
        shared: Sequence[int] = (),
        gpus: Sequence[int] = (),
    ) -> list[int]:
        """By the place of each of the ``members`` (ranks of whole replicas, :meth:`in_order`), the place of the one
        that keeps the copies of what it shares only with ranks of the same model rank. It is one of these,
        chosen as :func:`.ring_of` does. Where there is one replica, itself."""
        place_of = {rank: place for place, rank in enumerate(members)}
        model_ranks: dict[int, list[int]] = {}
        for rank in members:
            model_ranks.setdefault(self.model_rank(rank), []).append(rank)
        found = list(range(len(members)))
        for peers in model_ranks.values():
            if len(peers) > 1:
                ring = ring_of(peers, -(-stride // self.inner), per_node, shared, gpus)
                for rank, keeper in zip(peers, ring, strict=True):
                    found[place_of[rank]] = place_of[peers[keeper]]
        return found

    def place(self, members: Sequence[int], rank: int) -> tuple[int, int]:
        """The number of the rank's replica among those that there are, and how many there are."""
        there = list(self.by_replica(members))
        return there.index(self.replica(rank)), len(there)

    @property
    def text(self) -> str:
        """As text."""
        replicas = f"{self.replicas} replica{'' if self.replicas == 1 else 's'}"
        return f"{replicas} of one rank each" if self.each == 1 else f"{replicas} of {self.each} ranks each"


@dataclass(frozen=True)
class Sharing:
    """The ranks of a job, counted without a gap, among which state is sharded: all that have certain model ranks. Their
    places in the sharding follow the order of their numbers.

    Attributes:
        shape: of the job.
        model_ranks: in order; mostly it is one.
    """

    shape: ReplicaShape
    model_ranks: tuple[int, ...]

    @staticmethod
    def of_rank(shape: ReplicaShape, rank: int, model_ranks: tuple[int, ...] = ()) -> Sharing:
        """That of the state of ``rank``. No ``model_ranks``: its own alone."""
        return Sharing(shape, model_ranks or (shape.model_rank(rank),))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """By place."""
        shape = self.shape
        return tuple(
            sorted(shape.rank(r, model_rank) for r in range(shape.replicas) for model_rank in self.model_ranks)
        )

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def size(self) -> int:
        return len(self.ranks)

    def place(self, rank: int) -> int:
        """The place of a rank, which is one of them."""
        return self._places[rank]


def singles(ranks: Iterable[int]) -> ReplicaShape:
    """Each of these ranks, as the job was launched, is a replica."""
    return ReplicaShape(max(ranks, default=0) + 1)


def shape_of(peers: Sequence[int], world: int) -> ReplicaShape | None:
    """The shape of a job in which these ``peers``, in the order of the replicas, have one model rank. None if the ranks
    of the others cannot be told from that: the distance between two of them has to be the same everywhere."""
    replicas = len(peers)
    if not replicas or world % replicas:
        return None
    if replicas == 1:
        return ReplicaShape(1, world)
    inner = peers[1] - peers[0]
    if inner < 1 or world % (inner * replicas):
        return None
    shape = ReplicaShape(replicas, inner, world // (inner * replicas))
    model_rank = shape.model_rank(peers[0])
    return shape if [shape.rank(replica, model_rank) for replica in range(replicas)] == list(peers) else None

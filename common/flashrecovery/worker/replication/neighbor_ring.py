"""The ring of neighbour copies, across all changes of a job's members.

If every shard has replicas in each size of an elastic job, the ring continues with other members. If state is sharded
among the replicas, each size gets a new ring: it is prepared beside the current one, and replaces it once the change of
size is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from flashrecovery.groups.pace import PacedNetwork
from flashrecovery.redundancy.memory.flat_buffer import Beside, Keep
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.peer_exchange import CopyContext
from flashrecovery.state.shard import Shard
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.policy import CopyPolicy, PeerProtection, copied_shards, placement, ring_among


class NeighborRing:
    """The neighbour copies of one rank.

    Args:
        context: the job's context; each ring has its own network and generation. None: there is no process group, and
            never a ring.
        keep: makes the copies of the launch's ring outlive this process. Those of later rings do not: the next launch
            may have another size.
    """

    def __init__(
        self, registry: Registry, policy: CopyPolicy, context: CopyContext | None, keep: Keep | None = None
    ) -> None:
        self._registry, self._policy, self._context = registry, policy, context
        self._copies: NeighbourCopies | None = None
        self._ready: NeighbourCopies | None = None
        self._resting = False
        self.local_state_only = policy.protection is PeerProtection.LOCAL_STATE
        """Nothing but rank-local state goes to the neighbour."""
        if policy.protection is PeerProtection.RING_OF_EACH_SIZE:
            members = tuple(range(registry.world_size))
            self._copies = self._among(members, registry.rank, registry.tensor_shards(), 0)
        elif policy.protection is PeerProtection.NEIGHBOUR:
            self._copies = self._of_launch(registry.tensor_shards(), keep)
        elif policy.protection is PeerProtection.LOCAL_STATE:
            self._copies = self._of_launch([], None)

    @property
    def copies(self) -> NeighbourCopies | None:
        """None: this rank has no neighbour now."""
        return None if self._resting else self._copies

    def _of_launch(self, shards: Sequence[Shard], keep: Keep | None) -> NeighbourCopies | None:
        registry = self._registry
        if self._context is None:
            return None
        context = replace(self._context, network=PacedNetwork(), keep=keep)
        ring = Ring.of_world(registry.rank, registry.world_size, placement()[0])
        return NeighbourCopies(context, ring, shards, copied=[s.name for s in copied_shards(registry, 1)])

    def _among(
        self, members: Sequence[int], place: int, shards: Sequence[Shard], generation: int
    ) -> NeighbourCopies | None:
        """Neighbour copies of sharded state for the rank at ``place``, among the ranks of the launch with its model
        rank. None where there is one replica, but that its ranks keep each other's where another layout may need them
        (``across``)."""
        shape, policy = self._registry.shape, self._policy
        alone = len(shape.by_replica(members)) == 1
        wanted = policy.across and len(members) > 1 if alone else policy.sharded
        if self._context is None or not wanted:
            return None
        context = replace(self._context, network=PacedNetwork(), generation=generation)
        ring = Ring(place, tuple(members), tuple(ring_among(members, None if alone else shape)))
        return NeighbourCopies(context, ring, shards)

    # -- the ring goes on -------------------------------------------------------------------------

    def resize(self, rank: int, members: tuple[int, ...]) -> None:
        """The job consists of these ranks of the launch from now on; this rank has the number ``rank``. Every shard of
        such a job has replicas, so that the neighbour keeps only rank-local state. If state is sharded, the new ring is
        already in place (:meth:`put_in_place`)."""
        if self._copies is None or self._policy.ring_of_each_size:
            return
        self._resting = len(members) == 1
        self.local_state_only = not self._resting
        if not self._resting:
            self._copies.resize(Ring(rank, members, tuple(ring_among(members))))

    def can_copy_others(self) -> bool:
        """Whether shards that turn out to be each rank's own can be copied."""
        return self._context is not None and not self._policy.ring_of_each_size

    def copy_others(self, shards: Sequence[Shard]) -> None:
        """Copy what no other rank holds of all these shards of this rank, with a new ring if there is none."""
        if self._copies is None:
            self._copies = self._of_launch(shards, None)
        else:
            self._copies.copy_others(shards, self._copied())
        self._resting = self.local_state_only = False

    def _copied(self) -> Collection[str]:
        return [s.name for s in copied_shards(self._registry, 1)]

    def stop_outliving(self) -> None:
        """What is held stays, and is this process's alone from now on."""
        if self._copies is not None:
            self._copies.stop_outliving()

    # -- a new ring -------------------------------------------------------------------------------

    def make_ready(
        self, shards: Sequence[Shard], version: int, generation: int, ring: tuple[int, Sequence[int]], beside: Beside
    ) -> None:
        """``shards`` are what this rank will have of ``version``, with ``beside``; ``ring``: its place, and the
        members. Copy them, and have the neighbour keep them. Returns when that is done. Nothing that is kept so far is
        given up for it. Raises what the exchange raises."""
        place, members = ring
        self._ready = self._among(members, place, shards, generation)
        if self._ready is not None:
            self._ready.commit(version, beside.plain.get(self._registry.local_state.name), beside=beside)
            self._ready.wait()

    def drop_ready(self, timeout_s: float) -> None:
        """What was made ready does not come."""
        if self._ready is not None:
            self._ready.halt(timeout_s)
            self._ready.close()
            self._ready = None

    def halt_ready(self, timeout_s: float) -> None:
        """After the groups have been abandoned: end the exchange of what is being made ready."""
        if self._ready is not None:
            self._ready.halt(timeout_s)

    def put_in_place(self, shards: Sequence[Shard]) -> None:
        """What was made ready is this rank's state now, in ``shards``."""
        if self._copies is not None:
            self._copies.close()
        self._copies, self._ready = self._ready, None
        if self._copies is not None:
            self._copies.adopt(shards)

    def begin(self, shards: Sequence[Shard], place: int, members: Sequence[int]) -> None:
        """This process has just come into a job of ``members``, with ``shards`` that have no content yet."""
        self._ready = self._among(members, place, shards, 0)
        self.put_in_place(shards)

"""What the node's snapshot process holds for one rank: copies that outlive all processes of the job."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.plan.ownership import turned_out_own
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.memory.flat_buffer import Beside, Keep, Outliving
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.snapshot.client import Keeper
from flashrecovery.snapshot.files import LAST, OF_PAGE, memory_name
from flashrecovery.snapshot.memory import SharedMemory
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.worker.exit.last_copy import LastCopy
from flashrecovery.worker.registry import Registry


class RankSnapshots:
    """Those of one rank. ``keeper``: the way to the snapshot process; None: the node has none.

    Raises UnsupportedError if what an earlier launch has left is of another number of ranks."""

    def __init__(self, registry: Registry, keeper: Keeper | None) -> None:
        self._registry = registry
        self._left = keeper.left() if keeper is not None else {}
        for ranks in {int(name.rpartition("-")[2]) for name in self._left} - {registry.world_size}:
            raise UnsupportedError(
                f"the snapshots that were found are of a job of {ranks} ranks, and this one has {registry.world_size}: "
                f"launch it with {ranks}, or choose another --run-dir"
            )
        self.outliving: Keep | None = None if keeper is None else partial(self._outliving, keeper)
        """How the slot of this name is kept; None: the node has no snapshot process."""
        self._last = None if self.outliving is None else LastCopy(self.outliving(LAST), self.outliving(OF_PAGE))
        self.given_up = False

    def give_up(self) -> None:
        """Nothing of this rank outlives its processes any more."""
        self.given_up = True

    def _outliving(self, keeper: Keeper, name: str) -> Outliving:
        name = memory_name(name, self._registry.world_size)

        def keep(memory: SharedMemory | None) -> None:
            keeper.keep(name, memory)

        return Outliving(keep, keeper.check, self._left.pop(name, None))

    def take_over(self, kept: PreStepCopy | None) -> None:
        """Plain state that belongs to what the process before this one has left, in ``kept`` and in its last copy."""
        registry = self._registry
        found = [] if kept is None else [(version, beside.plain) for version, _, beside in kept.held()]
        if self._last is not None:
            found += self._last.left(registry.local_state.name)
        for version, plain in found:
            for shard in (registry.common, registry.local_state):
                data = plain.get(shard.name)
                if data is not None and shard.at(version) is None:
                    shard.keep(version, data)

    def keep_last(
        self,
        version: int,
        holders: Collection[int],
        kept: PreStepCopy | None,
        source: Callable[[Shard], ShardSource],
        beside: Beside,
    ) -> None:
        """The job ends: hold this rank's part of ``version``, which ``holders`` have whole. ``kept``: the copies that
        are held anyway. Raises RestoreError if this rank lacks it."""
        registry = self._registry
        if self._last is None:
            raise RestoreError("this node has no snapshot process")
        missing = [s.name for s in (registry.local_state, registry.common) if s.at(version) is None]
        if registry.local_state.name in missing or (missing and registry.rank in holders):
            raise RestoreError(f"rank {registry.rank} has no {missing[0]!r} of version {version}")
        part = _part_among(registry, holders) if registry.rank in holders else []
        slot = None if kept is None else kept.slot(version)
        if kept is not None and slot is None:
            part += [shard for shard in kept.shards if shard not in part]
        elif slot is not None:
            part = [shard for shard in part if shard.name not in slot.layout.shards]
            if not part:
                return
        self._last.keep(version, [source(shard) for shard in part], beside)

    def drop_last(self) -> None:
        """The last copy of the launch before is no longer needed."""
        if self._last is not None:
            self._last.drop()

    def left_own(self) -> list[str]:
        """Which shards had turned out to be each rank's own in the launch before, whose last version is left here, by
        the names that they had had before."""
        return [] if self._last is None else sorted(turned_out_own(self._last.shards))

    def inventory(self) -> list[pb.Held]:
        """What an earlier launch has left."""
        return [] if self._last is None else self._last.inventory()

    def source(self, shard: str, version: int) -> ShardSource | None:
        """The source of the shard in the last copy; None: it has no such shard."""
        return None if self._last is None else self._last.source(shard, version)


def _part_among(registry: Registry, holders: Collection[int]) -> list[Shard]:
    """The shards of which this rank keeps the last copy: each is kept by one of those ``holders`` that have it, and by
    the one that keeps its snapshot, if that one is among them."""
    part: list[Shard] = []
    for shard in registry.tensor_shards():
        first = writer_of(shard)
        among = [rank for rank in shard.holders if rank in holders]
        if registry.rank == min(among, key=lambda rank: (rank - first) % registry.world_size):
            part.append(shard)
    return part

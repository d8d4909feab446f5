"""What the node's snapshot process holds for one rank: copies that outlive all processes of the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.plan.ownership import turned_out_own
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.announcement import Announcement
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.memory.flat_buffer import Beside, Keep, Outliving
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.snapshot.client import Keeper
from flashrecovery.snapshot.files import LAST, OF_PAGE, memory_name
from flashrecovery.snapshot.memory import SharedMemory
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.worker.exit.last_copy import LastCopy
from flashrecovery.worker.registry import Registry

_VERSIONS = 2
"""That a copy keeps."""


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


class AnnouncedSnapshots:
    """This rank's parts of the snapshots that the controller announces, where not every step makes copies.

    Args:
        copies: makes them.
        on_taken: called when a copy is complete, with the seconds that training has waited for it.
        on_risk: called with a text if there will be none.
        ranks_of_node: that copy as much as this one.
    """

    def __init__(
        self,
        copies: PreStepCopy,
        on_taken: Callable[[float], None],
        on_risk: Callable[[str], None],
        ranks_of_node: int,
    ) -> None:
        self.copies = copies
        self.announcement = Announcement()
        self._on_taken, self._on_risk, self._ranks_of_node = on_taken, on_risk, ranks_of_node
        self._fits: bool | None = None  # not known before the optimizer has its state
        self._under_way = False

    def start(self, version: int, beside: Callable[[int], Beside]) -> None:
        """The live state is ``version``: begin to copy it, if it is the announced one."""
        if not self.announcement.take(version):
            return
        if self._fits is None:
            self._fits = self._fit_into_memory()
        if self._fits:
            self._under_way = True
            self.copies.start(version, beside(version))

    def _fit_into_memory(self) -> bool:
        """A job is not refused for them, and half of what there is stays free."""
        needed = _VERSIONS * self._ranks_of_node * sum(shard.spec().nbytes for shard in self.copies.shards)
        there = available_memory()
        if needed > there / 2:
            self._on_risk(
                f"no snapshots are taken: they need about {needed / 1e9:.1f} GB of host memory on this node, and there "
                f"are {there / 1e9:.1f} GB, of which half is to stay free. Should all ranks die at once, only a "
                "checkpoint helps (--checkpoint-dir; snapshots.keep: never ends this notice)"
            )
        return needed <= there / 2

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed."""
        if self._under_way:
            began = time.monotonic()
            self.copies.before_mutation()
            self._under_way = False
            self._on_taken(time.monotonic() - began)


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

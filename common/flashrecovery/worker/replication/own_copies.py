"""The copies that a rank keeps of its own state, apart from those that its neighbour copies or parity include."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from flashrecovery.errors import RestoreError
from flashrecovery.plan import Kind
from flashrecovery.plan.ownership import base_name, own_name, owner_of
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.flat_buffer import Beside
from flashrecovery.redundancy.memory.own_copy import ChangeCounter, PreStepCopy
from flashrecovery.state.shard import ShardSource
from flashrecovery.worker.local_state.version_counters import structure_watch
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.snapshots import AnnouncedSnapshots


class OwnCopies:
    """Those of one rank.

    Args: setting: ``undo`` of the configuration.

    Attributes:
        undo: makes the pre-step copy. None: none is kept, or another copy is one.
        snapshot: makes a copy of this rank's part of a snapshot, in every step.
        announced: or of versions that are announced.
    """

    def __init__(self, registry: Registry, look: ChangeCounter | None, setting: str) -> None:
        self._registry, self._look = registry, look
        self._allowed = setting != "never"
        self.always = setting == "always"
        self.undo: PreStepCopy | None = None
        self.snapshot: PreStepCopy | None = None
        self.announced: AnnouncedSnapshots | None = None
        # what was kept before shards turned out to be each rank's own, for a step
        self._before: PreStepCopy | None = None
        self._until = 0  # the version from which on that is no longer needed
        self._as_before: dict[str, tuple[int, ...]] = {}  # which ranks held these shards then, all alike

    def enable(self, *, brief: bool = False) -> None:
        """Keep a pre-step copy from the next step on; ``brief``: for a few steps."""
        if not self._allowed:
            return
        if self.undo is None:
            self.undo = PreStepCopy(self._registry.tensor_shards(), brief=brief, look=self._look, same=structure_watch)
        elif not brief:
            self.undo.keep_on()

    def keep_snapshot(self, snapshot: PreStepCopy) -> None:
        """Have this make a copy in every step, besides the others."""
        self.snapshot = snapshot

    def take_snapshots(self, announced: AnnouncedSnapshots) -> None:
        """Have this make a copy of each version that is announced, besides the others."""
        self.snapshot, self.announced = announced.copies, announced

    def disable(self) -> None:
        """No more pre-step copies, and none of the steps before, unless they are always kept."""
        if self.undo is not None and not self.always:
            self.undo.close()
            self.undo = None

    def start(self, version: int, beside: Callable[[int], Beside]) -> None:
        """The live state is ``version``, with ``beside`` of it: begin to copy it."""
        if self._before is not None and version > self._until:  # what has replaced it was whole before that mutation
            self._before.close()
            self._before = None
        if self.undo is not None:
            self.undo.start(version)
        if self.announced is not None:
            self.announced.start(version, beside)
        elif self.snapshot is not None:
            self.snapshot.start(version, beside(version))

    def finish_snapshot(self) -> None:
        """The live tensors may be overwritten after this: the copy of this rank's part of a snapshot is complete."""
        if self.announced is not None:
            self.announced.before_mutation()
        elif self.snapshot is not None:
            self.snapshot.before_mutation()

    def before_mutation(self, version: int, *, touched: bool) -> None:
        """``version`` may be overwritten after this: the pre-step copy is complete. ``touched``: it has been, in part,
        since the step was yielded, and a copy that is made only now would not be one of ``version``."""
        if self.undo is not None and self.undo.started(version):
            self.undo.before_mutation()
        elif self.undo is not None and not touched:
            self.undo.hold(version)

    # -- shards that turn out to be each rank's own -----------------------------------------------

    def supersede(self, before: PreStepCopy | None) -> None:
        """Another copy takes the place of the pre-step copy ``before``, which is still needed for a step."""
        self._before, self.undo = before, None

    def turned_out_own(self, version: int, held: dict[str, tuple[int, ...]]) -> None:
        """Some shards are each rank's own from ``version`` on. ``held``: which ranks held those of this rank before, if
        they were equal then, by the names that they had."""
        self._until, self._as_before = version, held

    def drop_snapshot(self) -> None:
        """Another launch would not find it under the names that it knows."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = self.announced = None

    def _as_kept(self, names: Collection[str], shard: str, version: int) -> str | None:
        """Under which of ``names``, of an own copy of ``version``, this rank has the shard; None: under none."""
        if shard in names:
            return shard
        base = base_name(shard)
        mine = owner_of(shard) == self._registry.rank
        known = mine or (version == self._until - 1 and self._registry.rank in self._as_before.get(base, ()))
        return base if known and base in names else None

    def _of_others(self, version: int) -> list[str]:
        """What this rank has of others' own shards, which were still equal at ``version``."""
        if version != self._until - 1:
            return []
        rank = self._registry.rank
        return [own_name(name, other) for name, ranks in self._as_before.items() for other in ranks if other != rank]

    # -- recovery ---------------------------------------------------------------------------------

    @property
    def _alone(self) -> list[PreStepCopy]:
        return [copies for copies in (self.undo, self.snapshot, self._before) if copies is not None]

    def inventory(self, pre_step: PreStepCopy | None) -> list[pb.Held]:
        """What this rank holds whole; ``pre_step``: makes its pre-step copy, which may be part of neighbour copies."""
        held = []
        for copies in (pre_step, self.snapshot, self._before):
            if copies is None:
                continue
            known = [s.name for s in copies.shards]
            for version, names, _ in copies.held():
                # Without a name, the controller would take it for everything.
                if known and all(self._as_kept(names, name, version) for name in known):
                    held.append(pb.Held(kind=Kind.UNDO, version=version, shards=[*known, *self._of_others(version)]))
        return held

    def source(self, pre_step: PreStepCopy | None, shard: str, version: int) -> ShardSource | None:
        """A copy in the form of a transfer's source; None: it is not held. ``pre_step``: see :meth:`inventory`."""
        for copies in (pre_step, self.snapshot, self._before):
            for kept, names, _ in () if copies is None else copies.held():
                name = self._as_kept(names, shard, version) if kept == version else None
                if copies is not None and name is not None:
                    return replace(copies.source(name, version), name=shard)
        return None

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when no copy is under way. Raises RestoreError if that takes longer."""
        for copies in self._alone:
            if not copies.wait_idle(timeout_s):
                raise RestoreError(f"this rank's own pre-step copy was not made within {timeout_s:g} s")

    def reset(self, version: int) -> None:
        """All ranks are at ``version``: newer copies are void."""
        for copies in self._alone:
            copies.reset(version)

    def begin_again(self, *, in_ring: bool) -> None:
        """The state lives in other shards from now on: what is kept of it goes. ``in_ring``: neighbour copies include a
        pre-step copy."""
        self.close()
        self.undo = None
        if self.always and not in_ring:
            self.enable()

    def close(self) -> None:
        """The job is over."""
        for copies in self._alone:
            copies.close()

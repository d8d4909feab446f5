"""The copies that this worker keeps, and when: neighbour copies, an own pre-step copy, snapshots, fallback checkpoints.

Which of them a job needs follows from its shards (:mod:`flashrecovery.redundancy` has the mechanisms): shards that no
other rank holds go to the neighbour every step; an own pre-step copy is kept where a step cannot be completed from
what its peers hold (see :meth:`Copies.enable_undo`). Where copies are made in every step anyway, or are asked for, they
are *snapshots*: held by a process of the node, too, and so also there when all processes of the job have died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.groups.pace import PacedNetwork
from flashrecovery.plan import Kind
from flashrecovery.plan.ownership import base_name, own_name, owner_of, turned_out_own
from flashrecovery.plan.parity.copies_or_parity import CopyChoice
from flashrecovery.plan.parity.decodable import DecodeOrder, ParityHeld
from flashrecovery.plan.parity.groups import Groups, launch_domains
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint import reader, writer
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.memory.flat_buffer import Beside, Outliving
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.own_copy import ChangeCounter, UndoCopy, write_back
from flashrecovery.redundancy.memory.peer_exchange import CopyContext, PeerCopies
from flashrecovery.redundancy.parity.copies import GroupMember, ParityCopies
from flashrecovery.runtime.environment import in_changed_layout
from flashrecovery.snapshot.client import Keeper
from flashrecovery.snapshot.files import LAST, OF_PAGE, memory_name
from flashrecovery.snapshot.memory import SharedMemory, host_id
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.worker.consistency.divergence_check import is_due
from flashrecovery.worker.exit.last_checkpoint import save_last
from flashrecovery.worker.exit.last_copy import LastCopy
from flashrecovery.worker.local_state.version_counters import glance_at_tensors
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication.policy import anywhere, choice, copied_shards, placement, ring_among

NEIGHBOUR_GROUP, PARITY_GROUP = "flashrecovery-neighbour", "flashrecovery-parity"
_COMPARED = "as their wrappers say; compared when the first step ends"
_CLOSE_S = 60.0
"""Seconds that the job's end waits for the checkpoint part that is being written."""


class Copies:
    """The copies of one worker. Made when the set of shards is fixed, on every rank at the same place (it may make a
    process group)."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        on_published: Callable[[writer.Published], None],
        on_error: Callable[[BaseException], None],
        on_kept: Callable[[int], None],
        on_risk: Callable[[str], None],
    ) -> None:
        """``on_kept`` gets the newest version that is kept whole for another rank (-1: none), ``on_risk`` says in words
        what has turned out to be protected worse than was said at the start; in any thread.

        Raises UnsupportedError if copies are asked for where there is one rank only, ``redundancy: replica`` where a
        shard has no replica, or parity where the nodes do not allow it; ConfigError if there is not enough host
        memory, or the checkpoint directory cannot be written."""
        self._registry = registry
        self._settings, self._limits, self._on_published = settings, settings.timeouts, on_published
        # Only where touches can be seen is it known that nothing else has changed a tensor beside its copy.
        seen = all(adapter.touch_mark() is not None for adapter in registry.adapters if adapter.shards())
        self._look: ChangeCounter | None = _look if seen else None
        if registry.world_size == 1 and settings.redundancy in ("replica", "neighbor", "parity"):
            raise UnsupportedError(
                f"redundancy = {settings.redundancy!r}: a world of one rank has nobody to hold a copy; "
                "allowed here: auto, none"
            )
        unique = registry.unique_shards()
        if unique and settings.redundancy == "replica":
            raise UnsupportedError(
                f"redundancy 'replica': {len(unique)} shards of rank {registry.rank} exist on no other rank, "
                f"the first is {unique[0].name!r}; allowed here: auto, neighbor, parity, none"
            )
        self._peers: PeerCopies | None = None
        self._parity: ParityCopies | None = None
        self._capsules_only = False
        self._ring: NeighbourCopies | None = None
        self._before: UndoCopy | None = None  # what was kept before shards turned out to be each rank's own, for a step
        self._left_snapshots = False  # nothing of this rank outlives its processes any more
        self._until = 0  # the version from which on that is no longer needed
        self._as_before: dict[str, tuple[int, ...]] = {}  # who held these shards then, all alike
        self._members: tuple[int, ...] | None = None  # of a job that has just changed its size
        # In an elastic job whose state is divided the neighbour's ring is made anew in each size.
        self._divided = settings.elastic is not None and any(a.division() is not None for a in registry.adapters)
        # Where a lost rank of the last replica is answered by another layout, the others of that replica keep copies.
        self.across = settings.elastic is not None and settings.replan is not None and registry.shape.each > 1
        self._anew = self._divided or self.across
        self._ring_group: dist.ProcessGroup | None = None
        self._on_kept, self._on_risk = on_kept, on_risk
        self._next: NeighbourCopies | None = None  # of a division that has been made ready
        self._elastic = settings.elastic is not None
        # A framework's format is of one number of ranks; the core's can be read by any.
        self._form = None if self._elastic else registry.checkpoint_format()
        self._chosen = ""
        self._undo: UndoCopy | None = None
        self._redundancy = settings.redundancy
        self._undo_allowed = settings.undo != "never"
        self._undo_always = settings.undo == "always"
        self._keeper = Keeper.from_env(registry.rank)
        self._left = self._keeper.left() if self._keeper is not None else {}
        for ranks in {int(name.rpartition("-")[2]) for name in self._left} - {registry.world_size}:
            raise UnsupportedError(
                f"the snapshots that were found are of a job of {ranks} ranks, and this one has {registry.world_size}: "
                f"launch it with {ranks}, or choose another --run-dir"
            )
        self._last = None if self._keeper is None else LastCopy(self._outliving(LAST), self._outliving(OF_PAGE))
        self._snapshot: UndoCopy | None = None
        if registry.world_size > 1 and settings.redundancy != "none":
            losses = settings.parity if settings.redundancy == "parity" else 1
            copied_somewhere = anywhere(bool(copied_shards(registry, losses)))
            alone = self.across and registry.shape.replicas == 1
            if copied_somewhere and self._elastic and registry.shape.each > 1 and not self._divided and not alone:
                self._one_node_has_all(registry, on_risk)
            if self._divided and not in_changed_layout():  # a layout that was changed to is not chosen for that
                _refuse_copies_on_one_node(registry)
            nothing: tuple[CopyChoice, Groups] = CopyChoice(False, True, ""), ()
            chosen, parity_groups = choice(registry, settings) if copied_somewhere else nothing
            self._chosen = chosen.reason if chosen.fits else ""
            if not chosen.fits and registry.rank == 0:
                on_risk(f"the copies may not fit into the nodes' memory: {chosen.reason}")
            if chosen.parity and not self._anew:
                self._keep_parity(registry, settings, parity_groups)
            else:
                self._keep_for_neighbour(registry, copied_somewhere)
        fixed = not self._elastic and settings.replan is None and registry.world_size > 1
        if self._peers is None and fixed and settings.redundancy in ("auto", "neighbor"):
            # Ranks connect in it when they first need to: for what turns out to be each rank's own.
            self._ring_group = groups.create_control_group(NEIGHBOUR_GROUP)
        if settings.snapshots.keep == "always" and self._keeper is not None and not self._own_copies:
            self._snapshot = UndoCopy(_part_of_snapshot(registry), share=True, look=self._look, keep=self._outliving)
        if self._undo_always:
            self.enable_undo()
        self.checkpoint: writer.CheckpointFallback | None = None
        if settings.checkpoint.dir is not None:
            self.checkpoint = writer.CheckpointFallback(
                settings.checkpoint.dir,
                rank=registry.rank,
                world=registry.world_size,
                keep=settings.checkpoint.keep,
                form=self._form,
                on_published=on_published,
                on_error=on_error,
                shape=registry.shape if self._elastic else None,
                stands=registry.stands() if self._elastic else (),
            )

    def _keep_for_neighbour(self, registry: Registry, shards: bool) -> None:
        """Have the neighbour keep what a lost node would take with it: capsules of its ranks, and, if there are any
        (``shards``), shards without a replica elsewhere. The agent keeps capsules, too, so among the ranks of one node,
        whose shards all have replicas, nothing is to be done."""
        _, nodes = placement()
        batches = registry.batches  # beyond the launch, ranks may be on nodes that it did not have
        beyond = batches is not None and batches.most > registry.shape.replicas
        if not shards and nodes == 1 and not self.across and not beyond:
            return
        world = registry.world_size
        group = self._ring_group = groups.create_control_group(NEIGHBOUR_GROUP)
        assert group is not None
        self._capsules_only = not shards and not self._anew
        if self._anew:
            members = tuple(range(world))
            self._peers = self._ring = self._ring_for(registry.tensor_shards(), registry.rank, members, 0)
            return
        self._peers = self._ring = NeighbourCopies(
            self._context(group, outlives=self._keeper is not None and shards),
            Ring.of_world(registry.rank, world, placement()[0]),
            registry.tensor_shards() if shards else [],
            copied=[s.name for s in copied_shards(registry, 1)],
        )

    def _context(self, group: dist.ProcessGroup, generation: int = 0, *, outlives: bool = False) -> CopyContext:
        """``outlives``: what is kept is held by the node's snapshot process, too."""
        keep = self._outliving if outlives else None
        return CopyContext(group, generation, self._look, PacedNetwork(), keep, self._on_kept, self._on_risk)

    @staticmethod
    def _one_node_has_all(registry: Registry, on_risk: Callable[[str], None]) -> None:
        """Of some state. Raises UnsupportedError at the launch; a layout that the job has changed to goes on so."""
        text = f"an elastic job of {registry.shape.text} in which one node has all that there is of some state: copies "
        if not in_changed_layout():
            raise UnsupportedError(
                f"{text}of it are not kept in such a job; have each replica on nodes of its own, as a mesh of "
                "(replicate, shard) has it"
            )
        if registry.rank == 0:
            on_risk(f"{text}of it are not kept as long as it has several replicas, and that node must not be lost")

    def _ring_for(
        self, shards: Sequence[Shard], place: int, members: Sequence[int], generation: int
    ) -> NeighbourCopies | None:
        """Neighbour copies among these ranks (as the job was launched) of a divided state, for the one at ``place``:
        within those that stand at the same place in their replicas. None where there is one replica, but that its ranks
        keep each other's where another layout may need them (``across``). They do not outlive the job's processes: what
        they hold may be of another size than what the next launch has."""
        shape = self._registry.shape
        alone = len(shape.by_replica(members)) == 1
        wanted = self.across and len(members) > 1 if alone else self._divided
        if self._ring_group is None or not wanted:
            return None
        ring = Ring(place, tuple(members), tuple(ring_among(members, None if alone else shape)))
        return NeighbourCopies(self._context(self._ring_group, generation), ring, shards)

    def _keep_parity(self, registry: Registry, settings: Settings, everybody: Groups) -> None:
        """Have a group of ranks on different nodes keep parity of what could be lost, and each other's capsules.
        Where all ranks are on one node, a rank is lost with nothing but its process."""
        (ranks,) = (ranks for ranks in everybody if registry.rank in ranks)
        group = groups.create_control_group(PARITY_GROUP)
        assert group is not None
        domain = host_id() if placement()[1] > 1 else -1
        self._peers = self._parity = ParityCopies(
            self._context(group, outlives=self._keeper is not None),
            GroupMember(registry.rank, tuple(ranks), settings.parity, settings.parity_group, domain),
            registry.tensor_shards(),
            copied=[s.name for s in copied_shards(registry, settings.parity)],
        )

    def _outliving(self, name: str) -> Outliving:
        """How the slot of this name is kept by the node's snapshot process."""
        keeper = self._keeper
        assert keeper is not None
        name = memory_name(name, self._registry.world_size)

        def keep(memory: SharedMemory | None) -> None:
            keeper.keep(name, memory)

        return Outliving(keep, keeper.check, self._left.pop(name, None))

    def take_over(self) -> None:
        """Plain state that belongs to what the process before this one has left."""
        registry, kept = self._registry, self._kept
        found = [] if kept is None else [(version, beside.plain) for version, _, beside in kept.held()]
        if self._last is not None:
            found += self._last.left(registry.capsule.name)
        for version, plain in found:
            for shard in (registry.common, registry.capsule):
                data = plain.get(shard.name)
                if data is not None and shard.at(version) is None:
                    shard.keep(version, data)

    def keep_last(self, version: int, holders: Collection[int], *, live: bool) -> None:
        """The job ends: have the node's snapshot process hold this rank's part of ``version``, which ``holders`` have
        whole. ``live``: the tensors of the shards are of that version. Raises RestoreError if this rank lacks it."""
        registry, kept = self._registry, self._kept
        if self._last is None:
            raise RestoreError("this node has no snapshot process")
        missing = [s.name for s in (registry.capsule, registry.common) if s.at(version) is None]
        if registry.capsule.name in missing or (missing and registry.rank in holders):
            raise RestoreError(f"rank {registry.rank} has no {missing[0]!r} of version {version}")
        part = _part_among(registry, holders) if registry.rank in holders else []
        slot = None if kept is None else kept.slot(version)
        if kept is not None and slot is None:
            part += [shard for shard in kept.shards if shard not in part]
        elif slot is not None:
            part = [shard for shard in part if shard.name not in slot.layout.shards]
            if not part:
                return
        sources = [
            ShardSource(s.name, s.spec(), list(s.tensors().values())) if live else self._own_source(s.name, version)
            for s in part
        ]
        self._last.keep(version, sources, self._beside(version))

    def save_last(self, order: pb.KeepLast, generation: int, *, live: bool) -> None:
        """The job ends: write this rank's part of a checkpoint. ``live``: as for :meth:`keep_last`. Raises
        RestoreError."""
        registry, version = self._registry, order.version
        if not live and self._form is not None:
            raise RestoreError(
                f"rank {registry.rank} has gone on, and {self._form.name!r} is written of its live state"
            )
        if self.checkpoint is not None:
            self.checkpoint.close(_CLOSE_S)  # the part that is being written, if there is one

        def own(name: str) -> ShardSource:
            shard = registry.shards[name]
            if not live or isinstance(shard, ObjectShard):
                return self._own_source(name, version)
            return ShardSource(name, shard.spec(), list(shard.tensors().values()))

        def copied(name: str) -> ShardSource:
            return self.source(Kind.COPY, name, version)

        save_last(registry, self._settings, self._form, order, generation, (own, copied), self._on_published)

    def describe(self) -> str:
        """In words: what is protected by which copies, what that costs, and which losses it survives."""
        parts = [self._describe_copies(), self._chosen, self._describe_snapshots() if self.in_snapshots else ""]
        return "; ".join(part for part in parts if part)

    def _describe_snapshots(self) -> str:
        if self._snapshot is None:
            return "snapshots: the own copies outlive all processes of the job, and cost nothing besides"
        sizes = [s.spec().nbytes for s in self._snapshot.shards]
        return (
            f"snapshots: host memory 2 x {sum(sizes) / 1e6:.1f} MB for this rank's part of the state, which outlives "
            "all processes of the job"
        )

    def _describe_copies(self) -> str:
        if self._capsules_only:
            return (
                f"replicas: every shard lives on several ranks ({_COMPARED}); each rank's own state (random numbers, "
                "data position) is kept by a rank of another node; survives all but one of a replica set, and the loss "
                "of any one node"
            )
        if self._peers is not None:
            return self._peers.describe()
        if self._registry.world_size == 1:
            return "no copies: a world of one rank has nobody to hold them"
        if self._registry.unique_shards():
            return "no copies of what no other rank holds: only a checkpoint helps"
        text = (
            f"replicas: every shard lives on several ranks ({_COMPARED}); no memory cost; survives the loss of all but "
            "one of these"
        )
        return text if self.in_snapshots else f"{text}; not of all ranks at once (--snapshots always, or a checkpoint)"

    # -- each step --------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """The live state is ``version``: copy it, and send what only this rank has, beside the next step."""
        if self._before is not None and version > self._until:  # what has replaced it was whole before that mutation
            self._before.close()
            self._before = None
        if self._undo is not None:
            self._undo.start(version)
        if self._snapshot is not None:
            self._snapshot.start(version, self._beside(version))
        if self._peers is not None:
            capsule = self._registry.capsule.at(version)
            assert capsule is not None
            self._peers.commit(version, capsule, beside=self._beside(version))

    def _beside(self, version: int) -> Beside:
        """The plain state of ``version``."""
        registry = self._registry
        plain = {s.name: data for s in (registry.common, registry.capsule) if (data := s.at(version)) is not None}
        return Beside(registry.rank, plain)

    @property
    def capsules_only(self) -> bool:
        """Nothing but capsules goes to the neighbour, and there are no own pre-step copies (see
        :meth:`send_capsule`)."""
        return self._capsules_only

    @property
    def in_every_step(self) -> bool:
        """Copies are made in every step, on every rank, which :meth:`wait` waits for."""
        return self._own_copies or self._snapshot is not None

    @property
    def in_snapshots(self) -> bool:
        """What this rank has to add to the job's state is in memory that outlives all of its processes."""
        return self._kept is not None

    def send_capsule(self, version: int, *, sealed: bool) -> None:
        """Send this rank's capsule before the mutation that makes ``version``, on every rank; returns when its exchange
        is complete.

        Where survivors keep no copy of the version before, whoever dies in the mutation is brought to the *new*
        version: its capsule must have left it by then. Not ``sealed``: it is not known yet, and nothing is kept of it.
        """
        assert self._peers is not None
        self._peers.commit(version, self._registry.capsule.at(version) if sealed else None, early=True)
        self._peers.wait()

    def save_checkpoint_if_due(self, version: int, generation: int) -> None:
        """The live state is ``version``, and does not change before :meth:`start` has been called for it."""
        if self.checkpoint is not None and self.checkpoint.due(version):
            capsule, common = self._registry.capsule.at(version), self._registry.common.at(version)
            assert capsule is not None and common is not None
            copies, rules = self._every_step, self._registry.rules() if self._elastic else None
            if copies is None:
                shards = self._registry.tensor_shards()
                self.checkpoint.commit(
                    version, shards, capsule=capsule, common=common, generation=generation, rules=rules
                )
                return
            copies.reserve(version)  # the copy that start() is about to make
            self.checkpoint.commit_copy(
                *(version, copies.shards, copies.reserved, copies.release),
                capsule=capsule,
                common=common,
                generation=generation,
                rules=rules,
            )

    def saves(self, version: int) -> bool:
        """Whether a checkpoint of ``version`` has been announced."""
        return self.checkpoint is not None and self.checkpoint.announced == version

    def wait(self) -> None:
        """The copies of the last committed version are complete. Raises what the exchange has raised."""
        if self._peers is not None:
            self._peers.wait()
        if self._snapshot is not None:
            self._snapshot.wait()

    def settle(self, given_up: Callable[[], bool]) -> None:
        """The copies of the version that was handed out are complete, or ``given_up()``."""
        if self._peers is not None:
            self._peers.settle(given_up)

    def before_mutation(self, version: int, *, touched: bool = False) -> None:
        """``version`` may be overwritten after this. ``touched``: it has been, in part, since it was handed out, and an
        own copy that is made only now would not be one of ``version``."""
        if self._snapshot is not None:
            self._snapshot.before_mutation()
        if self._peers is not None and not self._capsules_only:
            self._peers.before_mutation()
        elif self._undo is not None and self._undo.started(version):
            self._undo.before_mutation()
        elif self._undo is not None and not touched:
            self._undo.hold(version)

    def enable_undo(self, *, brief: bool = False) -> None:
        """Keep an own copy of the pre-step state from the next step on; ``brief``: for a few steps."""
        if self._own_copies or not self._undo_allowed:
            return
        if self._undo is None:
            self._undo = UndoCopy(self._registry.tensor_shards(), brief=brief, look=self._look)
        elif not brief:
            self._undo.brief = False

    def disable_undo(self) -> None:
        """No more own copies, and none of the steps before: all ranks have them behind."""
        if self._undo is not None and not self._undo_always:
            self._undo.close()
            self._undo = None

    # -- shards that are not what other ranks have under their name -----------------------------------

    def adopt_own(self, held: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Some shards are each rank's own, and not what other ranks have under their name: from ``version`` on, which
        is handed out next (-1: they have been for some time). ``held``: those of this rank, by the names that they had,
        and who was said to hold them. They are copied as others that no other rank holds; on every rank at the same
        place.

        Raises UnsupportedError if that cannot be: replicas are asked for, or checkpoints are in the framework's format.
        """
        registry = self._registry
        names = ", ".join(map(repr, held)) or "shards of other ranks"
        if self._redundancy == "replica":
            raise UnsupportedError(
                f"redundancy 'replica': {names} are not equal on the ranks that were said to hold the same; allowed "
                "here: auto, neighbor, parity, none"
            )
        if self.checkpoint is not None and self._form is not None:
            raise UnsupportedError(
                f"{names} are not equal on the ranks that were said to hold the same, and fallback checkpoints "
                f"(checkpoint.dir) in the format of {self._form.name} have one of them only; without checkpoint.dir "
                "the job can go on"
            )
        self._leave_snapshots()
        if self._ring_group is None or self._anew:
            return
        before = self._own_copy
        shards, copied = registry.tensor_shards(), [s.name for s in copied_shards(registry, 1)]
        if self._ring is not None:
            self._ring.copy_others(shards, copied)
            self._peers, self._capsules_only = self._ring, False
        else:
            ring = Ring.of_world(registry.rank, registry.world_size, placement()[0])
            self._peers = self._ring = NeighbourCopies(self._context(self._ring_group), ring, shards, copied=copied)
        if before is not self._own_copy:
            self._before, self._undo = before, None
        self._until = version
        # Shown to be equal by then.
        self._as_before = dict(held) if version > 0 and (version == 1 or is_due(version - 1)) else {}

    def describe_own(self) -> str:
        """In words, what becomes of shards that have turned out to be each rank's own."""
        if self._own_copies and self._ring is self._peers:
            return self.describe()
        return "no copies of them: only a checkpoint helps"

    def left_own(self) -> list[str]:
        """Which shards had turned out to be each rank's own in the launch before, whose last version is left here, by
        the names that they had had before."""
        return [] if self._last is None else sorted(turned_out_own(self._last.shards))

    def _leave_snapshots(self) -> None:
        """Another launch would not find them under the names that it knows."""
        self._left_snapshots = True
        if self._ring is not None:
            self._ring.stop_outliving()
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def own_in(self, path: str) -> Sequence[str]:
        """Which shards had turned out to be each rank's own when this checkpoint was written, by the names that they
        had had before. Raises DamagedCheckpointError if it is not whole."""
        return reader.own_shards(Path(path))

    def _as_kept(self, names: Collection[str], shard: str, version: int) -> str | None:
        """Under which of ``names``, of an own copy of ``version``, this rank has the shard; None: under none."""
        if shard in names:
            return shard
        base = base_name(shard)
        mine = owner_of(shard) == self._registry.rank
        known = mine or (version == self._until - 1 and self._registry.rank in self._as_before.get(base, ()))
        return base if known and base in names else None

    # -- recovery ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """After the groups have been abandoned: end what is under way."""
        if self._peers is not None:
            self._peers.halt(self._limits.drain_s)
        if self._next is not None:
            self._next.halt(self._limits.drain_s)
        for copies in self._alone:
            if not copies.wait_idle(self._limits.drain_s):
                raise RestoreError(f"this rank's own pre-step copy was not made within {self._limits.drain_s:g} s")

    def resumed(self, generation: int, version: int) -> None:
        """All ranks are at ``version``: newer copies are void."""
        if self._last is not None:
            self._last.drop()
        if self._members is not None:
            self._become(self._members)
        if self.checkpoint is not None:
            self.checkpoint.withdraw(generation)
        if self._peers is not None:
            self._peers.reset(generation, version)
        for copies in self._alone:
            copies.reset(version)

    def resize(self, members: tuple[int, ...]) -> None:
        """The job consists of these ranks (as it was launched) from the next :meth:`resumed` on. What is kept until
        then may still be needed."""
        self._members = members

    def _become(self, members: tuple[int, ...]) -> None:
        """Every shard of such a job has replicas, so that the neighbour keeps nothing but capsules; where state is
        divided, the ring has been made anew already (:meth:`put_in_place`)."""
        self._members = None
        rank, world = self._registry.rank, self._registry.world_size
        if self.checkpoint is not None:
            self.checkpoint.resize(rank, self._registry.shape.now(members))
        if self._ring is not None and not self._anew:
            alone = world == 1
            self._peers, self._capsules_only = None if alone else self._ring, not alone
            if not alone:
                self._ring.resize(Ring(rank, members, tuple(ring_among(members))))

    # -- a state that is divided otherwise ---------------------------------------------------------

    def make_ready(
        self, shards: Sequence[Shard], version: int, generation: int, place: int, members: Sequence[int]
    ) -> None:
        """``shards`` are what this rank, at ``place`` among ``members``, will have of ``version``: copy them, and have
        the neighbour among these members keep them. Returns when that is done; nothing that is kept so far is given up
        for it. Raises what the exchange raises."""
        self.drop_ready()
        capsule = self._registry.capsule.at(version)
        self._next = self._ring_for(shards, place, members, generation)
        if self._next is None:
            return
        self._next.commit(version, capsule, beside=self._beside(version))
        self._next.wait()

    def drop_ready(self) -> None:
        """What was made ready does not come."""
        if self._next is not None:
            self._next.halt(self._limits.drain_s)
            self._next.close()
            self._next = None

    def put_in_place(self, shards: Sequence[Shard]) -> None:
        """What was made ready is this rank's state now, in ``shards``; the copies of the state before go."""
        if self._ring is not None:
            self._ring.close()
        for copies in self._alone:
            copies.close()
        self._undo = None
        self._peers = self._ring = self._next
        self._next = None
        if self._ring is not None:
            self._ring.adopt(shards)
        elif self._undo_always:
            self.enable_undo()

    def begin_divided(self, shards: Sequence[Shard], place: int, members: Sequence[int]) -> None:
        """This process has just come into a job of ``members``, with ``shards`` that have no content yet."""
        self._next = self._ring_for(shards, place, members, 0)
        self.put_in_place(shards)

    def load_checkpoint(self, path: str, version: int) -> str:
        """Load everything of this rank from a checkpoint. Returns the layout of the ranks that wrote it if that is
        another one: then this rank's own state is that of the script's start. Raises RestoreError if it is damaged or
        of another job."""
        registry, form = self._registry, self._form
        of_calls = self._elastic and registry.batches is not None and registry.batches.of_calls
        other = "" if form is None else reader.other_layout(Path(path), form)
        if other:
            registry.begin_anew()
        plain = reader.load(
            Path(path),
            registry.tensor_shards(),
            rank=registry.rank,
            world=registry.world_size,
            form=form,
            elastic=self._elastic,
            rules=registry.rules() if self._elastic else None,
            shape=registry.shape.now(registry.members) if self._elastic else None,
            stands=registry.stands() if self._elastic else (),
            lend=of_calls,
        )
        capsule = plain.lent if plain.capsule is None else plain.capsule
        if capsule is None and of_calls:
            raise RestoreError(
                f"checkpoint {path} has been converted, and has nothing of the framework's own loop: where its samples "
                "and its log stand; that which it was made of can be read by any number of ranks"
            )
        registry.capsule.keep(version, registry.capture_capsule(registry.drawn()) if capsule is None else capsule)
        registry.common.keep(version, plain.common)
        return other

    def close(self) -> None:
        """The job is over."""
        if self._peers is not None and not self._peers.close():
            groups.abandon("the job is over")  # frees its thread, which the end of the interpreter must not meet
        for copies in self._alone:
            copies.close()
        if self.checkpoint is not None:
            self.checkpoint.close(_CLOSE_S)

    @property
    def _own_copy(self) -> UndoCopy | None:
        """Makes this rank's own pre-step copy; neighbour copies include one."""
        return self._peers.undo if self._own_copies and self._peers is not None else self._undo

    @property
    def _own_copies(self) -> bool:
        """Whether the neighbour copies include own ones."""
        return self._peers is not None and not self._capsules_only

    @property
    def _every_step(self) -> UndoCopy | None:
        """Makes a copy, in every step, of at least what this rank writes to checkpoints."""
        return self._peers.undo if self._own_copies and self._peers is not None else self._snapshot

    @property
    def _kept(self) -> UndoCopy | None:
        """Makes the copy that the node's snapshot process holds, too."""
        outlives = self._keeper is not None and not self._anew and not self._left_snapshots
        return self._every_step if outlives else None

    @property
    def _alone(self) -> list[UndoCopy]:
        """The own copies that are not part of the neighbour's."""
        return [copies for copies in (self._undo, self._snapshot, self._before) if copies is not None]

    @property
    def keeps_undo(self) -> bool:
        """Whether this rank can always go back one version."""
        return self._own_copy is not None

    def inventory(self) -> list[pb.Held]:
        """What this rank holds whole."""
        held = []
        for undo in (self._own_copy, self._snapshot, self._before):
            if undo is None:
                continue
            known = [s.name for s in undo.shards]
            for version, names, _ in undo.held():
                # Without a name, the controller would take it for everything.
                if known and all(self._as_kept(names, name, version) for name in known):
                    held.append(pb.Held(kind=Kind.UNDO, version=version, shards=[*known, *self._of_others(version)]))
        if self._last is not None:
            held += self._last.inventory()
        if self._peers is not None:
            for holding in self._peers.holdings():
                held.append(
                    pb.Held(
                        kind=Kind.COPY,
                        version=holding.version,
                        shards=[holding.shard],
                        nbytes=[holding.nbytes],
                        early=holding.early,
                    )
                )
        return held

    def _of_others(self, version: int) -> list[str]:
        """What this rank has of others' own shards, which were still equal at ``version``."""
        if version != self._until - 1:
            return []
        rank = self._registry.rank
        return [own_name(name, other) for name, ranks in self._as_before.items() for other in ranks if other != rank]

    def restore_own(self, shard: Shard, version: int) -> None:
        """Put what this rank has of ``version`` besides its live state back: decoded, or its own copy. Raises
        RestoreError if it has neither."""
        decoded = None if self._parity is None else self._parity.decoded(shard.name, version)
        if decoded is not None:
            write_back(decoded, shard)
        else:
            write_back(self._own_source(shard.name, version), shard)

    def parity(self, live: int) -> ParityHeld | None:
        """What this rank has to say of parity; ``live``: the version of its tensors, -1: none."""
        return None if self._parity is None else self._parity.held(live)

    def regroup(self, everybody: Sequence[Sequence[int]]) -> None:
        """The parity groups from the next :meth:`resumed` on."""
        if self._parity is not None:
            (ranks,) = (ranks for ranks in everybody if self._registry.rank in ranks)
            self._parity.regroup(ranks)

    def decode(self, group: dist.ProcessGroup, order: DecodeOrder, live: int, *, corrupt: bool) -> int:
        """This rank's part in decoding what its parity group has lost. Returns the bytes that it has got itself.
        ``corrupt`` (fault injection): one bit of them is flipped on the way. Raises RestoreError."""
        if self._parity is None:
            raise RestoreError(f"rank {self._registry.rank} keeps no parity")
        return self._parity.decode(group, order, live, groups.abandon, corrupt=corrupt)

    def _own_source(self, shard: str, version: int) -> ShardSource:
        """Raises RestoreError if this rank has no own copy of this shard."""
        for copies in (self._own_copy, self._snapshot, self._before):
            for kept, names, _ in () if copies is None else copies.held():
                name = self._as_kept(names, shard, version) if kept == version else None
                if copies is not None and name is not None:
                    return replace(copies.source(name, version), name=shard)
        left = None if self._last is None else self._last.source(shard, version)
        if left is None:
            raise RestoreError(f"no own copy of {shard!r} at version {version}")
        return left

    def source(self, kind: str, shard: str, version: int) -> ShardSource:
        """A copy in the form of a transfer's source. Raises RestoreError if it is not held."""
        if kind == Kind.UNDO:
            return self._own_source(shard, version)
        if kind in (Kind.COPY, Kind.PARITY) and self._peers is not None:
            return self._peers.source(shard, version)
        raise RestoreError(f"no {kind} of {shard!r} here")


def _refuse_copies_on_one_node(registry: Registry) -> None:
    """Raises UnsupportedError if replicas have several ranks, and a node that is lost would take what a rank has alone
    and the copies of it: as copies stay at the same place, that depends on where the replicas are."""
    shape, (_, nodes) = registry.shape, placement()
    if shape.each == 1 or shape.replicas == 1 or nodes == 1:
        return
    node = launch_domains(registry.world_size, nodes)
    for rank, keeper in enumerate(ring_among(range(registry.world_size), shape)):
        if node[rank] == node[keeper]:
            raise UnsupportedError(
                f"an elastic job of {shape.text} on {nodes} nodes in which rank {keeper} keeps the copies of what rank "
                f"{rank} has alone, on the same node: a lost node would take both; have the ranks at one place of all "
                "replicas on different nodes (each replica on nodes of its own, and equally many on each)"
            )


def _look(tensors: Sequence[torch.Tensor]) -> int:
    return glance_at_tensors(tensors, 0)


def _part_of_snapshot(registry: Registry) -> list[Shard]:
    """The shards of which this rank keeps the snapshot: each is kept by the rank that would write it to a checkpoint,
    and where there are several nodes by another holder, too, if possible on another one."""
    stride, nodes = placement()
    part: list[Shard] = []
    for shard in registry.tensor_shards():
        first = writer_of(shard)
        keepers = {first}
        if nodes > 1:
            keepers.add(min(shard.holders, key=lambda rank: (rank - first - stride) % registry.world_size))
        if registry.rank in keepers:
            part.append(shard)
    return part


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

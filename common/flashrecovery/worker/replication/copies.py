"""The copies that this worker keeps, and when: neighbour copies, an own pre-step copy, snapshots, fallback checkpoints.

Which of them a job needs follows from its shards (:mod:`flashrecovery.redundancy` has the mechanisms): shards that no
other rank holds go to the neighbour every step; an own pre-step copy is kept where a step cannot be completed from
what its peers hold (see :meth:`Copies.enable_undo`). Where copies are made in every step anyway, or are asked for, they
are *snapshots*: held by a process of the node, too, and so also there when all processes of the job have died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.contract import roles
from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.groups.pace import PacedNetwork
from flashrecovery.plan import Kind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint import writer
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.checkpoint.manifest import StoredCheckpoint
from flashrecovery.redundancy.memory.flat_buffer import Beside
from flashrecovery.redundancy.memory.own_copy import PreStepCopy, write_back
from flashrecovery.redundancy.memory.peer_exchange import CopyContext, PeerCopies
from flashrecovery.snapshot.client import Keeper
from flashrecovery.snapshot.memory import host_id
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.worker.consistency.divergence_check import is_due
from flashrecovery.worker.exit.last_checkpoint import save_last
from flashrecovery.worker.local_state.version_counters import counter_watch, structure_watch
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.replication import survival
from flashrecovery.worker.replication.fallback import FallbackCheckpoints
from flashrecovery.worker.replication.neighbor_ring import NeighborRing
from flashrecovery.worker.replication.own_copies import OwnCopies
from flashrecovery.worker.replication.policy import (
    CopyPolicy,
    PeerProtection,
    copied_shards,
    decide,
    facts_of,
    placement,
    ranks_of_node,
    refuse_settings,
)
from flashrecovery.worker.replication.snapshots import AnnouncedSnapshots, RankSnapshots

if TYPE_CHECKING:
    from flashrecovery.redundancy.parity.copies import ParityCopies

NEIGHBOUR_GROUP, PARITY_GROUP = "flashrecovery-neighbour", "flashrecovery-parity"
_COMPARED = "as their wrappers say; compared when the first step ends"


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
        on_snapshot: Callable[[float], None],
    ) -> None:
        """``on_kept`` is called with the newest version that is kept completely for another rank (-1: none).
        ``on_risk`` is called with a text if something is protected less well than reported at the start. Both may be
        called from any thread. ``on_snapshot``: see :class:`.snapshots.AnnouncedSnapshots`.

        Raises UnsupportedError if copies are asked for where there is one rank only, ``redundancy: replica`` where a
        shard has no replica, or parity where the nodes do not allow it; ConfigError if there is not enough host
        memory, or the checkpoint directory cannot be written."""
        self._registry, self._settings, self._on_published = registry, settings, on_published
        self._drain_s = settings.timeouts.drain_s
        # Only where touches can be seen is it known that nothing else has changed a tensor beside its copy.
        seen = all(roles.touch_mark(adapter) is not None for adapter in registry.adapters if adapter.shards())
        look = counter_watch if seen else None
        facts = facts_of(registry, settings)
        refuse_settings(facts)
        self._snapshots = RankSnapshots(registry, Keeper.from_env(registry.rank))
        self._policy = policy = decide(facts, registry, settings)
        for risk in policy.risks if registry.rank == 0 else ():
            on_risk(risk)
        keep = self._snapshots.outliving
        self._members: tuple[int, ...] | None = None  # of a job that has just changed its size

        def context(name: str) -> CopyContext:
            group = groups.create_control_group(name)
            return CopyContext(group, look=look, same=structure_watch, on_kept=on_kept, on_risk=on_risk)

        self._parity: ParityCopies | None = None
        if policy.protection is PeerProtection.PARITY:
            paced = replace(context(PARITY_GROUP), network=PacedNetwork(), keep=keep)
            self._parity = _parity_of(registry, settings, policy, paced)
        ring = context(NEIGHBOUR_GROUP) if policy.needs_ring else None
        self._ring = NeighborRing(registry, policy, ring, keep)
        self._own = OwnCopies(registry, look, settings.pre_step_copy)
        auto = settings.snapshots.keep == "auto"
        always = settings.snapshots.keep == "always" or (auto and survival.gpus_take_replicas(registry, settings))
        of_one_shape = settings.elastic is None and settings.parallelism is None
        if keep is not None and not self._own_copies and (always or (auto and of_one_shape)):
            part = _part_of_snapshot(registry)
            copies = PreStepCopy(part, share=True, look=look, same=structure_watch, keep=keep)
            if always:
                self._own.keep_snapshot(copies)
            else:
                self._own.take_snapshots(AnnouncedSnapshots(copies, on_snapshot, on_risk, ranks_of_node()))
        if self._own.always:
            self.enable_undo()
        self._fallback = FallbackCheckpoints(registry, settings, on_published, on_error)

    @property
    def across(self) -> bool:
        """See :class:`.policy.CopyFacts`."""
        return self._policy.across

    @property
    def checkpoint(self) -> writer.CheckpointFallback | None:
        """Writes fallback checkpoints."""
        return self._fallback.checkpoint

    @property
    def _peers(self) -> PeerCopies | None:
        """What other ranks keep for this one, and it for them."""
        return self._parity or self._ring.copies

    def take_over(self) -> None:
        """Plain state that belongs to what the process before this one has left."""
        self._snapshots.take_over(self._kept)

    def keep_last(self, version: int, holders: Collection[int], *, live: bool) -> None:
        """The job ends: have the node's snapshot process hold this rank's part of ``version``, which ``holders`` have
        whole. ``live``: the tensors of the shards are of that version. Raises RestoreError if this rank lacks it."""

        def source(shard: Shard) -> ShardSource:
            if live:
                return ShardSource(shard.name, shard.spec(), list(shard.tensors().values()))
            return self._own_source(shard.name, version)

        kept = self._kept
        if kept is not None and self._own.announced is not None and kept.slot(version) is None:
            kept = None  # there is a copy of some versions only
        self._snapshots.keep_last(version, holders, kept, source, self._beside(version))

    def save_last(self, order: pb.KeepLast, generation: int, *, live: bool) -> None:
        """The job ends: write this rank's part of a checkpoint. ``live``: as for :meth:`keep_last`. Raises
        RestoreError."""
        registry, version = self._registry, order.version
        if not live and self._fallback.form is not None:
            raise RestoreError(
                f"rank {registry.rank} has gone on, and {self._fallback.form.name!r} is written of its live state"
            )
        self._fallback.close()  # the part that is being written, if there is one

        def own(name: str) -> ShardSource:
            shard = registry.shards[name]
            if not live or isinstance(shard, ObjectShard):
                return self._own_source(name, version)
            return ShardSource(name, shard.spec(), list(shard.tensors().values()))

        def copied(name: str) -> ShardSource:
            return self.source(Kind.COPY, name, version)

        save_last(registry, self._settings, self._fallback.form, order, generation, (own, copied), self._on_published)

    def describe(self) -> str:
        """As text: what is protected by which copies, what that costs, and which losses it survives."""
        parts = [self._describe_copies(), self._policy.reason, self._describe_snapshots() if self.in_snapshots else ""]
        return "; ".join(part for part in parts if part)

    def survival(self) -> str:
        """What the job survives; see :func:`.survival.say`. A collective."""
        own, outlives = self._every_step is not None, self._kept is not None
        return survival.say(self._registry, self._settings, self._policy, own=own, outlives=outlives)

    def _describe_snapshots(self) -> str:
        if self._own.snapshot is None:
            return "snapshots: the own copies outlive all processes of the job, and cost nothing besides"
        sizes = [s.spec().nbytes for s in self._own.snapshot.shards]
        text = (
            f"snapshots: host memory 2 x {sum(sizes) / 1e6:.1f} MB for this rank's part of the state, which outlives "
        )
        if self._own.announced is None:
            return f"{text}all processes of the job"
        age_s = self._settings.snapshots.max_age_s
        return (
            f"{text}all processes of the job; taken so often that it is at most {age_s:g} s old (snapshots.max_age_s), "
            "or two steps. If all ranks die at once, the job goes back to it"
        )

    def _describe_copies(self) -> str:
        if self.local_states_only:
            return (
                f"replicas: every shard lives on several ranks ({_COMPARED}); each rank's own state (random numbers, "
                "data position) is kept by a rank of another node; survives all but one of a replica set, and the loss "
                "of any one node"
            )
        if self._peers is not None:
            return self._peers.describe()
        if self._registry.world_size == 1:
            return "no copies: a world of one rank has no peer to hold them"
        if self._registry.unique_shards():
            return "no copies of what no other rank holds: only a checkpoint helps"
        text = (
            f"replicas: every shard lives on several ranks ({_COMPARED}); no memory cost; survives the loss of all but "
            "one of these"
        )
        return text if self.in_snapshots else f"{text}; not of all ranks at once (only a checkpoint does, or snapshots)"

    # -- each step --------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """The live state is ``version``: copy it, and send what only this rank has, beside the next step."""
        self._own.start(version, self._beside)
        if self._peers is not None:
            beside = self._beside(version)
            self._peers.commit(version, beside.plain[self._registry.local_state.name], beside=beside)

    def _beside(self, version: int) -> Beside:
        """The plain state of ``version``."""
        registry = self._registry
        plain = {s.name: data for s in (registry.common, registry.local_state) if (data := s.at(version)) is not None}
        return Beside(registry.rank, plain)

    @property
    def local_states_only(self) -> bool:
        """Nothing but rank-local states goes to the neighbour, and there are no own pre-step copies (see
        :meth:`send_local_state`)."""
        return self._ring.local_state_only

    @property
    def in_every_step(self) -> bool:
        """Copies are made in every step, on every rank, which :meth:`wait` waits for."""
        return self._every_step is not None

    @property
    def takes_snapshots(self) -> bool:
        """Of the versions that are announced."""
        return self._own.announced is not None

    def announce_snapshot(self, version: int, generation: int) -> None:
        """Take a snapshot when ``version`` is committed in ``generation``. Any thread."""
        if (announced := self._own.announced) is not None:
            announced.announcement.hear(version, generation)

    @property
    def in_snapshots(self) -> bool:
        """What this rank has to add to the job's state is in memory that outlives all of its processes."""
        return self._kept is not None

    def send_local_state(self, version: int, *, sealed: bool) -> None:
        """Send this rank's rank-local state before the mutation that makes ``version``, on every rank; returns when the
        exchange is complete.

        If survivors keep no copy of the previous version, a rank that dies in the mutation is brought to the *new*
        version, so its rank-local state must have been sent by then. Not ``sealed``: it is not final yet, and no copy
        of it is kept.
        """
        if (peers := self._peers) is None:
            raise RestoreError(f"rank {self._registry.rank} has no neighbour that could keep its rank-local state")
        peers.commit(version, self._registry.local_state.at(version) if sealed else None, early=True)
        peers.wait()

    def save_checkpoint_if_due(self, version: int, generation: int) -> None:
        """The live state is ``version``, and does not change before :meth:`start` has been called for it."""
        self._fallback.save_if_due(version, generation, self._every_step)

    def saves(self, version: int) -> bool:
        """Whether a checkpoint of ``version`` has been announced."""
        return self._fallback.announced(version)

    def wait(self) -> None:
        """The copies of the last committed version are complete. Raises what the exchange has raised."""
        if self._peers is not None:
            self._peers.wait()
        if self._own.snapshot is not None:
            self._own.snapshot.wait()

    def settle(self, given_up: Callable[[], bool]) -> None:
        """The copies of the version that was yielded are complete, or ``given_up()``."""
        if self._peers is not None:
            self._peers.settle(given_up)

    def before_mutation(self, version: int, *, touched: bool = False) -> None:
        """``version`` may be overwritten after this. ``touched``: it has been, in part, since it was yielded, and an
        own copy that is made only now would not be one of ``version``."""
        self._own.finish_snapshot()
        if self._peers is not None and not self.local_states_only:
            self._peers.before_mutation()
        else:
            self._own.before_mutation(version, touched=touched)

    def enable_undo(self, *, brief: bool = False) -> None:
        """Keep an own copy of the pre-step state from the next step on; ``brief``: for a few steps."""
        if not self._own_copies:
            self._own.enable(brief=brief)

    def disable_undo(self) -> None:
        """No more own copies, and none of the steps before: all ranks have them behind."""
        self._own.disable()

    # -- shards that are not what other ranks have under their name -----------------------------------

    def adopt_own(self, held: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Some shards are each rank's own, and not what other ranks have under their name: from ``version`` on, which
        is yielded next (-1: they have been for some time). ``held``: those of this rank, by the names that they had,
        and which ranks were said to hold them. They are copied as others that no other rank holds; on every rank at the
        same place.

        Raises UnsupportedError if that cannot be: replicas are asked for, or checkpoints are in the framework's format.
        """
        names = ", ".join(map(repr, held)) or "shards of other ranks"
        if self._settings.redundancy == "replica":
            raise UnsupportedError(
                f"redundancy 'replica': {names} are not equal on the ranks that were said to hold the same; allowed "
                "here: auto, neighbor, parity, none"
            )
        if self.checkpoint is not None and self._fallback.form is not None:
            raise UnsupportedError(
                f"{names} are not equal on the ranks that were said to hold the same, and fallback checkpoints "
                f"(checkpoint.dir) in the format of {self._fallback.form.name} have one of them only; without "
                "checkpoint.dir the job can go on"
            )
        self._leave_snapshots()
        if not self._ring.can_copy_others():
            return
        before = self._own_copy
        self._ring.copy_others(self._registry.tensor_shards())
        if before is not self._own_copy:
            self._own.supersede(before)
        # Shown to be equal by then.
        equal = version > 0 and (version == 1 or is_due(version - 1))
        self._own.turned_out_own(version, dict(held) if equal else {})

    def describe_own(self) -> str:
        """What becomes of shards that have turned out to be each rank's own."""
        if self._own_copies and self._parity is None:
            return self.describe()
        return "no copies of them: only a checkpoint helps"

    def left_own(self) -> list[str]:
        """Which shards had turned out to be each rank's own in the launch before, whose last version is left here, by
        the names that they had had before."""
        return self._snapshots.left_own()

    def _leave_snapshots(self) -> None:
        """Another launch would not find them under the names that it knows."""
        self._snapshots.give_up()
        self._ring.stop_outliving()
        self._own.drop_snapshot()

    # -- recovery ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """After the groups have been abandoned: end what is under way."""
        if self._peers is not None:
            self._peers.halt(self._drain_s)
        self._ring.halt_ready(self._drain_s)
        self._own.wait_idle(self._drain_s)

    def resumed(self, generation: int, version: int) -> None:
        """All ranks are at ``version``: newer copies are void."""
        self._snapshots.drop_last()
        if self._members is not None:
            self._fallback.resize(self._members)
            self._ring.resize(self._registry.rank, self._members)
            self._members = None
        if self.checkpoint is not None:
            self.checkpoint.withdraw(generation)
        if self._own.announced is not None:
            self._own.announced.announcement.withdraw(generation)
        if self._peers is not None:
            self._peers.reset(generation, version)
        self._own.reset(version)

    def resize(self, members: tuple[int, ...]) -> None:
        """The job consists of these ranks (as it was launched) from the next :meth:`resumed` on. What is kept until
        then may still be needed."""
        self._members = members

    # -- a state that is sharded otherwise ---------------------------------------------------------

    def make_ready(
        self, shards: Sequence[Shard], version: int, generation: int, place: int, members: Sequence[int]
    ) -> None:
        """``shards`` are what this rank, at ``place`` among ``members``, will have of ``version``: copy them, and have
        the neighbour among these members keep them. Returns when that is done; nothing that is kept so far is given up
        for it. Raises what the exchange raises."""
        self.drop_ready()
        self._ring.make_ready(shards, version, generation, (place, members), self._beside(version))

    def drop_ready(self) -> None:
        """What was made ready does not come."""
        self._ring.drop_ready(self._drain_s)

    def put_in_place(self, shards: Sequence[Shard]) -> None:
        """What was made ready is this rank's state now, in ``shards``; the copies of the state before go."""
        self._ring.put_in_place(shards)
        self._own.begin_again(in_ring=self._ring.copies is not None)

    def begin_sharded(self, shards: Sequence[Shard], place: int, members: Sequence[int]) -> None:
        """This process has just come into a job of ``members``, with ``shards`` that have no content yet."""
        self._ring.begin(shards, place, members)
        self._own.begin_again(in_ring=self._ring.copies is not None)

    def load_checkpoint(self, checkpoint: StoredCheckpoint, version: int) -> str:
        """See :meth:`.fallback.FallbackCheckpoints.load`."""
        return self._fallback.load(checkpoint, version)

    def close(self) -> None:
        """The job is over."""
        if self._peers is not None and not self._peers.close():
            groups.abandon("the job is over")  # frees its thread, which the end of the interpreter must not meet
        self._own.close()
        self._fallback.close()

    @property
    def _own_copy(self) -> PreStepCopy | None:
        """Makes this rank's own pre-step copy; neighbour copies include one."""
        return self._peers.undo if self._own_copies and self._peers is not None else self._own.undo

    @property
    def _own_copies(self) -> bool:
        """Whether the neighbour copies include own ones."""
        return self._peers is not None and not self.local_states_only

    @property
    def _every_step(self) -> PreStepCopy | None:
        """Makes a copy, in every step, of at least what this rank writes to checkpoints."""
        if self._own_copies and self._peers is not None:
            return self._peers.undo
        return self._own.snapshot if self._own.announced is None else None

    @property
    def _kept(self) -> PreStepCopy | None:
        """Makes the copy that the node's snapshot process holds, too."""
        snapshots = self._snapshots
        if snapshots.outliving is None or snapshots.given_up or self._policy.ring_of_each_size:
            return None
        return self._every_step or self._own.snapshot

    @property
    def keeps_undo(self) -> bool:
        """Whether this rank can always go back one version."""
        return self._own_copy is not None

    def inventory(self) -> list[pb.Held]:
        """What this rank holds whole."""
        held = [*self._own.inventory(self._own_copy), *self._snapshots.inventory()]
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

    def restore_own(self, shard: Shard, version: int) -> None:
        """Put what this rank has of ``version`` besides its live state back: decoded, or its own copy. Raises
        RestoreError if it has neither."""
        decoded = None if self._parity is None else self._parity.decoded(shard.name, version)
        if decoded is not None:
            write_back(decoded, shard)
        else:
            write_back(self._own_source(shard.name, version), shard)

    def parity(self, live: int) -> pb.Parity:
        """What this rank has to say of parity; ``live``: the version of its tensors, -1: none."""
        return pb.Parity() if self._parity is None else self._parity.message(live)

    def regroup(self, everybody: Sequence[Sequence[int]]) -> None:
        """The parity groups from the next :meth:`resumed` on."""
        if self._parity is not None:
            (ranks,) = (ranks for ranks in everybody if self._registry.rank in ranks)
            self._parity.regroup(ranks)

    def decode(self, group: dist.ProcessGroup, order: pb.Decode, version: int, live: int, *, corrupt: bool) -> int:
        """This rank's part in decoding what its parity group has lost of ``version``. Returns the bytes that it has
        got itself.
        ``corrupt`` (fault injection): one bit of them is flipped on the way. Raises RestoreError."""
        if self._parity is None:
            raise RestoreError(f"rank {self._registry.rank} keeps no parity")
        return self._parity.decode_as_told(group, order, version, live, groups.abandon, corrupt=corrupt)

    def _own_source(self, shard: str, version: int) -> ShardSource:
        """Raises RestoreError if this rank has no own copy of this shard."""
        found = self._own.source(self._own_copy, shard, version) or self._snapshots.source(shard, version)
        if found is None:
            raise RestoreError(f"rank {self._registry.rank} has no pre-step copy of {shard!r} at version {version}")
        return found

    def source(self, kind: str, shard: str, version: int) -> ShardSource:
        """A copy in the form of a transfer's source. Raises RestoreError if it is not held."""
        if kind == Kind.UNDO:
            return self._own_source(shard, version)
        if kind in (Kind.COPY, Kind.PARITY) and self._peers is not None:
            return self._peers.source(shard, version)
        raise RestoreError(f"rank {self._registry.rank} holds no {kind} of {shard!r} at version {version}")


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


def _parity_of(registry: Registry, settings: Settings, policy: CopyPolicy, context: CopyContext) -> ParityCopies:
    """A group of ranks on different nodes keeps parity of what could be lost, and each other's rank-local state. Where
    all ranks are on one node, a rank is lost with nothing but its process."""
    from flashrecovery.redundancy.parity.copies import GroupMember, ParityCopies  # of jobs that keep parity

    (ranks,) = (ranks for ranks in policy.parity_groups if registry.rank in ranks)
    domain = host_id() if placement()[1] > 1 else -1
    return ParityCopies(
        context,
        GroupMember(registry.rank, tuple(ranks), settings.parity, settings.parity_group, domain),
        registry.tensor_shards(),
        copied=[s.name for s in copied_shards(registry, settings.parity)],
    )

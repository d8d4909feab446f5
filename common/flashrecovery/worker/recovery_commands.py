"""A worker's side of a recovery: the controller's commands, carried out on the training thread between two steps.

``stop``: let go of abandoned operations, stand alone, reset what is half-finished, report what this rank holds.
``regroup``: new inside for every process group. ``restore``: transfers and local copies, then plain state.
``resume``: back into the loop. A newer generation voids whatever is under way.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

from flashrecovery import groups
from flashrecovery.contract import roles
from flashrecovery.errors import DrainError, FlashRecoveryError, RegroupError, RestoreError
from flashrecovery.groups.accelerator import on_device
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan import Kind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.checkpoint.manifest import StoredCheckpoint
from flashrecovery.redundancy.checkpoint.published import published
from flashrecovery.runtime import page_reserve
from flashrecovery.runtime.environment import in_changed_layout
from flashrecovery.state.digest import shard_digests
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.version import VERSIONS_KEPT
from flashrecovery.worker.context import Worker
from flashrecovery.worker.registry import Drawn
from flashrecovery.worker.replication.copies import Copies
from flashrecovery.worker.reshard.reshard import Reshaping
from flashrecovery.worker.step.sealing import Sealing
from flashrecovery.worker.transfer.ranges import RangesToReceive, RangesToSend
from flashrecovery.worker.transfer.transfer import exchange, within

if TYPE_CHECKING:
    from flashrecovery.worker.reshard.relayout import RankStaging

log = logging.getLogger("flashrecovery")


class Restorable(Protocol):
    """What the commands need of the loop. A protocol, as it lies above, and makes their executor."""

    copies: Copies
    sealing: Sealing[Drawn]

    @property
    def touched(self) -> bool:
        """Whether tensors of the shards may have changed since the step was yielded."""

    @property
    def can_go_back_anywhere(self) -> bool:
        """Whether also to a version at which this process has never been."""

    def adopt_own(self, names: Collection[str]) -> bool:
        """These shards are each rank's own. Returns whether that is new."""

    def let_go(self) -> None:
        """Free what a step that was cut short has left in memory."""

    def seal_start(self) -> None:
        """Version 0 is what the script has set up."""

    def restore_plain(self, version: int, *, fresh: bool) -> None:
        """All plain state as it was at ``version``. ``fresh``: the data sources stand at their beginning."""

    def resumed(self) -> None:
        """The state of the version that is to be yielded is there."""

    def restored_from_checkpoint(self) -> None:
        """The state has come from a fallback checkpoint."""

    def scripts_ended(self, calls: int) -> None:
        """The scripts of some ranks have come to their end after this number of calls; 0: of none."""

    def replaced(self) -> None:
        """The tensors of the shards have been replaced by others of the version that is live."""

    def leave(self) -> NoReturn:
        """End this process: its rank leaves the job."""


class RecoveryExecutor:
    """Carries out commands for one ``loop``."""

    def __init__(self, worker: Worker, loop: Restorable) -> None:
        self._worker = worker
        self._loop = loop
        self._fresh = True  # the data sources of this process stand at their beginning
        self._generation = 0  # of the restore that is carried out
        self._aborts_stuck = False
        self._came_at = 0  # the version at which this process has come into a loop that others had begun
        self._reshaping = Reshaping(worker.registry, loop.copies, worker.rank, worker.members)
        self._told: tuple[int, list[pb.ShardNeed]] = (0, [])  # the needs in the newest answer to a stop, its generation

    # -- waiting for commands ---------------------------------------------------------------------

    def join(self, num_steps: int | None) -> None:
        """Report this worker's shards at its first step, and wait until it may begin."""
        worker = self._worker
        page, setup = worker.connection.page, worker.connection.setup
        if setup is not None:
            setup.stop(worker.notice)
        if not worker.connection.detached:
            log = groups.take_setup_log()
            if not page.write_setup_log(log if setup is None else setup.record.behind(log)):
                worker.notice(
                    NoticeKind.SETUP_LOG_TOO_LARGE,
                    "a replacement will not see what set-up collectives had returned here",
                )
            self._loop.seal_start()
        elif difference := groups.setup_difference():
            worker.notice(
                NoticeKind.SETUP_DIFFERS,
                f"the script's set-up is not the same on every start: {difference}; what this replacement got from "
                "collectives before its first step may be other data than the rank that it replaces had",
            )
        self._loop.copies.take_over()
        worker.registry.remember_start()
        of_another_layout = worker.settings.elastic is not None and in_changed_layout()
        if worker.settings.resume and worker.settings.checkpoint.dir is not None and not of_another_layout:
            for version, path in published(worker.settings.checkpoint.dir):
                saved = pb.CheckpointSaved(version=version, path=str(path), found=True)
                worker.send(pb.FromWorker(checkpoint=saved))
        if worker.connection.unprotected_steps is not None:
            worker.connection.unprotected_steps.over()
        message = pb.Joined(
            rank=worker.rank,
            generation=worker.gate.generation,
            needs=self._needs(digests=not worker.connection.detached),
            held=self._held(),
            steps=-1 if num_steps is None else num_steps,
            hang_step_s=worker.settings.timeouts.hang_step_s,
            checkpoints=worker.settings.checkpoint.dir is not None,
            checkpoint_interval_s=_seconds(worker.settings.checkpoint.interval_s),
            start=worker.connection.start_profile.joined(),
            backends=_group_backends(),
            uses_device=worker.device.runs_behind,
            in_snapshots=self._loop.copies.in_snapshots,
            takes_snapshots=self._loop.copies.takes_snapshots,
            parity=self._loop.copies.parity(-1),
            sizes=() if worker.registry.batches is None else worker.registry.batches.sizes,
            batches="" if worker.registry.batches is None else json.dumps(worker.registry.batches.settings),
            facts="" if worker.own_staging is None else worker.own_staging.facts.text(),
        )
        if worker.settings.elastic is not None:
            shape = worker.registry.shape
            message.outline = worker.registry.outline()
            message.replicas, message.each, message.inner = shape.replicas, shape.each, shape.inner
        if not worker.connection.detached:
            worker.gate.initialised()
        worker.send(pb.FromWorker(joined=message))
        self.run()

    def run(self) -> None:
        """Carry out commands until the next resume."""
        self._worker.gate.leave_step()
        self._until_resumed()

    def pause(self) -> None:
        """This is the step at which the job changes: report it, and carry out commands until the next resume."""
        worker = self._worker
        if worker.gate.pause_with_copies:
            self._loop.copies.settle(lambda: worker.gate.held or worker.gate.stopped)
        worker.gate.leave_step(done=True)  # settled: all that this rank has to do for its version is done
        paused = pb.Paused(rank=worker.rank, generation=worker.gate.generation, version=worker.gate.version)
        worker.send(pb.FromWorker(paused=paused))
        self._until_resumed()

    def _until_resumed(self) -> None:
        while not self._carry_out(self._next_command()):
            pass

    def wait_for_release(self) -> bool:
        """Called when all steps are done here. True: all ranks have taken theirs. False: a recovery has taken place
        meanwhile."""
        self.tell_done()
        while True:
            command = self._next_command()
            if command.HasField("release"):
                return True
            if self._carry_out(command):
                return False

    def _next_command(self) -> pb.Command:
        return self._worker.control.inbox.get()

    def tell_done(self) -> None:
        """Tell the controller that this rank takes no more steps."""
        worker = self._worker
        worker.gate.leave_step(done=True)
        done = pb.Done(rank=worker.rank, generation=worker.gate.generation, version=worker.gate.version)
        worker.send(pb.FromWorker(done=done))

    def _carry_out(self, command: pb.Command) -> bool:
        """Carry out one command. Returns True after a resume."""
        worker = self._worker
        if worker.gate.outdated(command.generation):
            return False
        body = command.WhichOneof("body")
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank)
        resumed = False
        try:
            if body == "stop":
                self._stop(command, reply)
            elif body == "regroup":
                self._regroup(command)
            elif body == "restore":
                self._generation = command.generation
                self._restore(command.restore, reply)
            elif body == "staging":
                self._staging(command.staging, reply)
            elif body == "resume":
                resumed = self._resume(command)
            elif body == "keep_last":
                self._keep_last(command.keep_last, command.generation)
            elif body == "leave":
                self._loop.leave()
        except (RuntimeError, FlashRecoveryError) as e:
            worker.end_if_context_is_lost(e)
            if not (isinstance(e, FlashRecoveryError) or groups.is_communication_error(e)):
                raise
            if worker.gate.outdated(command.generation):
                return False  # a newer stop has cut it short
            log.warning("%s failed: %s: %s", body, type(e).__name__, e)
            reply.error_type, reply.error = type(e).__name__, str(e)
            reply.fatal = isinstance(e, FlashRecoveryError) and not isinstance(
                e, (DrainError, RegroupError, RestoreError)
            )
        worker.send(pb.FromWorker(reply=reply))
        if body == "stop":
            try:
                self._reset()
            except RuntimeError as e:
                worker.end_if_context_is_lost(e)
                raise
        return resumed

    # -- the commands -----------------------------------------------------------------------------

    def _stop(self, command: pb.Command, reply: pb.Reply) -> None:
        """Let go of everything that is under way, and report what this rank holds."""
        worker = self._worker
        worker.faults.hit("recovery:quiescing", worker.gate.version)
        self._loop.copies.stop()
        drain_s = worker.settings.timeouts.drain_s
        beside = not self._aborts_stuck and groups.may_connect_beside_aborts()
        report = groups.drain(drain_s, aborts=not beside)
        worker.device.settle(drain_s)  # until the aborts have ended its kernels: they may wait for a dead peer
        groups.detach_all()
        if not report.quiet:
            # What is left might still write into what this rank restores.
            raise DrainError(
                f"operations have not ended {drain_s:g} s after they were abandoned (timeouts.drain_s): {report}"
            )
        if worker.gate.live >= 0 and self._loop.touched:
            worker.gate.torn()
        placed = -1
        if command.stop.unsure:
            self._reshaping.say(reply)
        else:
            placed = self._reshaping.settle(command.stop.layout)
        if placed >= 0:
            worker.gate.placed(placed)
            self._loop.replaced()
        reply.live_version = worker.gate.live
        reply.held.extend(self._held())
        reply.parity.CopyFrom(self._loop.copies.parity(worker.gate.live))
        reply.late.extend(sorted(v for v, late in self._loop.sealing.late.items() if late))
        needs = self._needs(digests=False)
        if self._told != (command.stop.needs_known, needs):
            reply.needs.extend(needs)
        self._told = (command.generation, needs)

    def _reset(self) -> None:
        """Drop what is half-finished, and the memory that it takes up; after the report, while the controller waits for
        others."""
        self._loop.let_go()
        dropped = self._worker.registry.gradient_bytes()
        for adapter in self._worker.registry.adapters:
            adapter.reset()
        self._worker.device.make_room()
        page_reserve.begin(dropped)  # as many gradients as there were may be made in the restore

    def _staging(self, staging: pb.Stage, reply: pb.Reply) -> None:
        """Write what another layout needs of this rank; then this process ends."""
        worker = self._worker
        worker.faults.hit("recovery:stashing", worker.gate.version)
        reply.staged_bytes, alike = self._own_staging().write(
            staging,
            lambda item, version: self._source(item.kind, item.shard, version),
            self._reshaping.replicas,
        )
        reply.sent_digests.update(alike)

    def _keep_last(self, order: pb.KeepLast, generation: int) -> None:
        """The job ends: this process's memory goes with it."""
        live = self._worker.gate.live == order.version
        if not order.directory:
            self._loop.copies.keep_last(order.version, frozenset(order.holders), live=live)
            return
        if self._worker.registry.checkpoint_format() is not None:  # it writes what the framework has now
            self._loop.restore_plain(order.version, fresh=False)
        self._loop.copies.save_last(order, generation, live=live)

    def _own_staging(self) -> RankStaging:
        """Raises RestoreError."""
        if self._worker.own_staging is None:
            raise RestoreError("the parallelism of this job cannot change: it was launched without --parallelism")
        return self._worker.own_staging

    def _regroup(self, command: pb.Command) -> None:
        worker = self._worker
        worker.faults.hit("recovery:regrouping", worker.gate.version)
        message = command.regroup
        if message.parity:
            self._loop.copies.regroup([group.ranks for group in message.parity])
        if message.members:
            self._resize(tuple(message.members))
        if message.own:
            self._loop.adopt_own(message.own)
        if worker.connection.detached and message.layout:
            self._reshaping.begin(tuple(message.layout))
        addresses = tuple((server.host, server.port) for server in message.stores)
        try:
            groups.attach(groups.Servers(addresses, message.deadline_s), command.generation, message.deadline_s)
        finally:  # the next stop waits for aborts that have taken all of the deadline, and this process is replaced
            self._aborts_stuck = not worker.gate.outdated(command.generation) and bool(groups.stuck_aborts())

    def _resize(self, members: tuple[int, ...]) -> None:
        """The job consists of these ranks (as it was launched) from now on. The groups stand alone meanwhile."""
        worker = self._worker
        if members == worker.members:
            return
        position, size = members.index(worker.rank), len(members)
        groups.resize(members, worker.rank, worker.registry.shape)
        worker.has_members(members)
        worker.registry.resize(members, worker.rank)
        for adapter in roles.elastic(worker.registry.adapters):
            adapter.resized()
        self._loop.copies.resize(worker.members)
        os.environ.update(RANK=str(position), WORLD_SIZE=str(size), ROLE_RANK=str(position), ROLE_WORLD_SIZE=str(size))

    def _restore(self, restore: pb.Restore, reply: pb.Reply) -> None:
        worker = self._worker
        version = restore.version
        corrupt = worker.faults.hit("recovery:restoring", worker.gate.version) == "corrupt"
        if restore.checkpoint:
            worker.gate.torn()
            otherwise = self._reshaping.begin(worker.members)  # what there is of another sharding is given up
            checkpoint = StoredCheckpoint.open(Path(restore.checkpoint))
            own = self._loop.adopt_own(checkpoint.own_shards)
            other = self._loop.copies.load_checkpoint(checkpoint, version)
            if otherwise:
                self._loop.replaced()
            if otherwise or own:
                reply.next_needs.extend(self._needs(digests=False))
            if other and worker.rank == 0:
                worker.notice(
                    NoticeKind.CHECKPOINT_LAYOUT_MISMATCH,
                    f"{restore.checkpoint} was written with {other}: random numbers and data begin as in a new job",
                )
            self._fresh = True  # the data stands somewhere else, too
            self._loop.restored_from_checkpoint()
        elif restore.HasField("staging"):
            worker.gate.torn()
            reply.bytes_received += self._own_staging().read(restore.staging, version, restore.deadline_s)
            self._fresh = True
        else:
            if restore.HasField("decode"):
                reply.bytes_received += self._decode(restore, version, corrupt)
            self._take_local(restore, version)
            if not self._transfer(restore, version, reply, corrupt):
                if restore.HasField("reshape"):
                    raise RestoreError("a shard did not arrive as it was sent, and all ranks wait for it")
                return  # the controller sees the digests, and sends the wrong shards again from other sources
        # Where it has never been, its data sources cannot go back by themselves.
        self._loop.restore_plain(version, fresh=self._fresh or version < self._came_at)
        if restore.HasField("reshape"):
            self._reshape(restore, reply, corrupt)
        elif not restore.checkpoint and not restore.HasField("staging") and worker.gate.live != version:
            # All of it has arrived, and is verified. Its source may be gone before this rank is resumed.
            worker.gate.placed(version)
            self._loop.replaced()
        worker.faults.hit("recovery:verifying", worker.gate.version)

    def _reshape(self, restore: pb.Restore, reply: pb.Reply, corrupt: bool) -> None:
        """Make ready what this rank has when the job's state is sharded among its members."""
        worker = self._worker
        worker.faults.hit("recovery:reshaping", worker.gate.version)
        with within(restore.deadline_s):
            moved, needs = self._reshaping.make_ready(
                restore.reshape, restore.version, self._generation, corrupt=corrupt
            )
        reply.bytes_received += moved.received
        reply.reshaped_bytes, reply.lacking_bytes = moved.received, moved.lacking
        reply.next_needs.extend(needs)

    def _decode(self, restore: pb.Restore, version: int, corrupt: bool) -> int:
        """Do this rank's part in decoding what its parity group has lost. Returns the bytes that it has got itself."""
        group = groups.control_group()
        if group is None:
            raise RestoreError("no process group to decode over")
        with within(restore.deadline_s):
            live = self._worker.gate.live
            return self._loop.copies.decode(group, restore.decode, version, live, corrupt=corrupt)

    def _take_local(self, restore: pb.Restore, version: int) -> None:
        """Put back what this rank itself, or its page, holds at ``version``."""
        worker = self._worker
        for name in restore.local:
            shard = worker.registry.shards[name]
            if isinstance(shard, ObjectShard):
                if shard.at(version) is None:
                    data = worker.connection.page.read_local_state(version)
                    if data is None:
                        raise RestoreError(f"{name!r} at version {version} is no longer in the page")
                    shard.keep(version, data)
            else:
                worker.gate.torn()
                self._loop.copies.restore_own(shard, version)

    def _transfer(self, restore: pb.Restore, version: int, reply: pb.Reply, corrupt: bool) -> bool:
        """Do this rank's part of the transfers. False if something has arrived that is not what was sent."""
        worker = self._worker
        outgoing: dict[int, list[ShardSource]] = {}
        incoming: dict[int, list[str]] = {}
        number = {rank: place for place, rank in enumerate(worker.members)}  # in the groups
        for item in restore.transfers:
            if item.source == worker.rank:
                outgoing.setdefault(number[item.dest], []).append(self._source(item.kind, item.shard, version))
            else:
                incoming.setdefault(number[item.source], []).append(item.shard)
        ranges_out: list[RangesToSend] = []
        ranges_in: list[RangesToReceive] = []
        for one in restore.ranged:
            if one.dest == worker.rank:
                ranges_in.append(RangesToReceive(tuple(number[rank] for rank in one.holders), one.number, one.shards))
            else:
                sources = [self._source(one.kind, shard, version) for shard in one.shards]
                ranges_out.append(RangesToSend(number[one.dest], one.number, sources))
        if not (outgoing or incoming or ranges_out or ranges_in):
            return True
        arriving = [name for names in (*incoming.values(), *(one.names for one in ranges_in)) for name in names]
        if arriving:
            worker.gate.torn()
        group = groups.control_group()
        if group is None:
            raise RestoreError("no process group to restore over")
        with within(restore.deadline_s):
            report = exchange(
                group,
                outgoing,
                incoming,
                worker.registry.shards,
                device=groups.device_group(),
                corrupt=self._to_corrupt(arriving) if corrupt else frozenset(),
                ranges_out=ranges_out,
                ranges_in=ranges_in,
            )
        wrong = report.mismatched if worker.settings.verify else []
        for name in (n for n in arriving if n not in wrong):
            shard = worker.registry.shards[name]
            if isinstance(shard, ObjectShard):
                shard.adopt(version)
        reply.bytes_received += report.bytes_received
        reply.bytes_on_device = report.bytes_on_device
        reply.sent_digests.update(report.sent_digests)
        reply.received_digests.update(report.received_digests)
        return not wrong

    def _to_corrupt(self, arriving: Collection[str]) -> frozenset[str]:
        """What fault injection damages: one shard of plain bytes and one of tensors, always the same ones."""
        shards = self._worker.registry.shards
        names = sorted(arriving)
        plain = [n for n in names if isinstance(shards[n], ObjectShard)]
        return frozenset(plain[:1] + [n for n in names if n not in plain][:1])

    def _source(self, kind: str, name: str, version: int) -> ShardSource:
        if kind == Kind.LENT:
            return ShardSource(name, *self._worker.registry.local_state.tensors_at(version))
        shard = self._worker.registry.shards.get(name)
        if isinstance(shard, ObjectShard):
            return ShardSource(name, *shard.tensors_at(version))
        if kind == Kind.LIVE and shard is not None:
            return ShardSource(name, shard.spec(), list(shard.tensors().values()))
        return self._loop.copies.source(kind, name, version)

    def _resume(self, command: pb.Command) -> bool:
        worker = self._worker
        version = command.resume.version
        self._reshaping.put_in_place()
        self._reshaping.check(worker.members)
        if command.generation > 0:
            worker.faults.hit("recovery:resuming", version)
        # At the start the generation stays the same, and a pause may have come before this thread has got the resume.
        if command.resume.HasField("pause") or command.generation != worker.gate.generation:
            pause = command.resume.pause if command.resume.HasField("pause") else pb.Pause(step=-1)
            worker.gate.order_pause(pause.step, copies=pause.copies)
        if not worker.gate.resume(version, command.generation):
            return False
        page_reserve.end()
        groups.set_detached(False)
        worker.control.resumed()
        self._came_at = version if self._fresh else min(self._came_at, version)
        self._fresh = False
        if worker.connection.detached and worker.registry.world_size > 1:
            worker.connection.attached()
        self._loop.copies.resumed(command.generation, version)
        self._loop.scripts_ended(command.resume.ended)
        self._loop.resumed()
        return True

    # -- inventory --------------------------------------------------------------------------------

    def _needs(self, *, digests: bool) -> list[pb.ShardNeed]:
        needs = []
        shards = self._worker.registry.shards.values()
        compared = [s for s in shards if digests and len(s.holders) > 1 and not isinstance(s, ObjectShard)]
        found = shard_digests({s.name: (list(s.tensors().values()), None) for s in compared}, on_device)
        for shard in shards:
            if isinstance(shard, ObjectShard):
                needs.append(pb.ShardNeed(name=shard.name, nbytes=shard.nbytes()))
                continue
            need = pb.ShardNeed(name=shard.name, nbytes=shard.spec().nbytes, digest=found.get(shard.name, ""))
            need.sharded = shard.name in self._worker.registry.sharded_shards
            needs.append(need)
        return needs

    def _held(self) -> list[pb.Held]:
        """What this rank holds besides its live state, for the report."""
        worker = self._worker
        held = []
        for shard in (worker.registry.common, worker.registry.local_state):
            held += [
                pb.Held(
                    kind=Kind.UNDO,
                    version=v,
                    shards=[shard.name],
                    nbytes=[shard.nbytes()],
                    early=shard.early(v),
                )
                for v in shard.versions()
                if v != worker.gate.live
            ]
        in_page, local_state = self._in_page(), worker.registry.local_state.name
        early = worker.connection.page.early_local_states() if in_page else []
        held += [
            pb.Held(kind=Kind.PAGE, version=v, shards=[local_state], nbytes=[0], early=v in early) for v in in_page
        ]
        return held + self._loop.copies.inventory()

    def _in_page(self) -> list[int]:
        """Versions whose rank-local state stands only in this process's page, where the process before it has left it:
        all of them before this process has come into the loop; later those from before that, for as long as others hold
        them."""
        worker = self._worker
        page, local_state = worker.connection.page, worker.registry.local_state
        if worker.connection.detached:
            return page.local_state_versions()
        recently = 0 < self._came_at <= worker.gate.version < self._came_at + VERSIONS_KEPT
        if not recently or not self._loop.can_go_back_anywhere:
            return []
        return [v for v in page.local_state_versions() if v < self._came_at and local_state.at(v) is None]


def _group_backends() -> list[pb.GroupBackend]:
    return [
        pb.GroupBackend(
            name=one.name, torch_class=one.torch_class, device=one.device, chosen_by=one.chosen_by, groups=count
        )
        for one, count in groups.backends_in_use().items()
    ]


def _seconds(interval: float | Literal["auto"]) -> float:
    return 0.0 if interval == "auto" else interval

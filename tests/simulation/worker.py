"""A model of a training process: the real gate, page, habits and sealing, everything else of it in a few lines.

It does what :mod:`flashrecovery.worker.loop`, ``transaction``, ``recoverer``, ``control`` and ``copies`` do, in the
same order and with the same messages, on numbers instead of tensors (:mod:`.content`). Its two threads are two tasks:
one answers the agent at once, wherever the other one is.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn

from flashrecovery.errors import DivergedError, DrainError, StepInterrupted
from flashrecovery.plan.membership.placement import ring_of
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.state.version import VERSIONS_KEPT
from flashrecovery.worker.consistency import divergence_check
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.local_state.step_profile import StepProfile
from flashrecovery.worker.step.sealing import Sealing
from tests.simulation import content
from tests.simulation.content import Content, Own
from tests.simulation.fabric import PeerLost, Port
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.process import SimPage
    from tests.simulation.world import World

_POLL_S = 0.005
_LOOK_S = 0.1
Drawn = tuple[Own, int]
"""All that is a rank's own: with the registered object, if that is."""


class Left(Exception):
    """The rank leaves the job."""


class WouldWait(Exception):
    """The training thread would wait for the control thread here."""


class NoWaiting:
    """In place of the gate's condition: the one thread of the simulation must not wait in it."""

    def __enter__(self) -> NoWaiting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> NoReturn:
        raise WouldWait

    def notify_all(self) -> None:
        pass


class Kept:
    """Small plain state by version, the last three, as in :class:`flashrecovery.state.object_shard.ObjectShard`."""

    def __init__(self) -> None:
        self.at: dict[int, bytes] = {}
        self.early: set[int] = set()

    def keep(self, version: int, data: bytes, *, early: bool = False) -> None:
        self.at[version] = data
        (self.early.add if early else self.early.discard)(version)
        for old in sorted(self.at.keys() - {version})[: 1 - VERSIONS_KEPT]:
            del self.at[old]

    def drop_after(self, version: int) -> None:
        self.at = {v: d for v, d in self.at.items() if v <= version}
        self.early = {v for v in self.early if v <= version}


class Copies:
    """Own pre-step copies and those for the neighbour, as in :mod:`flashrecovery.worker.replication.copies`."""

    def __init__(self, worker: ModelWorker, stride: int, nodes: int) -> None:
        self._w = worker
        world = worker.world.size
        unique = worker.script.unique
        several = nodes > 1 or worker.world.shape.beyond > 0
        self._between_nodes, self._stride, self._per_node = unique or several, stride, world // nodes
        if worker.rank < world:  # else it is of no ring yet
            self._become(tuple(range(world)))
        else:
            self.neighbour = self._between_nodes
        self.local_states_only = self.neighbour and not unique
        self.next_members: tuple[int, ...] = ()
        self.undo: dict[int, Content] = {}
        self.kept: dict[int, tuple[bytes, int, bool, int]] = {}
        self.own_copies = self.neighbour and not self.local_states_only
        self.undo_on = self.own_copies
        self._exchange: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._halted = False
        self._rounds = 0

    def _become(self, members: tuple[int, ...]) -> None:
        """The ring of these ranks."""
        self.neighbour = len(members) > 1 and self._between_nodes
        if self.neighbour:
            place, ring = members.index(self._w.rank), ring_of(members, self._stride, self._per_node)
            self.target, self.owner = members[ring[place]], members[ring.index(place)]

    async def settle(self) -> None:
        """The copies of the version that was yielded are complete; or someone is stopped, or is to be."""
        gate = self._w.gate
        while self._exchange is not None and not (self._exchange.done() or gate.held or gate.stopped):
            await asyncio.sleep(_POLL_S)

    def start(self, version: int) -> None:
        if self.neighbour:
            self._commit(version, self._w.local_state.at[version])

    def _commit(self, version: int, local_state: bytes | None, *, early: bool = False) -> None:
        if self.own_copies:
            self.hold(version)
        before, self._rounds = self._exchange, self._rounds + 1
        self._exchange = asyncio.get_running_loop().create_task(self._run(version, local_state, early, before))

    async def _run(
        self, version: int, local_state: bytes | None, early: bool, before: asyncio.Task[None] | None
    ) -> None:
        port, w, key = self._w.port, self._w, ("copy", version, self._rounds)
        if before is not None:
            await asyncio.wait({before})
        try:
            port.send(self.target, key, (local_state, w.now.unique if self.own_copies else 0, early))
            while len(self.kept) >= 2:  # the oldest is overwritten
                del self.kept[min(self.kept)]
            theirs, unique, their_early = await port.receive(self.owner, key)
            if theirs is not None and not self._halted:
                self.kept[version] = (theirs, unique, their_early, self.owner)
        except PeerLost as e:
            self._error = e

    async def send_local_state(self, version: int, *, sealed: bool) -> None:
        await self.wait()
        self._commit(version, self._w.local_state.at[version] if sealed else None, early=True)
        await self.wait()

    async def wait(self) -> None:
        """The exchange of the last commit is complete."""
        if self._exchange is not None:
            await asyncio.wait({self._exchange})
        if self._error is not None:
            raise PeerLost(str(self._error))
        if self._halted:
            raise StepInterrupted

    def hold(self, version: int) -> None:
        if version not in self.undo:
            while len(self.undo) >= 2:
                del self.undo[min(self.undo)]
            self.undo[version] = self._w.now

    def before_mutation(self, version: int, *, needs_undo: bool) -> None:
        if self.own_copies:
            return
        if needs_undo:
            self.hold(version)
        else:
            self.undo.clear()

    async def stop(self) -> None:
        self._halted = True
        if self._exchange is not None:
            await asyncio.wait({self._exchange})

    def resumed(self, version: int) -> None:
        if self.next_members:
            self._become(self.next_members)
            self.local_states_only, self.next_members = self.neighbour, ()
        self._halted, self._error, self._rounds = False, None, 0
        self.kept = {v: k for v, k in self.kept.items() if v <= version}
        self.undo = {v: k for v, k in self.undo.items() if v <= version}

    def inventory(self) -> list[pb.Held]:
        w = self._w
        names = w.tensor_names()
        held = [pb.Held(kind="undo", version=v, shards=names) for v in sorted(self.undo)]
        for version in sorted(self.kept):
            owner = self.kept[version][3]
            shards = [f"capsule@{owner}"] + ([f"zero@{owner}"] if self.own_copies else [])
            for name in shards:
                early = name.startswith("capsule@") and self.kept[version][2]
                held.append(pb.Held(kind="copy", version=version, shards=[name], nbytes=[8], early=early))
        return held


class ModelWorker:
    """One training process, from its Assign to its end. ``say`` sends to the agent."""

    def __init__(
        self, world: World, process: Process, page: SimPage, assign: pb.Assign, say: Callable[[pb.FromWorker], None]
    ) -> None:
        self.world = world
        self.script = world.script
        self.process = process
        self.page = page
        self.rank: int = assign.rank
        self.detached: bool = assign.detached
        self._say = say
        self.gate = Gate(page, assign.generation)
        self.gate.lock = NoWaiting()  # type: ignore[assignment]
        self.members: tuple[int, ...] = tuple(range(world.size))
        self.shape = world.shape.replicas
        self.param = "param" if self.shape.each == 1 else f"param#{self.shape.model_rank(self.rank)}"
        self.now: Content = content.start(self.script, self._like)
        self.plain = 0
        self.common, self.local_state = Kept(), Kept()
        self.habits = StepProfile()
        self.copies = Copies(
            self, int(assign.env["FLASHRECOVERY_NEIGHBOUR_STRIDE"]), int(assign.env["GROUP_WORLD_SIZE"])
        )
        self.port: Port = world.fabric.open(self.rank, process)
        self.mute = self.dirty = False
        self.spoilt = False
        """Something may still write into its state; the process is to be replaced."""
        self.ignored_at: dict[int, float] = {}
        """When a mute process was asked to hold, by generation."""
        self.busy_until = 0.0
        self.proven = not self.detached
        """All ranks have shown that they agree since this one was last told to go on."""
        self._batches: dict[int, tuple[bytes, int]] = {}
        self._digests: dict[int, int] = {}
        self._announced = -1
        self._commands: deque[pb.Command] = deque()
        self._control = asyncio.Event()
        self._inbox: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._changed = asyncio.Event()
        self.sealing: Sealing[Drawn] = Sealing(self.habits, self)
        self._unsettled = self._committed = self._void_run = False
        self._proof_due = self.detached
        self.controller_heard = True
        self._needs_told: int = 0
        self._fresh = self.detached
        self.came_at = 0
        self._generation_told = assign.generation
        self._held_for = -1
        self.over = False

    @property
    def _like(self) -> int:
        """The rank whose content this one's is."""
        return 0 if self.script.micro_batches else self.rank

    # -- control thread -----------------------------------------------------------------------------

    def hear(self, command: pb.Command) -> None:
        """From the agent."""
        self.world.on_moment(f"hears {command.WhichOneof('body')}")
        self._commands.append(command)
        self._control.set()

    async def control(self) -> None:
        while True:
            while not self._commands:
                self._control.clear()
                await self._control.wait()
            command = self._commands.popleft()
            body = command.WhichOneof("body")
            if self.mute and body in ("hold", "stop", "ping"):
                if body == "hold":
                    self.ignored_at.setdefault(command.generation, self.world.loop.now)
                continue
            if body == "hold":
                settled, mutating, version = self.gate.hold(command.generation)
                reply = pb.Reply(serial=command.serial, generation=command.generation, rank=command.rank)
                reply.position.CopyFrom(pb.Position(settled=settled, mutating=mutating, version=version))
                self._held_for = command.generation
                self._say(pb.FromWorker(reply=reply))
            elif body == "stop":
                await self._stop_thread(command)
            elif body == "ping":
                self._say(pb.FromWorker(hang_report=pb.HangReport(rank=self.rank, answered=True)))
            elif body == "keep_undo":
                self.habits.hear(command.keep_undo.step)
            elif body == "pause":
                if command.generation == self.gate.generation:
                    self.gate.order_pause(command.pause.step, copies=command.pause.copies)
            elif body == "checkpoint":
                self._announced = command.checkpoint.version
            elif body is not None and body != "fault":
                self._inbox.put_nowait(command)
            self._changed.set()

    async def _stop_thread(self, command: pb.Command) -> None:
        gate, limits = self.gate, self.world.config.timeouts
        if gate.stale(command.generation):
            return
        finishing = gate.stop(command.generation, command.stop.finish_to)
        self._changed.set()
        if finishing:
            if gate.waits_in_barrier:
                self.port.abandon()
            deadline = self.world.loop.now + command.stop.mutation_grace_s
            while gate.finishing and self.world.loop.now < deadline:
                since = self.port.pending_since
                if since is not None and self.world.loop.now - since > limits.mutation_blocked_s:
                    break
                await asyncio.sleep(_POLL_S)
        gate.give_up()
        self.port.abandon()
        self._inbox.put_nowait(command)

    def can_step(self) -> bool:
        """Whether it takes steps, for all that it knows."""
        return not self.over and self.gate.generation > -1 and not self.gate.stopped and self.gate._stepping

    def _stepping_now(self) -> bool:
        return self.can_step()

    # -- training thread ----------------------------------------------------------------------------

    async def main(self) -> None:
        """The script."""
        try:
            await self._script()
        except Left:
            self.over = True
            self.world.exits(self.process, 0)
        except (PeerLost, StepInterrupted, DivergedError) as e:
            self.fail(
                type(e).__name__, str(e), communication=isinstance(e, PeerLost), fatal=isinstance(e, DivergedError)
            )

    def fail(self, kind: str, text: str, *, communication: bool = False, fatal: bool = False) -> None:
        """The script ends with this exception."""
        self.world.note(f"rank {self.rank} (pid {self.world.pid_of(self.process)}) raises {kind}: {text}")
        words = pb.LastWords(exception=kind, message=text, communication=communication, fatal=fatal)
        self._say(pb.FromWorker(last_words=words))
        self.world.exits(self.process, 1)

    async def _script(self) -> None:
        await self._work(self.script.startup_s)
        if not self.detached:
            # the groups of the launch: all are there, or wait for each other
            await self.port.attach(self.gate.generation, 2 * self.world.config.timeouts.startup_s)
        await self._join()
        while not await self._finished():
            await self._step()
        self.over = True
        self.world.ended_well(self)
        self.world.exits(self.process, 0)

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.7 + 0.6 * self.world.random.random()))

    async def _waiting(self, operation: Any) -> Any:
        """An operation on the group, which the control thread can see."""
        self.port.pending_since = self.world.loop.now
        try:
            return await operation
        finally:
            self.port.pending_since = None

    async def _join(self) -> None:
        if not self.detached:
            await self._compare_objects()
            self.page.write_setup_log(b"setup")
            self.sealing.start()
            self._keep_common(0)
        joined = pb.Joined(
            rank=self.rank,
            generation=self.gate.generation,
            needs=self._needs(digests=not self.detached),
            held=self._held(),
            steps=self.script.steps,
            hang_step_s=self.world.config.timeouts.hang_step_s,
            checkpoints=self.world.disk is not None,
            checkpoint_interval_s=self.world.shape.checkpoint_s,
            batches="global" if self.script.micro_batches else "",
            replicas=self.shape.replicas if self.script.micro_batches else 0,
            each=self.shape.each if self.script.micro_batches else 0,
            inner=self.shape.inner if self.script.micro_batches else 0,
        )
        if not self.detached:
            self.gate.initialised()
        self._say(pb.FromWorker(joined=joined))
        await self._recover()

    async def _recover(self) -> None:
        """Carry out commands until the next resume."""
        self.gate.leave_step()
        while not await self._carry_out(await self._inbox.get()):
            pass
        self._resumed()

    def _resumed(self) -> None:
        self._unsettled, self._committed, self._proof_due = True, False, self.gate.generation > 0
        self.proven = not self._proof_due

    async def _compare_objects(self) -> None:
        """Does the registered object differ between the ranks, from the start?"""
        if self.script.thing and self._unequal(await self.port.gather("objects", self.now.thing)):
            self.habits.own = ["thing"]

    def _unequal(self, values: list[int]) -> bool:
        return len(set(values)) > 1

    async def _finished(self) -> bool:
        while True:
            self._settle()
            if self.gate.stopped:
                await self._recover()
            elif self.gate.paused:
                await self._pause()
            elif self.gate.version < self.script.steps:
                return False
            elif await self._wait_for_release():
                return True
            else:
                self._resumed()

    async def _pause(self) -> None:
        if self.gate.pause_with_copies:
            await self.copies.settle()
        self.gate.leave_step(done=True)
        paused = pb.Paused(rank=self.rank, generation=self.gate.generation, version=self.gate.version)
        self._say(pb.FromWorker(paused=paused))
        while not await self._carry_out(await self._inbox.get()):
            pass
        self._resumed()

    async def _wait_for_release(self) -> bool:
        self.gate.leave_step(done=True)
        done = pb.Done(rank=self.rank, generation=self.gate.generation, version=self.gate.version)
        self._say(pb.FromWorker(done=done))
        while True:
            command = await self._inbox.get()
            if command.HasField("release"):
                return True
            if await self._carry_out(command):
                return False

    # -- between two steps ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Before a step is yielded: now its version is complete."""
        if self._void_run:
            self._void_run = False
            self._plain_state(self.gate.version)
        if not self._unsettled:
            return
        self.gate.leave_outside()
        if self._committed:
            self._complete(self.gate.version)
        self._unsettled = False
        if not self.gate.stopped:
            self._publish(self.gate.version)

    def _complete(self, version: int) -> None:
        shown = self.sealing.shown(version)
        for reason in self.habits.learn(version - 1, quiet=True, late=shown.late, changed=shown.changed):
            self._tell_undo(reason)
        self._keep_common(version)
        self.sealing.complete(version, shown)
        self.world.settled(self, version)

    def drawn(self) -> Drawn:
        """All that is this rank's own, by which it is seen whether it has changed."""
        return self.now.own, self.now.thing if self.habits.own else 0

    def _publish(self, version: int) -> None:
        if self._committed and self.world.disk is not None and self._announced == version:
            self._save(version)
        if not self._committed and version in self.local_state.at:
            self.page.write_local_state(version, self.local_state.at[version])
        self.copies.start(version)

    # -- a step ---------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """One step, and what the script does below it. If it is stopped, the recovery."""
        self.sealing.step_begins()
        step = self.gate.version
        self.gate.begin()
        self.gate.enter_block()
        try:
            await self._body(step)
        except StepInterrupted:
            await self._recover()
            self._void_run = True
        except PeerLost:
            if not await self._wait_for_stop():
                raise
            await self._recover()
            self._void_run = True
        finally:
            self.gate.leave_block()
        if self.script.below or self.script.below_every:
            await self._work(self.script.optimizer_s)
        self.now = content.below(self.script, self.now, step)

    async def _wait_for_stop(self) -> bool:
        loop = self.world.loop
        left_s, last = self.world.config.timeouts.peer_error_wait_s, loop.now
        while not self.gate.stopped and left_s > 0:
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            if self.controller_heard and not self.gate.held:
                left_s -= min(loop.now - last, _LOOK_S)
            last = loop.now
        return self.gate.stopped

    async def _body(self, step: int) -> None:
        gate, script, rank = self.gate, self.script, self._like
        await self._work(script.forward_s / 2)
        gate.check()
        self.now = content.forward(script, rank, self.now)
        seen = content.read(script, self._fetch(self.now.own.position))
        await self._work(script.forward_s / 2)
        gate.check()
        self.page.beat()
        self.sealing.forward_ends(step + 1)
        await self._waiting(self.copies.wait())
        await self._work(script.backward_s)
        gradients = await self._gradients(seen)
        if script.late_buffer:  # as a gate's bias is, by the gradients of all ranks
            self.now = content.changed(self.now, content.mix(*gradients))
        gate.check()
        await self._before_mutation(step)
        await self._mutate()
        whole = self.now
        self.now = replace(whole, weights=-1, unique=-1)  # torn
        await self._work(script.optimizer_s)
        self.plain = content.PLAIN if step == 0 else self.plain
        self.now = content.update(script, rank, whole, content.mix(*gradients), step, self.plain)
        gate.check()
        if self._proof_due:
            await self._show_equal()
        gate.commit(outside=True)
        self._unsettled = self._committed = True
        self._proof_due = False
        self.world.committed(self)

    async def _gradients(self, seen: int) -> list[int]:
        """Of all ranks, or of all micro-batches of an elastic job's step."""
        script, (place, size) = self.script, self.shape.place(self.members, self.rank)
        if not script.micro_batches:
            mine = content.gradient(script, self.rank, self.now, seen)
            return list(await self._waiting(self.port.gather("sync", mine)))
        numbers = content.batch_split(script, place, size)
        computed = {n: content.micro_gradient(script, self.now, seen, n) for n in numbers}
        of_all = await self._waiting(self.port.gather("sync", tuple(computed.items())))
        return self.world.laws.split(self, dict(zip(self.members, of_all, strict=True)))

    def _fetch(self, position: int) -> bytes:
        """The next batch; after a discarded attempt, the one that was handed out then."""
        batch, digest = self._batches.get(position, (b"", 0))
        if not batch or content.digest_of(batch) != digest:
            batch = content.batch_of(self._like, position)
            digest = content.digest_of(batch)
        self._batches[position] = (content.written(batch) if self.script.in_place else batch, digest)
        self._batches.pop(position - 4, None)
        return batch

    async def _before_mutation(self, step: int) -> None:
        habits = self.habits
        sealed = self.sealing.mutation_begins(step + 1)
        if self.copies.local_states_only:
            await self._waiting(self.copies.send_local_state(step + 1, sealed=sealed))
        needs_undo = habits.needs_undo
        if divergence_check.is_due(step):
            await self._barrier(self._compare_habits())
        elif self.copies.local_states_only or (self.script.unique and not self.copies.undo_on) or habits.reseal:
            await self._barrier(self.port.gather("barrier", 0))
        self.copies.before_mutation(step, needs_undo=needs_undo or habits.needs_undo)

    async def _compare_habits(self) -> None:
        habits = self.habits
        thing = self.now.thing if self.script.thing and not habits.own else 0
        rows = await self.port.gather("habits", (habits.undo, habits.changed, habits.late, thing))
        habits.undo = any(row[0] for row in rows)
        habits.changed = habits.reseal = any(row[1] for row in rows)
        habits.late = any(row[2] for row in rows)
        if self._unequal([row[3] for row in rows]):
            habits.own = ["thing"]

    async def _show_equal(self) -> None:
        thing = self.now.thing if self.script.thing and not self.habits.own else 0
        try:
            await self._agree((self.now.weights, self.now.rate, thing))
            self.proven = True
        except PeerLost:
            if not self.gate.stopped and not await self._wait_for_stop():
                raise

    async def _agree(self, mine: tuple[int, int, int]) -> None:
        if len(set(await self._waiting(self.port.gather("proof", mine)))) > 1:
            raise DivergedError("after the recovery the ranks have redone a step, and do not agree")

    async def _mutate(self) -> None:
        while True:
            self._changed.clear()
            try:
                self.gate.mutate()
                break
            except WouldWait:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.03 if self.page.lease_over() else None)
        self.world.mutates(self, self._held_for)

    async def _barrier(self, collective: Any) -> None:
        try:
            with self.gate.in_barrier():
                await self._waiting(collective)
        except PeerLost:
            if not await self._wait_for_stop():
                raise
            self.gate.check()

    def _tell_undo(self, step: int) -> None:
        self._say(pb.FromWorker(notice=pb.Notice(rank=self.rank, kind="pre_step_copy_enabled", text="late", step=step)))

    # -- plain state --------------------------------------------------------------------------------

    def write(self, version: int, drawn: Drawn, *, early: bool) -> None:
        """Its rank-local state of ``version``."""
        newest = max(self._digests, default=-1)
        shared = (newest, self._digests.get(newest, 0))
        thing = self.now.thing if self.habits.own else None
        data = self.now.own.pack() + json.dumps([thing, *shared]).encode()
        self.local_state.keep(version, data, early=early)
        self.page.write_local_state(version, data, early=early)

    def finish(self, version: int) -> None:
        """What was written early is what it is."""
        self.local_state.early.discard(version)
        self.page.finish_local_state(version)

    def _keep_common(self, version: int) -> None:
        """With the registered object, and its digests of this version and the one before, while it is taken for
        equal on all ranks."""
        common = bool(self.script.thing) and not self.habits.own
        if common:
            self._digests[version] = self.now.thing
            self._digests.pop(version - 4, None)
        digests = [self._digests.get(v) if common else None for v in (version, version - 1)]
        said = [self.now.rate, asdict(self.habits), self.now.thing if common else None, *digests]
        self.common.keep(version, json.dumps(said).encode())

    def tensor_names(self) -> list[str]:
        return [self.param, f"zero@{self.rank}"] if self.script.unique else [self.param]

    def _needs(self, *, digests: bool) -> list[pb.ShardNeed]:
        needs = [
            pb.ShardNeed(name=self.param, nbytes=100, digest=f"{self.now.weights:x}" if digests else ""),
            pb.ShardNeed(name="common", nbytes=10),
            pb.ShardNeed(name=f"capsule@{self.rank}", nbytes=10),
        ]
        if self.script.unique:
            needs.append(pb.ShardNeed(name=f"zero@{self.rank}", nbytes=50))
        return needs

    def _held(self) -> list[pb.Held]:
        held = []
        for name, kept in (("common", self.common), (f"capsule@{self.rank}", self.local_state)):
            held += [
                pb.Held(kind="undo", version=v, shards=[name], nbytes=[10], early=v in kept.early)
                for v in sorted(kept.at)
                if v != self.gate.live
            ]
        early = self.page.early_local_states()
        held += [
            pb.Held(
                kind="page",
                version=v,
                shards=[f"capsule@{self.rank}"],
                nbytes=[0],
                early=v in early,
            )
            for v in self._in_page()
        ]
        return held + self.copies.inventory()

    def _in_page(self) -> list[int]:
        """As the real one: also after this process has come into the loop, what is from before that."""
        versions = self.page.local_state_versions()
        return versions if self.detached else [v for v in versions if v < self.came_at and v not in self.local_state.at]

    # -- commands -----------------------------------------------------------------------------------

    async def _carry_out(self, command: pb.Command) -> bool:
        """True after a resume."""
        if self.gate.outdated(command.generation):
            return False
        body = command.WhichOneof("body")
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=self.rank)
        resumed = False
        try:
            if body == "stop":
                await self._stop(command, reply)
            elif body == "leave":
                raise Left
            elif body == "regroup":
                await self._regroup(command)
            elif body == "restore":
                await self._restore(command.restore, reply)
            elif body == "resume":
                await asyncio.sleep(max(self.busy_until - self.world.loop.now, 0.0))
                resumed = await self._resume(command)
        except (PeerLost, StepInterrupted, DrainError, DivergedError) as e:
            if self.gate.outdated(command.generation):
                return False
            reply.error_type, reply.error = type(e).__name__, str(e)
            reply.fatal = isinstance(e, DivergedError)
        await asyncio.sleep(0.0002 + 0.004 * self.world.random.random())
        self._say(pb.FromWorker(reply=reply))
        return resumed

    async def _regroup(self, command: pb.Command) -> None:
        if command.regroup.members:
            self.members = self.copies.next_members = tuple(command.regroup.members)
        await self.port.attach(command.generation, command.regroup.deadline_s, self.members)

    async def _stop(self, command: pb.Command, reply: pb.Reply) -> None:
        await self.copies.stop()
        self.port.detach()
        if self.dirty:
            await self._drain()
        reply.live_version = self.gate.live
        reply.held.extend(self._held())
        reply.late.extend(sorted(v for v, late in self.sealing.late.items() if late))
        if self._needs_told != command.stop.needs_known or not self._needs_told:
            reply.needs.extend(self._needs(digests=False))
        self._needs_told = command.generation

    async def _drain(self) -> None:
        """An operation does not let go of its tensors: it will still write into them, some time later."""
        await asyncio.sleep(self.world.config.timeouts.drain_s)
        self.process.call(0.2 * self.world.random.random(), self._scribble)
        if not self._quiet():
            self.spoilt = True
            raise DrainError("something still runs")

    def _quiet(self) -> bool:
        return False

    def _scribble(self) -> None:
        self.now = replace(self.now, weights=-2)

    def _save(self, version: int) -> None:
        """This rank's part of a checkpoint, written in the background."""
        self._announced = -1
        part = self.now, self.common.at[version], self.local_state.at[version]
        self.process.call(0.02 + 0.2 * self.world.random.random(), self._saved, version, part)

    def _saved(self, version: int, part: Any) -> None:
        disk = self.world.disk
        assert disk is not None
        path = disk.write(version, self.gate.generation, self.rank, part)
        if path:
            saved = pb.CheckpointSaved(version=version, path=path, seconds=0.1, k0_s=0.001)
            self._say(pb.FromWorker(checkpoint=saved))

    def _load(self, path: str, version: int) -> None:
        disk = self.world.disk
        assert disk is not None
        self.gate.torn()
        self._fresh = True
        self.now, common, local_state = disk.published[path][self.rank]
        self.common.keep(version, common)
        self.local_state.keep(version, local_state)

    async def _restore(self, restore: pb.Restore, reply: pb.Reply) -> None:
        version = restore.version
        if restore.checkpoint:
            self._load(restore.checkpoint, version)
        now = self.now
        own_local_state = f"capsule@{self.rank}"
        for name in restore.local:
            if name == own_local_state:
                if version not in self.local_state.at:
                    data = self.page.read_local_state(version)
                    if data is None:
                        raise PeerLost(f"{name} at version {version} is no longer in the page")
                    self.local_state.keep(version, data)
            elif name != "common":
                self.gate.torn()
                copy = self.copies.undo[version]
                now = self._with(now, name, copy.weights if name == self.param else copy.unique)
        for item in restore.transfers:
            if item.source == self.rank:
                value = self._source(item, version)
                reply.sent_digests[item.shard] = repr(value)
                self.port.send(item.dest, ("restore", item.shard, restore.version), value)
        for item in restore.transfers:
            if item.source == self.rank:
                continue
            self.gate.torn()
            value = await self._waiting(self.port.receive(item.source, ("restore", item.shard, restore.version)))
            reply.received_digests[item.shard] = repr(value)
            if item.shard == "common":
                self.common.keep(version, value)
            elif item.shard == own_local_state:
                self.local_state.keep(version, value)
            else:
                now = self._with(now, item.shard, value)
        self.now = now
        self._plain_state(version)

    def _with(self, now: Content, shard: str, value: int) -> Content:
        return replace(now, weights=value) if shard == self.param else replace(now, unique=value)

    def _source(self, item: pb.TransferItem, version: int) -> Any:
        if item.shard == "common":
            return self.common.at[version]
        if item.kind == "lent":
            return self.local_state.at[version]
        if item.kind == "copy":
            local_state, unique, _, _ = self.copies.kept[version]
            return local_state if item.shard.startswith("capsule@") else unique
        now = self.copies.undo[version] if item.kind == "undo" and version in self.copies.undo else self.now
        return now.weights if item.shard == self.param else now.unique

    def _plain_state(self, version: int) -> None:
        common, local_state = self.common.at.get(version), self.local_state.at.get(version)
        if common is None or local_state is None:
            raise PeerLost(f"the plain state of version {version} is missing on rank {self.rank}")
        rate, habits, thing, digest, before = json.loads(common)
        own, (own_thing, at, mine) = Own.unpack(local_state), json.loads(local_state[Own.SIZE :])
        theirs = digest if at == version else before if at == version - 1 else None
        if own_thing is None and theirs is not None and mine != theirs:
            raise DivergedError("the registered objects ['thing'] are not equal on all ranks")
        self.habits.restore(StepProfile(**habits))
        self._digests = {v: d for v, d in self._digests.items() if v <= version}
        for found in (thing, own_thing):
            self.now = replace(self.now, thing=self.now.thing if found is None else found)
        self.now = replace(self.now, rate=rate, own=own)
        self.common.drop_after(version)
        self.local_state.drop_after(version)

    async def _told_to_resume(self, version: int, generation: int) -> bool:
        always, chance = self.script.read_amid, self.world.random
        wait_s = (0.3 if always else 3.0) * chance.random()
        if wait_s > 0.3:
            return self.gate.resume(version, generation)
        # while the agent reads the page, if it does so in that time
        skipped = chance.randrange(3) if always else 0
        return await self.page.amid(self.process, lambda: self.gate.resume(version, generation), wait_s, skipped)

    async def _resume(self, command: pb.Command) -> bool:
        version = command.resume.version
        if command.resume.HasField("pause") or command.generation != self.gate.generation:
            pause = command.resume.pause if command.resume.HasField("pause") else pb.Pause(step=-1)
            self.gate.order_pause(pause.step, copies=pause.copies)
        if not await self._told_to_resume(version, command.generation):
            return False
        self.came_at = version if self._fresh else min(self.came_at, version)
        self.detached = self._fresh = False
        self._announced = -1
        self.copies.resumed(version)
        self.world.resumed(self, version)
        return True
